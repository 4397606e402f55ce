"""The judge against a server on this machine: verdicts, the cache, retries, limits, failures."""

import asyncio
import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from actors.judge import Judge
from actors.reward_pool import RewardError

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
