"""Start and end of every role process: arguments, log, signals, rendezvous, error reports.

`python -m ROOM.main --run DIR --name NAME --sockets DIR` starts a role. It reads `DIR/config.yaml` and logs to its
standard error (`DIR/logs/NAME.log`). It ends on SIGTERM, and when its starter ends. Roles find one another through
small files in `DIR/rendezvous`, so no ports need to be chosen."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

from areal_like.config.registry import with_defaults
from areal_like.config.run_config import Config, ConfigError, load_resolved, replace
from areal_like.errors import UserError
from areal_like.launch import sockets
from areal_like.run.run_folder import RENDEZVOUS, config_file
from areal_like.wire.bus import NODE, bypass_proxies, deliver, is_loopback, own_address
from areal_like.wire.link import BusError

EXIT_USER_ERROR = 2
"""Exit code for a UserError: starting again would not help."""
EXIT_NO_SPACE = 74
"""Exit code for a full disk (EX_IOERR): the log may not be able to record it."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that was asked to end; 0 means that the work is done."""
EXIT_PAUSED = 75
"""Exit code of learner and starter after a signal stopped the run at a checkpoint (EX_TEMPFAIL: start it again)."""
EXIT_STOPPED = 76
"""Exit code of the learner when a person asked the run to stop."""
EXIT_NODE_FAILED = 254
"""Describes the end of a process whose node is gone."""
TERM_SECONDS = 2
"""Seconds that a role has to end after SIGTERM."""
DELIVERY_SECONDS = 0.5
"""Seconds that a process that was asked to end waits for its last messages to be sent."""
_PR_SET_PDEATHSIG = 1
_MALLOC_KNOBS = {-3: 32 << 20, -1: 256 << 20, -2: 16 << 20}
"""glibc's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, in bytes."""


