"""Rewards of whole groups: the shipped functions, where they run, and what becomes of a group whose reward fails."""

import asyncio
from functools import partial

import numpy as np
import pytest

from actors.group_rewards import GroupRewards, described
from actors.reward_pool import RewardError, RewardPool
from actors.worker import Heldout, Rollout, Worker
from areal_like.tasks.comparing import length_rank
from areal_like.types import Lease, Prompt, Sample
from tests.actors.test_worker import Client, Engine, Task

TASK = Prompt(np.array([1], np.int32), {"answer": 3}, 5)


def sample(reward=0.0, tokens=(1, 2), mask=None):
    n = len(tokens)
    mask = np.ones(n, bool) if mask is None else np.array(mask, bool)
    logprobs = np.zeros(n, np.float32)
    return Sample(np.array([7, *tokens], np.int32), 1, logprobs, mask, [(3, n)], reward, "stop")


def answers(*pairs):
    return [{"text": text, "tokens": None, "length": len(text), "reward": reward} for text, reward in pairs]


def scored(spec, samples, prompt=TASK, **pool):
    async def run():
        rewards = RewardPool(**pool)
        try:
            return [each.reward for each in await GroupRewards(spec, rewards, None, "actor-0")(prompt, samples)]
        finally:
            await rewards.close()

    return asyncio.run(run())


def total_minus(prompt, answers, *, by=0.0):
    """A user's own: the sum of all rewards, minus `by`."""
    return [sum(answer["reward"] for answer in answers) - by] * len(answers)


def one_too_few(prompt, answers):
    return [0.0] * (len(answers) - 1)


def test_short_right_answers_lose_nothing_and_wrong_ones_have_no_rank():
    group = answers(("aaaa", 1.0), ("a", 1.0), ("aa", 1.0), ("", 0.0), ("aa", 1.0))
    assert length_rank(None, group, weight=0.3) == pytest.approx([0.7, 1.0, 0.85, 0.0, 0.85])
    assert length_rank(None, answers(("aaaa", 1.0), ("a", 0.0))) == [1.0, 0.0]


def test_a_function_runs_in_the_pool_with_its_knobs():
    spec = {"name": "tests.actors.test_group_rewards:total_minus", "by": 0.5}
    assert scored(spec, [sample(1.0), sample(2.0)]) == [2.5, 2.5]
    assert scored({"name": "none"}, [sample(1.0), sample(2.0)], workers=0) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.actors.test_group_rewards:one_too_few", r"returned \[0.0\] for 2 answers"),
        ("math:sqrt", "raised TypeError"),
    ],
    ids=["too few", "raises"],
)
def test_a_group_reward_that_fails_is_an_error_that_names_it(name, words):
    with pytest.raises(RewardError, match=words):
        scored({"name": name}, [sample(), sample()], workers=0)


def test_an_answer_is_described_up_to_its_last_trained_token():
    class Codec:
        def decode(self, tokens):
            return "".join(map(str, tokens))

    prompt = Prompt(np.array([7], np.int32), {1}, 5, codec=Codec(), messages=({"role": "user", "content": "?"},))
    question, [answer] = described(prompt, [sample(0.5, (1, 2, 3, 4), mask=[1, 0, 1, 0])])
    assert question == {"text": "7", "messages": [{"role": "user", "content": "?"}], "answer": None}, "a set: no JSON"
    assert answer == {"text": "123", "tokens": None, "length": 3, "reward": 0.5, "finish": "stop"}
    question, [answer] = described(TASK, [sample(mask=[0, 0])])
    assert question["answer"] == {"answer": 3} and answer["tokens"] == [] and answer["text"] is None


class Slow:
    """A group reward of a class: it ends at the test's signal."""

    def __init__(self):
        self.called, self.result = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def __call__(self, prompt, samples):
        self.called.set()
        rewards = await self.result
        return [sample(each) for each in rewards]


def worked(test):
    """Run `test(worker, client, slow)` with a worker whose samples end at once."""

    async def workflow(engine, reward, prompt, limits, request):
        return sample(1.0)

    async def run():
        slow, client = Slow(), Client()
        heldout = {"heldout": Heldout(partial(Task().prompt, "heldout"), workflow, None)}
        rollout = Rollout(seed=5, temperature=1.0, max_tokens=None, workflow=partial(workflow), heldout=heldout)
        worker = Worker(Task(), Engine(), None, client, rollout, {3: "abc"}, group_rewards=slow)
        await test(worker, client, slow)

    asyncio.run(run())


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_group_is_pushed_with_its_groups_rewards_and_is_at_work_until_then():
    async def test(worker, client, slow):
        worker.engine.stats = lambda: {"tokens": 1.0}
        worker.start([Lease(1, 0, "train", 3, 2, 0.0)])
        await asyncio.wait_for(slow.called.wait(), 10)
        assert worker.moved()[0] and worker.moved()[0] and not client.groups, "it moves at every look"
        slow.result.set_result([4.0, 5.0])
        await settle()
        assert [each.reward for each in client.groups[0].samples] == [4.0, 5.0]

    worked(test)


def test_a_group_whose_reward_fails_is_told_of_with_the_reason():
    async def test(worker, client, slow):
        worker.start([Lease(1, 0, "train", 2, 2, 0.0)])
        await asyncio.wait_for(slow.called.wait(), 10)
        slow.result.set_exception(RewardError("the judge is off"))
        await settle()
        assert client.failures == [(1, "group reward crashed", "the judge is off")] and not client.groups

    worked(test)
