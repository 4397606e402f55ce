"""A learner of several ranks that publishes, and actors that follow: real processes over gloo and the ranks' own loop.

    python -m tests.learners.publishing RANK RANKS FOLDER

Rank 0 trains and publishes as `learners.main` does, and has beside it the truth: all weights put together after each
step, published by one rank. What it has seen is left in FOLDER/found.json. The other ranks follow until they are ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor

from actors.relay import Relay
from actors.subscriber import Subscriber
from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch
from areal_like.weights.state import State
from areal_like.weights.update import Update
from areal_like.wire.messages import Manifest
from learners import publication
from learners.advantages import group
from learners.collectives import join
from learners.follower import LeadingTrainer, OtherRanks, follow
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.publication import Coding, Publisher
from learners.sharding import _edges
from tests.forked import forked, said
from tests.learners.batches import make_batch
from tests.learners.ranked import share
from tests.seeds import seeded

VERSIONS = 7
LATE, SLEEPS = 3, range(2, 6)
"""When an actor joins late, and when another one does not follow."""
CODINGS: dict[int, dict[str, Any]] = {
    2: {"block_bytes": 16384, "sweep_every": 1},
    3: {"block_bytes": 8192, "sweep_every": 2},
}
"""By the number of ranks."""


def learner_of(ranks: int) -> TorchLearner:
    """Weights of which each step changes a few percent; vectors of 76 elements don't divide evenly among ranks."""
    model = qwen2(0, 301, hidden_size=76, intermediate_size=101, num_attention_heads=2, num_key_value_heads=1)
    return TorchLearner(model, decoupled_ppo, partial(group), 1.0, 0, lr=1e-6, num_minibatches=1, ranks=ranks)


class Shares:
    """Stands in for a rank's client."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks, self._asked = rank, ranks, list[int]()

    def want_share(self, index: int, rank: int) -> None:
        assert rank == self._rank
        self._asked.append(index)

    def batch(self) -> tuple[Batch, dict[str, Any]]:
        return self.of(self._asked.pop(0)), {}

    def of(self, index: int) -> Batch:
        return share(make_batch(seeded(index), index=index), self._rank, self._ranks)


class Engine:
    """Holds the last weights that it was given."""

    def __init__(self) -> None:
        self.version, self.digest, self.bits = -1, "", b""

    async def load(self, update: Update) -> None:
        self.version, self.digest, self.bits = update.version, update.digest, update.state.buffer.tobytes()


def actor(name: str, folder: Path) -> Subscriber:
    subscriber = Subscriber(Engine(), name, lambda *_: None, sweep_every=1)  # type: ignore[arg-type]
    subscriber.relay = Relay(f"ipc://{folder}/{name}", lambda: subscriber.sources.received, keep=8, snapshot_every=50)
    return subscriber


class Spy:
    """Records what ranks exchange in order to publish, and whether weights are put together for it."""

    def __init__(self, others: OtherRanks):
        self._others, self.told, self.publishing = others, 0, False
        full_tensor = DTensor.full_tensor

        def watched(tensor: DTensor, **options: Any) -> torch.Tensor:
            assert not self.publishing, "a tensor was gathered in order to publish it"
            return full_tensor(tensor, **options)

        DTensor.full_tensor = watched  # type: ignore[method-assign]

    def begin(self, version: int) -> None:
        self.publishing = True
        self._others.begin(version)

    def gathered(self, report: Any) -> list[Any]:
        reports = self._others.gathered(report)
        self.told += sum(len(msgpack.packb(each.plain())) for each in reports)
        self.publishing = False
        return reports


def lead(trainer: TorchLearner, folder: Path) -> dict[str, Any]:
    ranks = trainer.ranks.count
    spy, coding = Spy(OtherRanks(trainer.ranks)), Coding(**CODINGS[ranks])
    manifests, alone = list[Manifest](), list[Manifest]()
    publisher = Publisher(f"ipc://{folder}/w0", coding, manifests.append, others=spy)
    truth = Publisher(f"ipc://{folder}/one", coding, alone.append)
    actors = {name: actor(name, folder) for name in ("follows", "behind a relay", "sleeps", "late")}
    relay = actors["follows"].relay.offer  # type: ignore[union-attr]
    found: dict[str, Any] = {"versions": [], "parts": 0}
    own = LeadingTrainer(trainer)

    def whole() -> State:
        with own._all("hand_over"):
            return trainer.saving.gathered()[0]

    def awake(version: int) -> list[str]:
        asleep = {"late": range(LATE), "sleeps": SLEEPS}
        return [name for name in actors if version not in asleep.get(name, ())]

    for version in range(VERSIONS):
        publisher.publish(version, own.snapshot)
        publisher.wait()
        state = whole()
        truth.publish(version, partial(copied, state))
        truth.wait()
        for name in awake(version):
            relays = [[relay.endpoint, relay.key]] if name == "behind a relay" else []
            asyncio.run(asyncio.wait_for(actors[name].apply(replace(manifests[-1], relays=relays)), 60))
        engines = [actors[name].engine for name in awake(version)]
        found["versions"].append(
            {
                "digests": [manifests[-1].digest, alone[-1].digest, *(engine.digest for engine in engines)],
                "same bits": [engine.bits == state.buffer.tobytes() for engine in engines],  # type: ignore[attr-defined]
                "density": publisher.metrics.get("publish/density"),
                "alone": truth.metrics.get("publish/density"),
            }
        )
        own.train(Shares(0, ranks).of(version))
    found |= {
        "parts": len(manifests[-1].parts),
        "told": spy.told / VERSIONS,
        "whole": state.nbytes,
        "held": publisher._publication._newest.nbytes,  # type: ignore[union-attr]
        "edges": sum(len(_edges(spec, ranks)) for spec in state.specs),
        "syncs": {name: each.totals | dict(each.full_syncs) for name, each in actors.items()},
    }
    for each in (*actors.values(), publisher, truth):
        each.close()
    return found


def copied(sent: State, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
    state = into or State(sent.specs)
    state.buffer[:] = sent.buffer
    if done:
        done(state.nbytes)
    return state


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    publication.BESIDE_FROM = 0 if ranks == 2 else publication.BESIDE_FROM
    join(rank, ranks, folder / "store", local=True)
    trainer = learner_of(ranks)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(lead(trainer, folder)))
        return
    coding, others = Coding(**CODINGS[ranks]), OtherRanks(trainer.ranks)
    publisher = Publisher(f"ipc://{folder}/w{rank}", coding, lambda _: None, others=others)
    follow(trainer, Shares(rank, ranks), publisher, None)  # type: ignore[arg-type]


def publish_on(ranks: int, folder: Path, seconds: float = 240.0) -> dict[str, Any]:
    """What rank 0 of this many ranks has seen."""
    arguments = [[str(rank), str(ranks), str(folder)] for rank in range(ranks)]
    with forked("tests.learners.publishing", arguments, folder) as running:
        assert running[0].wait(seconds) == 0, said(folder)
    return json.loads((folder / "found.json").read_text())


if __name__ == "__main__":
    main()
