"""Mixed tasks: their turns, the parts that each keeps, and refused mixtures."""

import asyncio
from collections import Counter
from unittest.mock import AsyncMock

import pytest

from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from actors.workflows import for_tasks
from areal_like.config.registry import ConfigError, build
from buffer.prompts import PromptCursor, shares_of

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


async def own(engine, reward, prompt, limits, request):
    return "own"


def test_actors_score_by_the_own_verifier_and_roll_out_in_the_own_workflow():
    task = mixture(workflows={"long": {"name": f"{__name__}:own"}})
    reward, prompts = reward_function(task, RewardPool(workers=1)), (task.prompt("train", 0), task.prompt("train", 6))
    assert [asyncio.run(reward(each, each.answer)) for each in prompts] == [1.0, 1.0]
    assert asyncio.run(reward(prompts[1], prompts[0].answer)) < 1.0
    chosen = for_tasks(AsyncMock(return_value="usual"), task)
    assert [asyncio.run(chosen(None, reward, each, None, "s")) for each in prompts] == ["usual", "own"]
