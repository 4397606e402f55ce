"""Sizes by free memory: chosen once, by the rank with the least, and the same bits as if they had been set."""

from collections.abc import Callable

import pytest
import torch

from learners import sizing
from learners.learner import TorchLearner
from learners.sizing import MOST_LOGITS, MOST_TOKENS, TRIAL_LOGITS
from tests.learners.batches import make_batch
from tests.learners.test_learner import learner_of
from tests.seeds import seeded

MIB, LEAST, FEW = 1 << 20, TRIAL_LOGITS * 16, {"max_logits": TRIAL_LOGITS}
"""Bytes per token in these tests, and of the fewest logits."""


class Memory:
    """So many bytes are free; a pass takes a MiB for each token, an eighth of that when layers are recomputed, 100
    besides, and the first one `once` more."""

    once = 0

    def __init__(self, learner: TorchLearner, free: int):
        self.learner, self.bytes = learner, free

    def free(self) -> int:
        return self.bytes

    def peak(self, run: Callable[[], int]) -> tuple[int, int]:
        tokens = run()
        lean = "_recomputed" in str(self.learner.model.base_model.layers[0].forward)
        once, self.once = self.once, 0
        return tokens, 100 * MIB + once + tokens * (MIB // 8 if lean else MIB)


def sized(free: int, **knobs: object) -> tuple[TorchLearner, list[str]]:
    """A learner on a CPU that chooses its sizes, after a train step, and its notes."""
    learner, notes = learner_of(num_minibatches=1, **knobs), list[str]()
    learner.sizing._memory, learner.sizing.open = Memory(learner, free), True
    learner.sizing.announce = notes.append
    learner.train(make_batch(seeded(0)))
    return learner, notes


@pytest.mark.parametrize(
    ("free", "knobs", "tokens", "logits", "lean"),
    [
        (1 << 50, {}, MOST_TOKENS, MOST_LOGITS, False),
        (40_100 * MIB + LEAST, FEW, 39 * 1024, TRIAL_LOGITS, False),
        (40_100 * MIB, {}, 29 * 1024, 625 * MIB, False),
        (4_100 * MIB + LEAST, FEW, 31 * 1024, TRIAL_LOGITS, True),
        (4_100 * MIB + LEAST, FEW | {"checkpoint_activations": False}, 3 * 1024, TRIAL_LOGITS, False),
        (0, {}, 1024, TRIAL_LOGITS, True),
        (1 << 50, {"micro_batch_tokens": 64}, 64, MOST_LOGITS, False),
    ],
)
def test_open_sizes_follow_the_free_memory(
    monkeypatch, free: int, knobs: dict, tokens: int, logits: int, lean: bool
) -> None:
    monkeypatch.setattr(sizing, "TRIAL_TOKENS", 32)
    learner, notes = sized(free, **knobs)
    found = learner.sizing.found
    whole = {"micro_batch_tokens": tokens, "max_logits": logits, "compile": False, "checkpoint_activations": lean}
    assert found == {name: pytest.approx(size, rel=0.01) for name, size in whole.items() if name not in knobs}
    assert learner._passes.micro_batch_tokens == tokens and not learner.sizing.open
    assert all(f"learner.{name}={size}" in notes[-1] for name, size in found.items())
    again = learner_of(num_minibatches=1, **(knobs | found))
    for each in (learner, again):
        each.train(make_batch(seeded(0)))
    again.train(make_batch(seeded(0)))
    assert again.snapshot().digest() == learner.snapshot().digest(), "the trials leave no trace"


def test_no_token_is_taken_for_a_smaller_one_by_what_libraries_take_once(monkeypatch) -> None:
    monkeypatch.setattr(sizing, "TRIAL_TOKENS", 32)
    monkeypatch.setattr(Memory, "once", MIB)
    learner, _ = sized(40_100 * MIB + LEAST, **FEW)
    assert 30 * 1024 < learner.sizing.found["micro_batch_tokens"] <= 39 * 1024


def test_a_batch_that_trains_nothing_chooses_nothing() -> None:
    learner, batch = learner_of(), make_batch(seeded(0))
    for sample in batch.samples:
        sample.loss_mask[:] = False
    learner.sizing._memory, learner.sizing.open = Memory(learner, 0), True
    learner.train(batch)
    assert learner.sizing.open and not learner.sizing.found


def test_a_model_that_breaks_the_compiler_is_named_and_computed_without_it(monkeypatch, caplog) -> None:
    def breaks(forward: Callable, dynamic: bool) -> Callable:
        def raises(*_: object, **__: object) -> None:
            raise torch._dynamo.exc.TorchDynamoException("no such layer")

        return raises

    plain = learner_of(num_minibatches=1)
    monkeypatch.setattr(torch, "compile", breaks)
    learner, notes = sized(1 << 50, compile=True)
    plain.train(make_batch(seeded(0)))
    assert learner.snapshot().digest() == plain.snapshot().digest()
    assert not learner.sizing._compiling.on and "Qwen2ForCausalLM" in notes[0]
    (warning,) = [each for each in caplog.records if "no such layer" in each.getMessage()]
    assert "Qwen2ForCausalLM" in warning.getMessage()
