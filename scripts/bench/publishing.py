"""Costs of publishing for a learner: overlap on and off, ranks that publish their own parts, and a gather.

    python -m scripts.bench.publishing [--json FILE] [--versions 6] [--only NAME ...]

Real processes: a learner of one or two ranks (gloo, one thread each) that trains a Qwen2-architecture model of 31 M
parameters on small random batches at lr 1e-6, and publishes after each step; an actor that follows, TCP on loopback.

- `one_overlapped`, `one_serial`: one rank, `weights.overlap` true and false.
- `two_overlapped`, `two_serial`: two ranks, each encodes and serves its own shards.
- `two_gathered`: two ranks; rank 0 gathers all weights tensor by tensor and publishes alone, overlapped: the method
  before parts, for comparison.

Medians over versions, the first two left out (whole weights for all, and warming up): `exposed_ms`, while training
waited; `announced_ms` and `applied_ms`, from the end of the step until all can be fetched, and until the actor has
verified it; `version_ms`, step and publication, from one publication to the next. `between_ranks_bytes` came to rank 0
from the other for one version; `held_bytes` are rank 0's two states. Fails unless the last weights are bit-equal
for all ways of publishing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..console import output
from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    NAMES = ["one_overlapped", "one_serial", "two_overlapped", "two_serial", "two_gathered"]
    parser = bench_parser("publishing", "what publishing costs a learner")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=NAMES)
    ARGUMENTS = parser.parse_args()

import msgpack
import numpy as np
import torch

from areal_like.models.causal_lm import qwen2, read_state
from areal_like.types import Batch, Group, Sample
from areal_like.weights.state import State
from areal_like.wire.messages import Manifest
from buffer.shares import split
from learners.advantages import group
from learners.collectives import join
from learners.follower import OtherRanks
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.publication import Alone, Coding, Publisher
from learners.sharding import Whole, own_part

from .trajectory import KNOBS, VOCAB
from .transfers import ANY_PORT, SECONDS, actor

GROUPS, SIZE, LENGTH = 2, 2, 48
CONTENDERS = {
    "one_overlapped": (1, True, False),
    "one_serial": (1, False, False),
    "two_overlapped": (2, True, False),
    "two_serial": (2, False, False),
    "two_gathered": (2, True, True),
}
"""Ranks, overlap, gathered."""


class Counting(OtherRanks):
    """All ranks publish in step, without messages; counts the bytes from other ranks."""

    came = 0

    def begin(self, version: int) -> None:
        pass

    def gathered(self, report: Any) -> list[Any]:
        reports = super().gathered(report)
        self.came += sum(len(msgpack.packb(each.plain())) for each in reports) - len(msgpack.packb(report.plain()))
        return reports


class Gathering:
    """`Trainer.snapshot` by a gather of all weights; other ranks hand theirs over."""

    came = 0

    def __init__(self, trainer: TorchLearner):
        self._trainer = trainer

    def __call__(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        state, model = into or State(self._trainer.saving.specs), self._trainer.model
        read_state(Whole(dict(model.named_parameters())), state, done)
        self.came += sum(4 * (p.numel() - own_part(p).numel()) for p in model.parameters())
        return state


def share(index: int, rank: int, ranks: int) -> Batch:
    rng = np.random.default_rng(index)
    groups = []
    for number in range(GROUPS):
        samples = [
            Sample(
                tokens=rng.integers(0, VOCAB, LENGTH).astype(np.int32),
                prompt_length=8,
                logprobs=np.full(LENGTH - 8, -np.log(VOCAB), np.float32),
                loss_mask=np.ones(LENGTH - 8, bool),
                runs=[(index, LENGTH - 8)],
                reward=float(place % 2),
                finish="stop",
            )
            for place in range(SIZE)
        ]
        groups.append(Group(id=number, samples=samples, digests={index: f"d{index}"}))
    if ranks == 1:
        return Batch(index, index, groups)
    places = split([SIZE * LENGTH] * GROUPS, ranks)[rank]
    return Batch(index, index, [groups[place] for place in places], places=places)


def learn(name: str, rank: int, folder: str, versions: int, follower: Connection, told: Connection) -> None:
    """One rank's process."""
    ranks, overlap, gathered = CONTENDERS[name]
    torch.set_num_threads(1)
    if ranks > 1:
        join(rank, ranks, Path(folder) / "store", local=True)
    model = qwen2(0, VOCAB, **KNOBS)
    trainer = TorchLearner(model, ppo, partial(group), 1.0, 0, lr=1e-6, num_minibatches=1, ranks=ranks)
    gathering = Gathering(trainer)
    others: Any = Counting(trainer.ranks) if ranks > 1 and not gathered else Alone()
    announced: dict[int, float] = {}

    def announce(manifest: Manifest) -> None:
        announced[manifest.version] = time.monotonic()
        follower.send(manifest)

    publisher = Publisher(ANY_PORT, Coding(overlap=overlap), ignore if rank else announce, others=others)
    began, exposed = list[float](), list[float]()
    for version in range(versions + 1):
        trainer.ranks.barrier()
        began.append(time.monotonic())
        if gathered and rank:
            trainer.saving.hand_over()
        else:
            exposed.append(publisher.publish(version, gathering if gathered else trainer.snapshot))
        if version < versions:
            trainer.train(share(version, rank, ranks))
    manifest = publisher.wait()
    if rank == 0:
        came = gathering.came if gathered else getattr(others, "came", 0)
        said = {"came": came / len(began), "digest": manifest.digest, **publisher.metrics}
        said["held_bytes"] = 2 * publisher._publication._newest.nbytes  # type: ignore[union-attr]
        told.send((began, exposed, [announced[version] for version in range(versions + 1)], said))
    told.recv()  # stay until the actor has fetched everything
    publisher.close()


