"""Rewards of whole groups: the shipped functions, where they run, and what becomes of a group whose reward fails."""

import asyncio
import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from actors.group_rewards import GroupRewards, described
from actors.heldout import Heldout
from actors.judge import Judge
from actors.reward_pool import RewardError
from actors.worker import Rollout, Worker
from areal_like.types import Lease, Prompt, Sample
from tests.actors.looped import looped
from tests.actors.test_reward_pool import in_pool
from tests.actors.test_worker import Client, Engine, Task, settle

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


def total_minus(prompt, answers, *, by=0.0):
    """A user's own: the sum of all rewards, minus `by`."""
    return [sum(answer["reward"] for answer in answers) - by] * len(answers)


def one_too_few(prompt, answers):
    return [0.0] * (len(answers) - 1)


def test_a_function_runs_in_the_pool_with_its_knobs():
    spec = {"name": "tests.actors.test_group_rewards:total_minus", "by": 0.5}
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


PROMPT = {"text": "6*7", "messages": [{"role": "user", "content": "What is 6*7?"}], "answer": "42"}


@contextlib.contextmanager
def judging(reply):
    """An OpenAI-compatible server of this machine, with its `url` and the texts that were `asked`. `reply` maps a
    request's text to the judge's text, or to an HTTP status that refuses it, in several threads at once."""
    served = SimpleNamespace(asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            served.asked.append(text)
            said = reply(text)
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            usage = {"prompt_tokens": len(text), "completion_tokens": 1, "total_tokens": len(text) + 1}
            head = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(json.dumps(head | {"choices": [choice], "usage": usage}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def answers(*texts, reward=1.0):
    return [{"text": text, "length": len(text), "reward": reward, "finish": "stop"} for text in texts]


def judged(folder, url, group, times=1, **knobs):
    """(rewards, metrics) of a group that is scored so many times by one judge."""

    async def run():
        judge = Judge(folder, "actor-0", base_url=url, model_name="m", **knobs)
        try:
            for _ in range(times):
                rewards = await judge.score(PROMPT, group)
            return rewards, judge.stats()
        finally:
            await judge.close()

    return asyncio.run(run())


def answer_of(text):
    return re.search(r"Answer to grade:\n(.*)\n", text)[1]


def test_each_answer_gets_the_grade_of_its_last_score_line(tmp_path):
    def grade(text):
        assert "What is 6*7?" in text and "Reference answer: 42" in text
        return f"At first, Score: 9. No:\n**Score:** {len(answer_of(text))}"

    with judging(grade) as server:
        rewards, stats = judged(tmp_path, server.url, answers("42", "It is 42"), own=2, weight=0.5)
    assert rewards == [2 + 0.5 * 0.2, 2 + 0.5 * 0.8]
    assert stats["sum:judge/requests"] == 2 and stats["sum:judge/request_tokens"] == sum(map(len, server.asked))


def test_no_request_is_made_twice_whoever_asks_and_when(tmp_path):
    with judging(lambda text: "Score: 5") as server:
        _, stats = judged(tmp_path, server.url, answers("a", "a", "b"), times=2)
        assert len(server.asked) == 2 and stats["sum:judge/cached"] == 4
    with (tmp_path / "actor-0.jsonl").open("a") as torn:
        torn.write('{"key": "ab')  # a crash
    rewards, stats = judged(tmp_path, server.url, answers("a", "b"))  # the server is off
    assert rewards == [0.5, 0.5] and stats["sum:judge/requests"] == 0
    with judging(lambda text: "Score: 1") as server:
        assert judged(tmp_path, server.url, answers("c"))[0] == [0.1], "the line behind the torn one"
    assert judged(tmp_path, "http://127.0.0.1:1/v1", answers("c", "a"))[0] == [0.1, 0.5]


@pytest.mark.parametrize(
    ("reply", "words"),
    [(500, "InternalServerError"), ("It is fine.", "got 'It is fine.'"), ("Score: 11", "from 0 to 10")],
)
def test_a_judge_without_a_grade_is_an_error_that_says_why(tmp_path, reply, words):
    with judging(lambda text: reply) as server, pytest.raises(RewardError, match=f"(?s)the judge at http.*{words}"):
        judged(tmp_path, server.url, answers("a"), retries=1)


def test_a_group_that_is_cancelled_leaves_its_replies_to_the_next_lease(tmp_path):
    async def run(url):
        judge = Judge(tmp_path, "actor-0", base_url=url, model_name="m")
        asking = asyncio.ensure_future(judge.score(PROMPT, answers("a")))
        while not server.asked:
            await asyncio.sleep(0.005)
        asking.cancel()
        again = await judge.score(PROMPT, answers("a"))
        await judge.close()
        return again

    with judging(lambda text: time.sleep(0.05) or "Score: 5") as server:
        assert asyncio.run(run(server.url)) == [0.5]
        assert len(server.asked) == 1
