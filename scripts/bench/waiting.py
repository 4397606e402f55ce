"""Waiting payloads survive restarts of the buffer: `python -m scripts.bench.waiting [--gib 6] [--json FILE]`.

One real buffer process with `buffer.max_bytes: 16 GiB`; a light actor pushes groups of 2 MB until `--gib` GiB wait, and
a light learner has the journal rotated before the last tenth of them. Then the buffer is killed (SIGKILL) and started
again on the same run folder. It rotates its journal once more, serves a batch, is killed, and started a third time.
Then it serves all batches, and their bytes are compared with the pushed ones.

Shows for each life: seconds until it answers, the most resident memory, how long a rotation made others wait, and the
bytes of the journal. Fails unless the ledger is the same in all lives, each group comes once and unchanged, batch 0
twice and unchanged, and a resumed buffer stays below 1 GiB. The first life holds its pushed payloads in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from areal_like.config import run_config as configs
from areal_like.places import REPOSITORY
from areal_like.types import Group, Sample
from areal_like.wire import messages
from areal_like.wire.bus import Dealer
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import Head, encode_group, pack_heads
from areal_like.wire.messages import Message

from ..console import output
from .buffer_paths import socket_folder
from .figures import bench_parser

GIB, MOST_RESIDENT = 1 << 30, 1 << 30
SAMPLES, PROMPT, RESPONSE = 8, 1000, 27_000
GROUPS_PER_BATCH = 8
IN_FLIGHT = 16
"""Most groups that are pushed but not acknowledged."""
PATIENCE = 600.0


def make_group() -> tuple[Head, bytearray]:
    tokens, zeros = np.zeros(PROMPT + RESPONSE, np.int32), np.zeros(RESPONSE, np.float32)
    sample = Sample(tokens, PROMPT, zeros, np.ones(RESPONSE, bool), [(0, RESPONSE)], 1.0, "stop")
    return encode_group(Group(0, [sample] * SAMPLES, {0: "digest"}, 1.0))


def mark(payload: bytearray, group_id: int) -> bytearray:
    """The group's number, in binary, as its first tokens."""
    payload[: 4 * 32] = np.array([group_id >> bit & 1 for bit in range(32)], np.int32).tobytes()
    return payload


M = TypeVar("M", bound=Message)


@dataclass
class Life:
    """Measurements of one buffer process; see the top."""

    ready_seconds: float
    ledger: dict[str, Any] = field(default_factory=dict)
    rotate_seconds: float = 0.0
    most_resident: int = 0
    journal_bytes: int = 0
    read: list[list[int]] = field(default_factory=list)


