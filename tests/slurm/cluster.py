"""A real Slurm cluster of several nodes on this machine: munged, slurmctld and one slurmd per node, all of this test's.

Everything lies in a folder of its own (keys, sockets, state, logs), ports are free ones, and nothing of the system's
own Slurm or munge is touched. Nodes are slurmds with the same host and other ports (Debian builds them with
`--enable-multiple-slurmd`). Needs the daemons (Debian: slurm-wlm, munge), and root: slurmd starts jobs as their users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue")
PATIENCE = 60.0
SLURMD_TIMEOUT = 10
"""Seconds after which a slurmd that does not answer is a failed node."""

CONF = Path(__file__).parent / "slurm.conf.in"


def missing() -> str:
    """Why there can't be a cluster on this machine; empty if there can."""
    absent = [name for name in PROGRAMS if not _find(name)]
    if absent:
        return f"no Slurm here ({', '.join(absent)}); as root: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd must be root to start jobs"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


class Cluster:
    """Three nodes of four processors and four GPUs each, on any machine, in `folder`. Used as a context. The GPUs are
    copies of /dev/null: Slurm only deals them out."""

    def __init__(self, folder: Path):
        self.folder, self.nodes = folder, ["n1", "n2", "n3"]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        for name in ("state", "spool", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self._write_conf()
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start_node(node)
            self.until("idle nodes", lambda: self.states() == dict.fromkeys(self.nodes, "idle"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _write_conf(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(self.nodes))
        shape = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 Gres=gpu:4"
        nodes = [f"NodeName={node} Port={port} {shape}" for node, port in zip(self.nodes, ports[1:], strict=True)]
        values: dict[str, Any] = {"host": host, "ports": ports, "here": self.folder, "timeout": SLURMD_TIMEOUT}
        values |= {"nodes": "\n".join(nodes), "names": ",".join(self.nodes)}
        (self.folder / "slurm.conf").write_text(CONF.read_text().format(**values))
        for number in range(4):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-3]\n")

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{name}={self.folder}/munge.{file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self.until("munge", (self.folder / "munge.socket").exists)

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        command = [_find(program) or program, *arguments]
        with (self.folder / f"{name or program}.out").open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._daemons[name or program] = subprocess.Popen(
                command, env=self.environment, start_new_session=True, **streams
            )

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd; its child processes go on, as when a node is cut off from the controller."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(PATIENCE)

    def run(self, *command: str, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """The output of a command that must succeed, in this cluster's environment."""
        environment = self.environment | dict(more or {})
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.last_words()}"
        return done.stdout

    def states(self) -> dict[str, str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"], env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def jobs(self) -> dict[str, str]:
        """Id → state of the jobs that Slurm remembers: elements of arrays one by one, of heterogeneous jobs the first
        part."""
        listed = self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T")
        return dict(line.replace("+0 ", " ").split() for line in listed.splitlines())

    def until(self, what: str, event: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := event():
                return result
            time.sleep(0.1)
        raise AssertionError(f"waited in vain for {what}\n{self.last_words()}")

    def last_words(self) -> str:
        texts = [(path.name, path.read_text(errors="replace")[-1500:]) for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts)

    def __exit__(self, *_: object) -> None:
        """Cancel jobs first, so that none of their processes is left; then end the daemons."""
        if "slurmctld" in self._daemons:
            subprocess.run(["scancel", "-f", "-u", "root"], env=self.environment, capture_output=True, timeout=PATIENCE)
            with contextlib.suppress(AssertionError):
                self.until("the end of the jobs", lambda: not self.run("squeue", "-h"), 20.0)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait(PATIENCE)
        self._daemons.clear()