def ignore(_: Manifest) -> None:
    """Only the first rank announces."""


def measure(name: str, versions: int) -> tuple[dict[str, float], str]:
    """Metrics, and the digest of the last weights."""
    ranks = CONTENDERS[name][0]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    processes = [spawn.Process(target=actor, args=(theirs, 0), daemon=True)]
    pipes = [spawn.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(pipes):
            args = (name, rank, folder, versions, ours, pipe)
            processes.append(spawn.Process(target=learn, args=args, daemon=True))
        for process in processes:
            process.start()
        try:
            ours.recv()  # the actor's offer to relay
            if not pipes[0][0].poll(SECONDS):
                raise TimeoutError(f"{name}: the learner does not answer")
            began, exposed, announced, said = pipes[0][0].recv()
            applied = [_arrival(ours) for _ in range(versions + 1)]
            for pipe, _ in pipes:
                pipe.send(None)
            for process in processes[1:]:
                process.join(30)
        finally:
            for process in processes:
                process.terminate()
                process.join(10)

    def median(values: Any) -> float:
        return 1e3 * float(np.median(np.asarray(values)[2:]))

    found = {
        "exposed_ms": median(exposed),
        "announced_ms": median(np.subtract(announced, began)),
        "applied_ms": median(np.subtract(applied, began)),
        "version_ms": median(np.diff(began)),
        "between_ranks_bytes": said["came"],
        "held_bytes": said["held_bytes"],
        "delta_bytes": said["publish/delta_bytes"],
    }
    return found, said["digest"]


def _arrival(pipe: Connection) -> float:
    if not pipe.poll(SECONDS):
        raise TimeoutError("the actor does not answer")
    return pipe.recv()[0]


def main(args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    metrics, digests = dict[str, float](), dict[int, set[str]]()
    for name in args.only or CONTENDERS:
        found, digest = measure(name, args.versions)
        digests.setdefault(CONTENDERS[name][0], set()).add(digest)
        metrics |= {f"{name}_{key}": value for key, value in found.items()}
        print(f"{name:16s}", *(f"{key} {value:,.1f}" for key, value in found.items()), sep="  ", flush=True)
    if any(len(each) > 1 for each in digests.values()):
        raise AssertionError(f"the last weights differ: {digests}")
    print("the last weights are bit-equal for all ways of publishing")
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main(ARGUMENTS)
