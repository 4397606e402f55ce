"""A learner of several ranks that publishes, and an actor that follows: real processes and the ranks' own loop.

    python -m tests.learners.publishing RANK RANKS FOLDER

Rank 0 trains and publishes as `learners.main` does, and has beside it the truth: all weights put together after each
step. What it has seen is left in FOLDER/found.json. The other ranks follow until they are ended.
"""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.subscriber import Subscriber
from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch
from areal_like.weights.replica import Update
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

VERSIONS = 5
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

    redo = 0

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

    digest, bits = "", b""

    async def load(self, update: Update) -> None:
        self.digest, self.bits = update.digest, update.state.buffer.tobytes()


def lead(trainer: TorchLearner, folder: Path) -> dict[str, Any]:
    ranks, coding = trainer.ranks.count, Coding(**CODINGS[trainer.ranks.count])
    manifests, engine = list[Manifest](), Engine()
    publisher = Publisher(f"ipc://{folder}/w0", coding, manifests.append, others=OtherRanks(trainer.ranks))
    actor = Subscriber(engine, "actor", lambda *_: None, sweep_every=1)  # type: ignore[arg-type]
    found: dict[str, Any] = {"versions": []}
    own = LeadingTrainer(trainer)
    for version in range(VERSIONS):
        publisher.publish(version, own.snapshot)
        publisher.wait()
        with own._all("hand_over"):
            state = trainer.saving.gathered()[0]
        asyncio.run(asyncio.wait_for(actor.apply(manifests[-1]), 60))
        found["versions"].append(
            {
                "digests": [manifests[-1].digest, state.digest(), engine.digest],
                "same bits": engine.bits == state.buffer.tobytes(),
                "density": publisher.metrics.get("publish/density"),
            }
        )
        own.train(Shares(0, ranks).of(version))
    found |= {
        "parts": len(manifests[-1].parts),
        "whole": state.nbytes,
        "held": publisher._newest.nbytes,  # type: ignore[union-attr]
        "edges": sum(len(_edges(spec, ranks)) for spec in state.specs),
        "deltas": actor.totals["deltas"],
    }
    actor.close(), publisher.close()
    return found


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
