"""Calls a function of an untrusted program, in a process with almost no rights.

The program gets the arguments of the calls, never the expected values: the caller compares the results here. With
isolation="full" the kernel enforces (Linux, user namespaces permitted):

- files: none but a memory file system of its own of 1 MiB, as its root; what it may import is loaded before;
- network and other processes: namespaces of its own, with no interface in them and no other process; no sockets;
- no new processes or threads, limits on processor time, address space and file size; a kill from here where the wall
  time is tenfold, as of a program that sleeps;
- no environment variables, no inherited descriptors, no capabilities, and where we are root, another user (nobody).

The sandbox shares the kernel. If the machine forbids user namespaces (some containers), `run` raises SandboxError.
isolation="weak" works everywhere. It is for faulty programs, not for attacks: limits, and an audit hook that refuses
files, sockets, processes and ctypes, which a program can bypass.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from areal_like.tasks.sandboxed import OUT_OF_TIME

_PROGRAM = Path(__file__).with_name("sandboxed.py")
START_SECONDS = 60.0
"""Wall seconds that a sandbox has to start, not counted as the program's own."""
WALL = 10
"""The wall time of a program, as a multiple of its processor time: a busy machine must not change a result."""


class SandboxError(OSError):
    """The sandbox itself could not be set up, the machine's fault; nothing of the program was run."""


class OutOfTime(Exception):
    """The program was killed at the end of its seconds."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a program may use: seconds of processor time (rounded up), bytes of address space, bytes per file (its
    results, too)."""

    seconds: float = 5.0
    memory: int = 256 << 20
    output: int = 1 << 20


def run(
    code: str,
    function: str,
    calls: list[list[object]],
    bounds: SandboxLimits = SandboxLimits(),
    isolation: Literal["full", "weak"] = "full",
) -> list[list[object] | None]:
    """What `function`, as `code` defines it, returns for each list of arguments (JSON values): `[value]`, or None
    where it raised, returned nothing that JSON has, or the program had ended. Raises OutOfTime and SandboxError."""
    request = {"code": code, "function": function, "calls": calls, "isolation": isolation, **asdict(bounds)}
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as results,
    ):
        given.write(json.dumps(request).encode())
        given.seek(0)
        _execute(folder, given, results, bounds.seconds)
        results.seek(0)
        found = [_value(line) for line in results.read(bounds.output).split(b"\n")[: len(calls)]]
        return found + [None] * (len(calls) - len(found))


def _execute(folder: str, given: IO[bytes], results: IO[bytes], seconds: float) -> None:
    # -I: no environment, no user's packages, nothing of this folder; -S: no site-packages.
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_PROGRAM), str(os.getpid())]
    process = subprocess.Popen(
        command, stdin=given, stdout=results, stderr=subprocess.PIPE, cwd=folder, env={}, start_new_session=True
    )
    assert process.stderr is not None
    started, in_time = select.poll(), True
    started.register(process.stderr, select.POLLIN)
    try:
        if started.poll(START_SECONDS * 1000):
            process.wait(WALL * seconds)
            in_time = process.returncode not in (OUT_OF_TIME, -signal.SIGKILL)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        process.kill()
        process.wait()
    with process.stderr as told:
        said = told.read().decode(errors="replace")
    # The program cannot write here, so it cannot pass its own failure off as one of the sandbox.
    if said != "ready":
        raise SandboxError(said[-1000:] or f"no sandbox within {START_SECONDS:g} s")
    if not in_time:
        raise OutOfTime(f"more than {seconds:g} s of processor time, or {WALL * seconds:g} s")


def _value(line: bytes) -> list[object] | None:
    """A line that the program wrote, which may be anything."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and len(value) == 1 else None
