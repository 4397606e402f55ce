"""A learner of several ranks over a model folder or a random model, made whole on each rank and made by shard.

    python -m tests.learners.loaded RANK RANKS FOLDER MODEL

leaves in FOLDER/RANK.pt, by way of making: metrics of a train step, the digests of this rank's part before it, and on
rank 0 of the weights after it.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal_like.models.causal_lm import deferred_weights, folder, qwen2
from learners.advantages import group
from learners.collectives import join
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from tests.learners.batches import make_batch
from tests.learners.ranked import share
from tests.seeds import seeded

RANDOM: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}


def train(path: str, rank: int, ranks: int, by_shard: bool) -> dict[str, Any]:
    with deferred_weights(rank == 0) if by_shard else nullcontext():
        model = folder(0, 13, path=path) if path != "random" else qwen2(0, 301, **RANDOM)
    assert (model.device.type == "meta") is by_shard
    learner = TorchLearner(model, decoupled_ppo, partial(group), 1.0, 0, ranks=ranks, lr=1e-2, kl_loss=0.1)
    found = {"start": learner.snapshot().digest()}
    found["row"] = learner.train(share(make_batch(seeded(0), groups=5), rank, ranks))
    if rank:
        learner.saving.hand_over()
        return found
    return found | {"digest": learner.saving.gathered()[0].digest()}


def main() -> None:
    rank, ranks, place, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    join(rank, ranks, place / "store", local=True)
    found = {by_shard: train(path, rank, ranks, by_shard) for by_shard in (False, True)}
    torch.save(found, place / f"{rank}.pt")


if __name__ == "__main__":
    main()
