"""The faults that `scripts.verify.chaos` makes in a run, each from outside.

`kill` and `stop` are signals. `hang` stops an actor's engine, not its process (`scripts.verify.hanging_engine`). `fill`
keeps a process's files from growing for a while, as a full disk does. `cut` shuts down the connections of a process.
`lie` joins the run as one more actor, takes leases, and pushes groups that can't be trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from areal_like.run.run_folder import RENDEZVOUS
from areal_like.types import Group, Lease, Sample
from areal_like.wire import messages
from areal_like.wire.client import ActorClient

SWITCH = "hang"
"""A file in an actor's folder: its `scripts.verify.hanging_engine` hangs while the file exists."""
_PIDFD_GETFD = 438  # of Linux, on all processors
_STREAM = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
LIAR = "liar"
LIE_SECONDS = 5.0
"""Most seconds that the liar waits for a lease."""


def stop(pid: int, seconds: float) -> None:
    """Stop the process for a while (SIGSTOP, SIGCONT)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def hang(run: Path, actor: str, seconds: float) -> None:
    """The actor's engine makes no step for `seconds`; its process continues. The engine must be a `HangingEngine`."""
    switch = run / "servers" / actor / SWITCH
    switch.parent.mkdir(parents=True, exist_ok=True)
    switch.touch()
    time.sleep(seconds)
    switch.unlink()


def fill(pid: int, seconds: float) -> None:
    """No file of the process can grow for `seconds` (EFBIG in place of ENOSPC, with the same handling)."""
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
        time.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def cut(pid: int) -> int:
    """Shut down all connections that the process has to services of the run. Returns how many there were."""
    found = 0
    for connection in _connections(pid):
        with contextlib.closing(connection), contextlib.suppress(OSError):
            peer = connection.getpeername()
            if connection.family != socket.AF_UNIX or peer:  # pairs of sockets inside a process have no name
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


def _connections(pid: int) -> Iterator[socket.socket]:
    """Copies of the process's stream sockets; shutting them down shuts down the process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            for fd in [int(name) for name in os.listdir(f"/proc/{pid}/fd")]:
                copy = libc.syscall(_PIDFD_GETFD, handle, fd, 0)
                if copy < 0:
                    continue
                try:
                    found = socket.socket(fileno=copy)
                except OSError:  # not a socket
                    os.close(copy)
                    continue
                if found.family in _STREAM and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()
        finally:
            os.close(handle)


# ---- bad pushes -----------------------------------------------------------------------------------------------------


def _unknown_token(sample: Sample) -> None:
    sample.tokens[-1] = 2**31 - 1


def _negative_token(sample: Sample) -> None:
    sample.tokens[0] = -1


def _likelier_than_certain(sample: Sample) -> None:
    sample.logprobs[0] = 50.0


def _no_number(sample: Sample) -> None:
    sample.logprobs[-1] = np.nan


def _unpublished_version(sample: Sample) -> None:
    sample.runs = [(UNPUBLISHED, count) for _, count in sample.runs]


UNPUBLISHED = 1_000_000
LIES: list[Callable[[Sample], None]] = [
    _unknown_token,
    _negative_token,
    _likelier_than_certain,
    _no_number,
    _unpublished_version,
]


def lie(run: Path, dice: random.Random, keys: str | None = None) -> str:
    """Join the run, take leases, push a bad group for each, and leave. Returns the buffer's answer."""
    return asyncio.run(_lie(run, dice, keys))


async def _lie(run: Path, dice: random.Random, keys: str | None) -> str:
    endpoint = json.loads((run / RENDEZVOUS / "buffer.json").read_text())["endpoint"]
    client = ActorClient(endpoint, LIAR, 16, keys=keys)
    said: list[str] = []
    try:
        client.hello()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIE_SECONDS):
                await _push_lies(client, dice, said)
        client.hand_back([], [], leaving=True)
        await asyncio.sleep(0.2)
    finally:
        client.close()
    return "; ".join(dict.fromkeys(said)) or "got no lease"


async def _push_lies(client: ActorClient, dice: random.Random, said: list[str]) -> None:
    """Push until the buffer has answered."""
    digests: dict[int, str] = {}
    pushed = 0
    while True:
        match (await client.receive()).message:
            case messages.Announce(manifest):  # it claims to hold weights that it never asks for
                digests[manifest.version] = manifest.digest
                client.say(messages.Applied(manifest.version, manifest.digest))
            case messages.Lease(leases):
                for lease in leases:
                    if lease.split == "train":
                        client.push(_bad_group(lease, max(digests), digests, dice))
                        pushed += 1
            case messages.Refused(reason):
                said.append(reason)
                if pushed:
                    return
            case messages.Pushed():
                said.append("accepted" if not said else "")
                return


def _bad_group(lease: Lease, version: int, digests: dict[int, str], dice: random.Random) -> Group:
    samples = [
        Sample(
            tokens=np.array([3, 4, 5, 6], np.int32),
            prompt_length=2,
            logprobs=np.full(2, -1.0, np.float32),
            loss_mask=np.ones(2, bool),
            runs=[(version, 2)],
            reward=0.5,
            finish="stop",
        )
        for _ in range(lease.need)
    ]
    dice.choice(LIES)(dice.choice(samples))
    named = {made: digests.get(made, "f" * 32) for sample in samples for made, _ in sample.runs}
    return Group(lease.group_id, samples, named)