class Peer:
    """The actor, or the learner, of one life of the buffer."""

    def __init__(self, endpoint: str, name: str, slots: int = 0):
        self.dealer = Dealer(endpoint, name, peer="buffer")
        role = "actor" if slots else "learner"
        self.dealer.send(messages.Hello(role, name, os.getpid(), slots))
        self.hear(messages.Welcome)

    def hear(self, *kinds: type[M]) -> tuple[M, Payloads]:
        """The next message of these kinds. Ends the program if none comes."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            message, payloads = self.dealer.receive(1.0) or (None, ())
            if isinstance(message, messages.Refused):
                sys.exit(f"refused: {message.reason}")
            if isinstance(message, kinds):
                return message, payloads
        sys.exit(f"no {' or '.join(kind.kind() for kind in kinds)} for {PATIENCE:.0f} s")

    def status(self) -> dict[str, Any]:
        self.dealer.send(messages.Status())
        return self.hear(messages.Report)[0].report


class Pusher(Peer):
    """An actor that has every group ready."""

    def __init__(self, endpoint: str, groups: int):
        super().__init__(endpoint, "actor-0", slots=groups * SAMPLES)
        self.head, self.payload = make_group()
        self.leased: deque[int] = deque()
        self.on_the_way = self.pushed = 0

    def start(self) -> None:
        self.hear(messages.Announce)
        self.dealer.send(messages.Applied(0, "digest"))

    def push_until(self, groups: int) -> None:
        """All of them acknowledged."""
        while self.pushed < groups:
            while self.leased and self.on_the_way < min(IN_FLIGHT, groups - self.pushed):
                self.head.id = self.leased.popleft()
                payload = bytes(mark(self.payload, self.head.id))
                self.dealer.send(messages.Push(pack_heads([self.head])), [payload])
                self.on_the_way += 1
            message, _ = self.hear(messages.Lease, messages.Pushed)
            if isinstance(message, messages.Lease):
                self.leased += [lease.group_id for lease in message.leases]
            elif isinstance(message, messages.Pushed):
                self.on_the_way -= len(message.ids)
                self.pushed += len(message.ids)


class Reader(Peer):
    """The learner."""

    def publish(self, version: int) -> None:
        self.dealer.send(messages.Published(messages.Manifest(version, "digest")))

    def rotate(self) -> float:
        """Seconds until the buffer answers again."""
        begin = time.perf_counter()
        self.dealer.send(messages.Checkpointed(0))
        self.status()
        return time.perf_counter() - begin

    def read(self, index: int) -> list[int]:
        """The groups of a batch, with a check of their bytes."""
        self.dealer.send(messages.Want(index, index))
        batch, payloads = self.hear(messages.Batch)
        ids = [group_id for group_id, _, _ in batch.table.groups]
        payload = make_group()[1]
        for group_id, found in zip(ids, payloads, strict=True):
            if bytes(found) != mark(payload, group_id):
                sys.exit(f"group {group_id} is not what was pushed")
        return ids


@contextlib.contextmanager
def buffer_process(run: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], float]]:
    """Yields its endpoint, the process and the seconds until it was ready; kills it at the end."""
    offer = run / "rendezvous/buffer.json"
    offer.unlink(missing_ok=True)
    with socket_folder() as sockets:
        command = [sys.executable, "-m", "buffer.main", "--run", str(run), "--name", "buffer"]
        begin = time.perf_counter()
        with (run / "buffer.log").open("a") as log:
            process = subprocess.Popen([*command, "--sockets", str(sockets)], cwd=REPOSITORY, stderr=log)
        try:
            while not offer.exists():
                if process.poll() is not None:
                    sys.exit((run / "buffer.log").read_text())
                time.sleep(0.02)
            yield json.loads(offer.read_text())["endpoint"], process, time.perf_counter() - begin
        finally:
            process.kill()
            process.wait()


def most_resident(pid: int) -> int:
    """Bytes, of its whole life."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def live(run: Path, groups: int, number: int) -> Life:
    """One life of the buffer, to its SIGKILL."""
    with buffer_process(run) as (endpoint, process, seconds):
        life, learner = Life(seconds), Reader(endpoint, "learner")
        learner.publish(0)
        if number == 0:
            actor = Pusher(endpoint, groups)
            actor.start()
            actor.push_until(groups * 9 // 10)
            life.rotate_seconds = learner.rotate()
            actor.push_until(groups)
        else:
            life.rotate_seconds = learner.rotate()
        life.ledger = learner.status()["ledger"]
        for index in range([0, 1, groups // GROUPS_PER_BATCH][number]):
            life.read.append(learner.read(index))
            learner.dealer.send(messages.Trained(index))
            learner.publish(index + 1)
        life.most_resident = most_resident(process.pid)
        life.journal_bytes = sum(path.stat().st_size for path in (run / "journal").iterdir())
    return life


def measure(gib: float, journal: str, folder: Path) -> list[Life]:
    groups = int(gib * GIB / make_group()[0].size / GROUPS_PER_BATCH) * GROUPS_PER_BATCH
    spec = [str(REPOSITORY / "configs/base.yaml"), "buffer.transport=ipc", f"buffer.journal={journal}"]
    spec += [f"buffer.max_bytes={16 * GIB}", "actors.count=1", "eval.prompts=0"]
    spec += [f"groups_per_batch={GROUPS_PER_BATCH}", f"sizing.group_size={SAMPLES}"]
    spec.append(f"scheduler.max_staleness={groups // GROUPS_PER_BATCH - 1}")
    configs.save(configs.load(spec), folder / "config.yaml")
    return [live(folder, groups, number) for number in range(3)]


def check(lives: list[Life]) -> list[str]:
    """The violations found, in words."""
    wrong = [f"ledger {life.ledger}, at first {lives[0].ledger}" for life in lives if life.ledger != lives[0].ledger]
    resident = max(life.most_resident for life in lives[1:])
    if resident > MOST_RESIDENT:
        wrong.append(f"a resumed buffer took {resident / GIB:.2f} GiB of memory")
    if lives[1].read != lives[2].read[:1]:
        wrong.append(f"batch 0 was {lives[1].read}, and then {lives[2].read[:1]}")
    if sorted(group_id for ids in lives[2].read for group_id in ids) != list(range(lives[0].ledger["admitted"])):
        wrong.append("not every group came once")
    return wrong


def main() -> int:
    parser = bench_parser("waiting", __doc__)
    parser.add_argument("--gib", type=float, default=6.0, help="GiB of payloads that wait")
    parser.add_argument("--journal", choices=["memory", "fsync"], default="memory")
    parser.add_argument("--dir", type=Path, help="where the journal is written (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.dir) as folder:
        lives = measure(args.gib, args.journal, Path(folder))
    columns = ("life", "ready, s", "most resident, GiB", "rotation, ms", "journal, GiB")
    table = output.table(f"{lives[0].ledger['active']:,} groups wait, {args.gib} GiB", *columns)
    for name, life in zip(("filled", "resumed", "resumed again"), lives, strict=True):
        numbers = (life.ready_seconds, life.most_resident / GIB, 1000 * life.rotate_seconds, life.journal_bytes / GIB)
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    output.console().print(table)
    wrong = check(lives)
    print("\n".join(wrong) or f"the same ledger in all lives: {lives[0].ledger}")
    if args.json:
        resident = max(life.most_resident for life in lives[1:])
        output.write_json(args.json, {"resumed_resident_bytes": resident, "faults": len(wrong)})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
