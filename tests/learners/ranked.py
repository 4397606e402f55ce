"""Train steps of one learner on several ranks: real processes over gloo, each fed its share as the buffer would cut it.

    python -m tests.learners.ranked RANK RANKS FOLDER CASE;CASE;...

trains these of `CASES` and leaves the result in FOLDER/RANK.pt.
"""

import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal_like.models.causal_lm import layers_of, qwen2
from areal_like.types import Batch
from buffer.shares import split
from learners.advantages import distill, group
from learners.collectives import join
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.delightful import dg_kondo
from learners.losses.weighted import reinforce, tpo
from tests.forked import forked, said
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.exact import ADAMW_EPS, exact
from tests.learners.losses.token_batches import THROUGH_A_LEARNER
from tests.seeds import seeded

STEPS = 2
"""The second one has an optimizer's state to start from."""


@dataclass(frozen=True)
class Case:
    """`knobs` of a learner over `model`; its batches have `groups` groups, whose samples have one prompt if `shared`.
    `exact`: computed in float64. `cut`: every third sample was cut at the limit of length. `taught`: by a frozen model.
    """

    loss: Callable[..., Any] = decoupled_ppo
    advantage: Callable[..., Any] = group
    model: str = "qwen2"
    groups: int = 5
    exact: bool = True
    shared: bool = False
    cut: bool = False
    taught: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)


HALF = {"compute_dtype": "bfloat16", "publish_dtype": "bfloat16", "param_dtype": "bfloat16"}
CASES = {
    "plain": Case(),
    "minibatches gone through again": Case(
        ppo, knobs={"num_minibatches": 3, "num_minibatch_epochs": 2, "ess_scale": True}
    ),
    "reference": Case(knobs={"kl_loss": 0.1, "kl_reward": 0.05, "normalise": "sequence_mean"}),
    "cut answers left out": Case(cut=True, knobs={"overlong_filter": True}),
    "plan that skips": Case(partial(dg_kondo, keep=0.3)),
    "plan over groups": Case(tpo, model="llama", knobs={"normalise": "sequence_mean"}),
    "ranks without a group": Case(model="qwen3", groups=1),
    "pieces and recomputing": Case(knobs={"max_logits": 40, "checkpoint_activations": True}),
    "adapters": Case(model="llama", knobs={"lora": {"rank": 3}, "kl_loss": 0.1, "lr": 3e-2}),
    "shared prefixes": Case(shared=True, model="qwen3", knobs={"num_minibatches": 2}),
    "shared prefixes, cut": Case(tpo, shared=True, model="llama", knobs={"micro_batch_tokens": 19, "kl_loss": 0.1}),
    "teacher": Case(advantage=distill, taught=True, knobs={"num_minibatches": 2, "micro_batch_tokens": 23}),
    # With a small eps AdamW would turn the rounding of tiny gradients into whole steps.
    "half parameters": Case(reinforce, exact=False, knobs=HALF | {"micro_batch_tokens": 23, "eps": 1e-2}),
    "adapters beside half": Case(
        model="llama", exact=False, knobs={"lora": {"rank": 3}, "lr": 3e-2, "micro_batch_tokens": 23, **HALF}
    ),
    **{f"loss {name}": Case(loss) for name, loss in THROUGH_A_LEARNER.items()},
}


def batches(case: Case) -> list[Batch]:
    made = [make_batch(seeded(i), index=i, groups=case.groups) for i in range(STEPS)]
    for sample, prompt in [(s, g.samples[0]) for b in made if case.shared for g in b.groups for s in g.samples]:
        sample.tokens[: sample.prompt_length] = prompt.tokens[: prompt.prompt_length]
    for sample in [sample for b in made if case.cut for sample in b.samples[::3]]:
        sample.finish = "length"
    return made


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """What the buffer serves one rank."""
    if ranks == 1:
        return batch
    places = split([sum(len(sample.tokens) for sample in each.samples) for each in batch.groups], ranks)[rank]
    return Batch(batch.index, batch.version, [batch.groups[place] for place in places], places=places)


def learner_of(case: Case, ranks: int) -> TorchLearner:
    knobs = {"lr": 1e-2, "eps": ADAMW_EPS, "num_minibatches": 1, "publish_dtype": "float32"} | case.knobs
    model = exact(tiny_model(case.model)) if case.exact else tiny_model(case.model)
    if case.taught:
        knobs["teacher"] = {"path": teacher()}
    return TorchLearner(model, case.loss, partial(case.advantage), 1.0, 0, ranks=ranks, **knobs)


def train(case: Case, rank: int, ranks: int, checkpoint: Path | None = None) -> dict[str, Any]:
    """Returns each step's metrics, and on rank 0 the final weights, published weights and adapters. Its state is left
    in the folder `checkpoint`."""
    learner = learner_of(case, ranks)
    dtypes = set[str]()
    projection = layers_of(learner.model)[0].mlp.down_proj
    projection.register_forward_hook(lambda module, *_: dtypes.add(str(module.weight.dtype)))
    rows = [learner.train(share(batch, rank, ranks)) for batch in batches(case)]
    held = sum(state.numel() for state in learner.optimizer.state_dict()["adamw"][0].values())
    if checkpoint:
        checkpoint.mkdir(exist_ok=True)
        learner.save_state(checkpoint)
    published = learner.snapshot()
    common = {"rows": rows, "held": held, "lanes": published.lanes(), "part": published.nbytes}
    if rank:
        learner.saving.hand_over()
        return common
    state, adapters = learner.saving.gathered()
    weights = torch.from_numpy(state.buffer)
    found = {"weights": weights, "adapters": adapters, "dtypes": sorted(dtypes), "checkpoint": checkpoint}
    return common | found | {"whole": state.lanes()}


@functools.cache
def teacher() -> str:
    """The folder of a model of another shape with the same tokens. Ranks that have joined would not write one."""
    folder = tempfile.mkdtemp()
    qwen2(5, VOCAB, hidden_size=16, num_hidden_layers=1, initializer_range=0.4).save_pretrained(folder)
    atexit.register(shutil.rmtree, folder)
    return folder


def train_on(ranks: int, folder: Path, *names: str, seconds: float = 240.0) -> list[dict[str, Any]]:
    """By rank: name of a case → what `train` returned there; of the cases named, or of all."""
    arguments = [[str(rank), str(ranks), str(folder), ";".join(names or CASES)] for rank in range(ranks)]
    with forked("tests.learners.ranked", arguments, folder) as running:
        codes = [process.wait(seconds) for process in running]
        assert codes == [0] * ranks, said(folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    teacher()
    join(rank, ranks, folder / "store", local=True)
    names = sys.argv[4].split(";")
    checkpoints = [folder / f"checkpoint-{place}" for place in range(len(names))]
    found = {name: train(CASES[name], rank, ranks, where) for name, where in zip(names, checkpoints, strict=True)}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
