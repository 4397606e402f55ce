"""Rewards of whole groups: the shipped functions, where they run, and what becomes of a group whose reward fails."""

import asyncio

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.group_rewards import GroupRewards, described
from actors.heldout import Heldout
from actors.reward_pool import RewardError
from actors.worker import Rollout, Worker
from areal_like.tasks.generated import CharacterCodec
from areal_like.types import Lease, Prompt, Sample
from tests.actors.looped import looped
from tests.actors.test_reward_pool import in_pool
from tests.actors.test_worker import Client, Engine, Task, settle
from tests.scripts import graders

TASK = Prompt(np.array([1], np.int32), {"answer": 3}, 5)


def sample(reward=0.0, tokens=(1, 2), mask=None):
    n = len(tokens)
    mask = np.ones(n, bool) if mask is None else np.array(mask, bool)
    logprobs = np.zeros(n, np.float32)
    return Sample(np.array([7, *tokens], np.int32), 1, logprobs, mask, [(3, n)], reward, "stop")


def scored(spec, samples, **pool):
    async def run(rewards):
        return [each.reward for each in await GroupRewards(spec, rewards, None, "actor-0")(TASK, samples)]

    return in_pool(run, **pool)


def one_too_few(prompt, answers):
    return [0.0] * (len(answers) - 1)


def test_a_function_runs_in_the_pool_with_its_knobs():
    spec = {"name": f"{graders.__name__}:total_minus", "by": 0.5}
    assert scored(spec, [sample(1.0), sample(2.0)]) == [2.5, 2.5]
    assert scored({"name": "none"}, [sample(1.0), sample(2.0)], workers=0) == [1.0, 2.0]


@pytest.mark.parametrize("name", [f"{__name__}:one_too_few", "math:sqrt"])
def test_a_group_reward_that_fails_is_an_error_that_names_it(name):
    with pytest.raises(RewardError, match=name):
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


@pytest.mark.parametrize("found", [[4.0, 5.0], RewardError("the judge is off")])
@looped
async def test_a_group_waits_for_its_rewards_and_is_dropped_with_the_reason_where_they_fail(found):
    called, result = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def workflow(engine, reward, prompt, limits, request):
        return sample(1.0)

    async def slow(prompt, samples):
        called.set()
        return [sample(each) for each in await result]

    client, rollout = Client(), Rollout(5, 1.0, None, workflow, {})
    worker = Worker(Task(), Engine(), None, client, rollout, {3: "abc"}, group_rewards=slow)
    worker.start([Lease(1, 0, "train", 3, 2, 0.0)])
    await called.wait()
    assert worker.look()[0] and worker.look()[0] and not client.groups, "it moves at every look"
    if isinstance(found, list):
        result.set_result(found)
    else:
        result.set_exception(found)
    await settle()
    pushed = [[each.reward for each in group.samples] for group in client.groups]
    expected = ([found], []) if isinstance(found, list) else ([], [(1, "group reward crashed", repr(found))])
    assert (pushed, client.failures) == expected


@looped
async def test_answers_to_a_held_out_prompt_get_the_rewards_of_their_group():
    async def workflow(engine, reward, prompt, limits, request):
        return sample(1.0)

    async def ranked(prompt, samples):
        return [sample(float(place)) for place in range(len(samples))]

    client, heldout = Client(), Heldout(lambda row: TASK, workflow, None)
    worker = Worker(
        Task(),
        Engine(),
        None,
        client,
        Rollout(5, 1.0, None, workflow, {"test": heldout}),
        {3: "abc"},
        group_rewards=ranked,
    )
    worker.start([Lease(10 + each, 0, "test", 1, 1, 0.0) for each in range(3)])
    await settle()
    assert [facts[0] for _, _, facts in client.evaluations] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([500, "At first, Score: 9. No:\n**Score:** 5"], 2 + 0.5 * 0.5),
        ([500, 500], "InternalServerError"),
        (["It is fine."], "got 'It is fine.'"),
        (["Score: 11"], "from 0 to 10"),
    ],
)
@looped
async def test_the_judge_of_the_examples_grades_after_retries_or_costs_the_group(tmp_path, replies, expected):
    asked = []

    async def answer(request):
        asked.append((await request.json())["messages"][0]["content"])
        reply = replies[len(asked) - 1]
        status = reply if isinstance(reply, int) else 200
        choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(made, status=status, headers={"retry-after-ms": "1"})

    prompt = Prompt(np.array([7], np.int32), "42", 5, (), CharacterCodec("0123456789"), ({"content": "What is 6*7?"},))
    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    async with TestServer(app) as server:
        spec = {"name": "examples.judge.judge:Judge", "base_url": str(server.make_url("/")), "model_name": "m"}
        judge = GroupRewards(spec | {"own": 2.0, "weight": 0.5, "retries": 1}, None, tmp_path, "actor-0")
        try:
            [graded] = await judge(prompt, [sample(1.0, (4, 2))])
            found = graded.reward
        except RewardError as error:
            found = expected if str(expected) in str(error) else error
        await judge.close()
    assert found == expected and len(asked) == len(replies)
    assert all(part in asked[0] for part in ("What is 6*7?", "Reference answer: 42", "Answer to grade:\n42\n"))
