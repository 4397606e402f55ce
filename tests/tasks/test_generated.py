"""Generated prompts depend only on (seed, split, row), splits are disjoint, rewards and lengths are known. Mixed tasks:
their turns, the parts that each keeps, and refused mixtures."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from areal_like.config.registry import ConfigError, build
from areal_like.tasks.arithmetic import Arithmetic
from areal_like.tasks.copying import SEP, Copy, Reverse
from areal_like.tasks.episodes import SEEDS, Episodes, seed_of
from areal_like.tasks.generated import SAMPLES, SPLITS, LengthTrace
from areal_like.types import Prompt
from buffer.prompts import PromptCursor, shares_of

BUILDERS = {
    "copy": lambda seed: Copy(seed, digits=5),
    "reverse": lambda seed: Reverse(seed, digits=5, length_trace={"median": 20}),
    "arithmetic": lambda seed: Arithmetic(seed, digits=2),
}


def contents(task, split: str, rows: int) -> list[tuple]:
    return [(*task.prompt(split, row).tokens.tolist(), task.prompt(split, row).filler) for row in range(rows)]


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**63))
def test_splits_share_no_prompt_and_rows_repeat_exactly(build, seed):
    train, heldout = (contents(build(seed), split, 60) for split in SPLITS)
    assert not set(train) & set(heldout)
    assert train == contents(build(seed), "train", 60) and heldout == contents(build(seed), "heldout", 60)


def test_a_row_is_the_same_in_every_process_and_version():
    prompts = [BUILDERS["reverse"](7).prompt(split, 0) for split in SPLITS]
    assert [prompt.tokens.tolist() for prompt in prompts] == [[1, 9, 8, 7, 6, SEP], [1, 8, 9, 0, 3, SEP]]
    assert [prompt.filler[:4] for prompt in prompts] == [(8, 7, 12, 5), (5, 9, 6, 8)]


def test_copy_prompts_hold_their_answer():
    prompt, backwards = (kind(11, digits=4).prompt("train", 3) for kind in (Copy, Reverse))
    assert prompt.tokens.dtype == np.int32 and prompt.tokens[-1] == SEP and prompt.max_tokens == 4
    assert prompt.tokens[:-1].tolist() == prompt.answer.tolist() == backwards.answer.tolist()[::-1]


@pytest.mark.parametrize(
    ("task", "answer", "tokens", "expected"),
    [
        (Copy(0, digits=3), [1, 2, 3], [1, 2, 3], 1.0),
        (Copy(0, digits=3), [1, 2, 3], [1, 9, 3], 2 / 3),
        (Copy(0, digits=3), [1, 2, 3], [1, 2], 2 / 3),
        (Arithmetic(0), [1, 0, 5], [1, 0, 5, 14], 1.0),
        (Arithmetic(0), [1, 0, 5], [0, 5, 14], 2 / 3),
        (Arithmetic(0), [1, 0, 5], [0, 1, 0, 5], 3 / 4),
        (Arithmetic(0), [1, 0, 5], [14], 0.0),
        (Arithmetic(0), [1, 0, 5], [15, 15, 5, 14], 1 / 3),
    ],
)
def test_the_reward_is_the_share_of_right_digits(task, answer, tokens, expected):
    prompt = Prompt(np.array([1], np.int32), np.array(answer, np.int32), 6)
    assert asyncio.run(task.reward(prompt, np.array(tokens, np.int32))) == pytest.approx(expected)


def test_lengths_are_log_normal_in_the_prompt_times_noise_within_it():
    trace = LengthTrace(median=100_000, sigma=1.0, noise=0.3, max=10**9)
    logs = np.log([trace.lengths(key) for key in range(4000)])
    means, spread = logs.mean(axis=1), np.sqrt(1.0 + 0.3**2 / SAMPLES)
    # Five standard errors: 1.2533 s/√n of a median, s/√(2n) of a standard deviation.
    assert np.median(means) == pytest.approx(np.log(100_000), abs=0.1)
    assert means.std(ddof=1) == pytest.approx(spread, abs=0.06)
    assert np.sqrt(np.mean(logs.std(axis=1, ddof=1) ** 2)) == pytest.approx(0.3, abs=0.005)


def test_episodes_have_seeds_and_so_has_any_prompt_always_the_same_one():
    prompts, again = (
        [Episodes(0, tokenizer="bytes", instructions="Go. ").prompt("train", row) for row in range(50)] for _ in "ab"
    )
    assert {prompt.codec.decode(prompt.tokens) for prompt in prompts} == {"[user]Go. [assistant]"}
    assert [seed_of(each) for each in prompts] == [each.answer for each in again] and len(
        set(map(seed_of, prompts))
    ) == 50
    others = [replace(prompts[0], answer=answer, tokens=np.array([5], np.int32)) for answer in ("42", "43", None, -1)]
    assert len({seed_of(other) for other in others}) == 4 and all(0 <= seed_of(other) < SEEDS for other in others)
    assert seed_of(others[0]) == 813238402  # the same in every process and version


TWO = {
    "short": {"name": "copy", "digits": 2, "train_size": 6, "heldout_size": 3},
    "long": {"name": "copy", "digits": 4, "train_size": 10, "heldout_size": 5},
}


def mixture(**knobs):
    return build("task", {"name": "mixture", "tasks": TWO, **knobs}, 7)


def test_each_task_keeps_its_prompts_rewards_and_held_out_rows():
    task, alone = mixture(), build("task", TWO["long"], 7)
    assert (task.size("train"), task.size("heldout")) == (16, 8)
    for split, first in (("train", 6), ("heldout", 3)):
        prompt, own = task.prompt(split, first + 2), alone.prompt(split, 2)
        assert prompt.task == "long" and prompt.tokens.tolist() == own.tokens.tolist()
        assert asyncio.run(task.reward(prompt, own.answer)) == 1.0
    assert task.prompt("train", 5).task == "short"
    assert sorted(task.rows_beyond("heldout", 1)) == list(range(8))
    with pytest.raises(IndexError):
        task.prompt("heldout", 8)


def test_ratios_hold_after_every_block_and_each_task_has_epochs_of_its_own():
    cursor = PromptCursor(shares_of(mixture(ratios={"short": 2, "long": 6})), seed=3)
    places = [cursor.next() for _ in range(120)]
    for block in range(30):
        assert Counter(place.task for place in places[4 * block : 4 * block + 4]) == {"short": 1, "long": 3}
    for task, rows in (("short", range(6)), ("long", range(6, 16))):
        drawn = [place.row for place in places if place.task == task]
        epochs = [drawn[at : at + len(rows)] for at in range(0, len(drawn), len(rows))]
        assert all(sorted(epoch) == list(rows) for epoch in epochs) and epochs[0] != epochs[1]


def test_tasks_of_other_tokens_cannot_be_mixed():
    with pytest.raises(ConfigError, match="vocab_size is 13 and 16"):
        mixture(tasks={"a": "copy", "b": "arithmetic"})


def test_actors_score_by_the_own_verifier():
    task = mixture()
    reward, prompts = reward_function(task, RewardPool(workers=1)), (task.prompt("train", 0), task.prompt("train", 6))
    assert [asyncio.run(reward(each, each.answer)) for each in prompts] == [1.0, 1.0]
    assert asyncio.run(reward(prompts[1], prompts[0].answer)) < 1.0
