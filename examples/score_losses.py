"""What would other losses do with the same trajectories? Gradients of several losses on the batches of a recorded run.

    python -m examples.score_losses runs/a --loss decoupled_ppo --loss dg --loss reinforce

The run needs `buffer.keep_journal=true`. Each loss has a learner of its own at the run's initial weights (or those of
`--checkpoint FOLDER`), which takes one step per batch with a learning rate of 0: the weights stay, and the gradient is
left in the optimizer's buffer. Prints the norm of each loss's gradient, the norm of its mean over batches, the share of
its variance, and the cosines between losses. A CPU is enough for small models.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from areal_like.config.run_config import Config, load
from areal_like.types import Batch
from areal_like.wire.groups import decode_group
from areal_like.wire.stored import load as load_payload
from buffer.replay_server import recorded_batches
from learners.build import build_trainer
from learners.learner import TorchLearner

FIXED = [
    "learner.ranks=1",
    "learner.lr=0",
    "learner.clip_grad=0",
    "learner.num_minibatches=1",
    "learner.warmup_steps=0",
]


def recorded(run: Path, interval: int) -> Iterator[Batch]:
    """The batches of a run as its learner saw them."""
    for index, (groups, allowed) in enumerate(recorded_batches(run / "journal")):
        decoded = [decode_group(head, load_payload(payload)) for head, payload in groups]
        batch = Batch(index, index // interval, decoded, allowed)
        for sample in batch.samples:
            sample.mask_tokens_before(allowed)
        yield batch


def learner_of(run: Path, loss: str, checkpoint: Path | None) -> tuple[Config, TorchLearner]:
    config = load([str(run / "config.yaml"), f"loss={loss}", *FIXED])
    learner: Any = build_trainer(config)
    if checkpoint:
        learner.load_weights(checkpoint)
    return config, learner


def gradients(learner: TorchLearner, batches: list[Batch]) -> torch.Tensor:
    """[batches, parameters]."""
    found = []
    for batch in batches:
        learner.train(batch)
        found.append(learner.optimizer.gradient.double().cpu().clone())
    return torch.stack(found)


def main(argv: list[str] | None = None) -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--loss", action="append", required=True, metavar="NAME")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args(argv)
    found: dict[str, torch.Tensor] = {}
    for loss in args.loss:
        config, learner = learner_of(args.run, loss, args.checkpoint)
        batches = [b for b in recorded(args.run, config.weight_sync_interval) if b.index < args.batches]
        found[loss] = gradients(learner, batches)
    print(f"{'loss':20} {'norm':>10} {'mean':>10} {'noise':>10}  cosines with {', '.join(found)}")
    for loss, own in found.items():
        norm, mean = own.norm(dim=1).mean(), own.mean(0).norm()
        noise = own.var(0).sum() / mean**2 if len(own) > 1 else torch.tensor(torch.nan)
        cosines = [torch.cosine_similarity(own, other, dim=1).mean().item() for other in found.values()]
        print(f"{loss:20} {norm:10.4g} {mean:10.4g} {noise:10.4g}  {' '.join(f'{each:.2f}' for each in cosines)}")
    return found


if __name__ == "__main__":
    main()