def on_end(begin: Callable[[], object], seconds: int = TERM_SECONDS) -> None:
    """Call `begin` on SIGTERM, in the main thread between two instructions. The role then has `seconds` to end."""

    def terminate(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_within(seconds)
        begin()

    signal.signal(signal.SIGTERM, terminate)


def on_pause(begin: Callable[[], object]) -> None:
    """Call `begin` on SIGUSR1 (stop at a checkpoint). Until a role calls this, the signal stays blocked: Slurm sends it
    to all processes, also to those without a checkpoint."""
    signal.signal(signal.SIGUSR1, lambda signum, frame: begin())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@dataclass(frozen=True, slots=True)
class Role:
    """Identity of this process. `sockets`: the folder for local sockets (None: tcp only). `grace`: seconds for an
    orderly end after SIGTERM (0: end at once)."""

    name: str
    run: Path
    sockets: Path | None
    config: Config
    grace: int = 0

    @property
    def keys(self) -> str | None:
        """The folder of keys for all connections of this role."""
        return self.config.security.key_folder

    def endpoint(self, service: str) -> str:
        """Where `service` is bound. Raises UserError where anybody could talk to it."""
        buffer = self.config.buffer
        if buffer.transport == "tcp":
            if not self.keys:
                raise UserError("security.key_folder: nothing binds to TCP without keys; scripts.train makes some")
            host = own_address() if buffer.host == NODE else buffer.host
            return f"tcp://{host}:{buffer.port if service == 'buffer' else 0}"
        return f"{buffer.transport}://{self.sockets}/{service}"

    def own_endpoint(self) -> str:
        """Endpoint at which this role binds a service that only it offers."""
        if self.config.buffer.transport == "tcp":
            return f"tcp://{'127.0.0.1' if is_loopback(self.config.buffer.host) else own_address()}:0"
        return f"{self.config.buffer.transport}://{self.sockets}/w{os.getpid()}"

    def offer(self, service: str, endpoint: str) -> None:
        folder = self.run / RENDEZVOUS
        folder.mkdir(exist_ok=True)
        beside = folder / f".{service}.{os.getpid()}"
        offer = {"endpoint": endpoint, "pid": os.getpid(), "host": socket.gethostname()}
        beside.write_text(json.dumps(offer), encoding="utf-8")
        beside.replace(folder / f"{service}.json")

    def offered(self, service: str) -> str | None:
        """Endpoint of a service; empty if it is not there, None if its file cannot be read now."""
        try:
            return str(json.loads((self.run / RENDEZVOUS / f"{service}.json").read_bytes())["endpoint"])
        except FileNotFoundError:
            return ""
        except OSError:  # a network file system has such moments
            return None

    def find(self, service: str) -> str:
        """Wait for a service and return its endpoint. Raises BusError after `launcher.ready_timeout` seconds."""
        deadline = time.monotonic() + float(with_defaults("launcher", self.config.launcher).get("ready_timeout", 120.0))
        while time.monotonic() < deadline:
            if endpoint := self.offered(service):
                return endpoint
            time.sleep(0.02)
        raise BusError(f"{self.name} gave up waiting for the {service} to start: see its log in {self.run}/logs")


def end_with_starter(starter: int) -> None:
    """Ask Linux for SIGTERM when the starter ends. A forked process watches it itself (`areal_like.launch.forks`)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux's
    if prctl and not multiprocessing.parent_process():
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != starter:  # the starter ended during this start: no signal will come
            sys.exit(EXIT_TERMINATED)


def _config_of(run: Path, path: Path) -> Config:
    """The config in `path`, or in its later place. Raises ConfigError."""
    try:
        return load_resolved(path)
    except ConfigError:
        if (later := config_file(run)) == path:
            raise
        return load_resolved(later)


def prepare_process() -> None:
    """Raise the limit of open files, of which each peer takes one, and tune malloc and the garbage collector for
    batches: megabytes that come and go, and many small objects without cycles."""
    bypass_proxies()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS: the true limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(20_000, 20, 20)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        for knob, value in _MALLOC_KNOBS.items():
            mallopt(knob, value)


def end_within(seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


class Terminated(SystemExit):
    """SIGTERM has arrived."""


def _terminate(signum: int, frame: object) -> None:
    """Unwind the stack, so that sockets are closed and files finished. An alarm ends the process if that hangs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_within(TERM_SECONDS)
    raise Terminated(EXIT_TERMINATED)


def _explain(error: Exception) -> tuple[str, int]:
    """The message for a person about an error that ends a role, and its exit code."""
    if isinstance(error, UserError):
        return str(error), EXIT_USER_ERROR
    explained = isinstance(error, BusError | ValueError) or (isinstance(error, OSError) and error.errno)
    return str(error) if explained and str(error) else f"{type(error).__name__}: {error}", _code(error)


def _code(error: BaseException | None) -> int:
    """The exit code for an error. Libraries wrap the error of a full disk in their own, or quote its text."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(error):
            return EXIT_NO_SPACE
        error = error.__cause__ or error.__context__
    return 1


def run_role(main: Callable[[Role], None]) -> None:
    """Set up the process, call `main(role)`, and turn an error into one line and an exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sockets", type=Path, help="folder for the sockets of one machine (ipc)")
    parser.add_argument("--grace", type=int, default=0, help="seconds for an orderly end after SIGTERM; 0: end at once")
    parser.add_argument("--guest", action="store_true", help="a resume need not wait for this process to end")
    parser.add_argument("--keys", help="folder of keys (default: that of the config)")
    parser.add_argument("--starter", type=int, default=os.getppid(), help="the process that asked for this one")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    args = parser.parse_args()
    # Seen by py-spy and ps: the name first, then the arguments; by top: the name. One without a space: Slurm's
    # linuxproc plugin and others split /proc/PID/stat at spaces, and would not find a process that has one there.
    setproctitle(" ".join([args.name, "areal_like", *sys.argv[1:]]))
    setthreadtitle(args.name)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGUSR2, lambda signum, frame: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held = None if args.guest else config_file(args.run).open(encoding="utf-8")
    if held:  # until the process ends: no resume may begin before, even if the starter is dead
        fcntl.flock(held, fcntl.LOCK_SH)
    end_with_starter(args.starter)
    prepare_process()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {args.name} %(levelname)s %(message)s"
    )
    try:
        config = _config_of(args.run, Path(held.name) if held else config_file(args.run))
        if args.keys:
            config = replace(config, "security.key_folder", args.keys)
        main(Role(args.name, args.run, args.sockets, config, args.grace))
    except Terminated:
        deliver(DELIVERY_SECONDS)
        forked_by = multiprocessing.parent_process()
        if args.sockets and not (forked_by.is_alive() if forked_by else os.getppid() == args.starter):
            sockets.clear(args.sockets)  # in place of the starter, which is gone; the last role to do it succeeds
        logging.shutdown()
        os._exit(EXIT_TERMINATED)  # all is closed; Python would take torch apart first, which takes a second or two
    except Exception as error:
        text, code = _explain(error)
        with contextlib.suppress(OSError):  # the log's disk may be full
            logging.error("ending after an error", exc_info=error)
            print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)  # the launcher shows this line
        sys.exit(code)
