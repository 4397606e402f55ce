"""Training on demonstrations: the gradient, the order of rows, shares of ranks, and metrics."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError
from areal_like.tasks.copying import Reverse
from areal_like.wire.learner_client import Stopped
from learners.advantages import group
from learners.demonstrated import Demonstrated, rows_of
from learners.learner import TorchLearner
from learners.losses.weighted import sft
from tests.learners.batches import tiny_model

TASK = Reverse(0, digits=5, train_size=37, heldout_size=9)


def config_of(*overrides: str):
    return configs.load(["configs/quickstart.yaml", "algorithm=sft", "task={name: reverse}", *overrides])


def source(*overrides: str, score=None, rank: int = 0) -> Demonstrated:
    return Demonstrated(TASK, config_of(*overrides), score, rank)


def batch_at(made: Demonstrated, index: int):
    made.want(index, index)
    return made.batch()[0]


def learner(**knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), sft, partial(group), 1.0, 0, num_minibatches=1, clip_grad=0.0, **knobs)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    rows = rows_of(3, 0, 30, 10)
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [row for first in range(0, 30, 4) for row in rows_of(3, first, 4, 10)][:30] == rows, "however it is cut"
    assert rows_of(4, 0, 30, 10) != rows


def test_the_gradient_is_that_of_plain_cross_entropy() -> None:
    """Written sample by sample without packing, with torch's own loss; masked tokens are read only."""
    trained, batch = learner(), batch_at(source(), 0)
    batch.samples[3].loss_mask[0] = False
    model = tiny_model()
    model.load_state_dict(trained.model.state_dict())
    total, tokens = torch.zeros(()), 0
    for sample in batch.samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, sample.prompt_length - 1 : -1]
        targets = torch.where(torch.from_numpy(sample.loss_mask), ids[0, sample.prompt_length :], -100)
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        tokens += int(sample.loss_mask.sum())
    (total / tokens).backward()
    mean = total.item() / tokens
    metrics = trained.train(batch)
    for p, q in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    assert metrics["loss"] == pytest.approx(mean, rel=1e-5) == pytest.approx(metrics["loss/nll"])
    assert metrics["tokens"] == tokens
    meaningless = ("reward/", "ratio/", "kl/", "ess", "staleness/", "zero_variance_share", "mismatch")
    assert not [name for name in metrics if name.startswith(meaningless) or "/staleness_" in name]


def test_ranks_share_a_batch() -> None:
    whole = batch_at(source(), 3)
    rows = rows_of(config_of().run.seed, 3 * 16, 16, 37)
    shown = [TASK.demonstration("train", row).prompt.tokens.tolist() for row in rows]
    assert [s.tokens[: s.prompt_length].tolist() for s in whole.samples] == shown, "the fourth batch of the epochs"
    shares = [batch_at(source("learner.ranks=3", rank=rank), 3) for rank in range(3)]
    found = {place: g for share in shares for place, g in zip(share.places, share.groups, strict=True)}
    assert sorted(found) == list(range(16))
    for place, each in enumerate(whole.groups):
        np.testing.assert_array_equal(found[place].samples[0].tokens, each.samples[0].tokens)
    tokens = [sum(len(s.tokens) for s in share.samples) for share in shares]
    assert max(tokens) < 1.5 * min(tokens)


def test_the_held_out_loss_is_that_of_trained_tokens() -> None:
    """With logprobs that encode their place: −(place in the sequence), for the token behind it."""
    asked = []

    def score(sequences):
        asked.append(sequences)
        return [[-float(place) for place in range(1, len(each))] for each in sequences], "float32"

    made = source("eval.every=2", "eval.prompts=4", score=score)
    shown = [TASK.demonstration("heldout", row) for row in range(4)]
    places = [p for each in shown for p in range(len(each.prompt.tokens), len(each.prompt.tokens) + len(each.tokens))]
    found = []
    for index in range(3):
        made.want(index, index)
        found.append(made.batch()[1]["evaluations"])
    assert [len(each) for each in found] == [1, 0, 1] and len(asked[0]) == 4
    assert found[0][0]["loss"] == np.mean(places) and found[0][0]["tokens"] == len(places)
    report = made.finish("done", 3)
    assert [each["version"] for each in report["evaluations"]] == [0, 2, 3]


def test_a_pause_ends_it_before_the_next_batch() -> None:
    made = source()
    made.pause()
    assert made.batch(may_pause=False)[0].groups
    with pytest.raises(Stopped):
        made.batch()


def test_a_task_that_demonstrates_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.starting.preflight import check_demonstrations

    with pytest.raises(ConfigError, match="task=reverse"):
        check_demonstrations(SimpleNamespace(), config_of(), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"row 0 of train: \d+ tokens; .*max_position_embeddings=6"):
        check_demonstrations(TASK, config_of("model.max_position_embeddings=6"), None)
