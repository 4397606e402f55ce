"""Stop texts and stop tokens of a run: where answers end in both engines, and the text that is graded."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.engines import sglang_engine
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_replies import Reply, generate_request
from areal_like.stops import Stops, stop_reason
from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.text import byte_tokenizer
from areal_like.types import Completion, Limits, Prompt, StopTexts
from tests.actors.actor import Actor, Task
from tests.actors.agents.scene import TEXT, limits_of, play, post, prompt_of, user
from tests.actors.looped import looped
from tests.actors.tiny_models import new_model, prompts_of, sampled

PROMPTS = prompts_of(3, 9, 4, 9, 5)
FREE = [Limits(30, key=i) for i in range(5)]


def stopping(free: list[Completion], places: tuple[int, ...]) -> tuple[list[Limits], list[int]]:
    """Limits with a text of three tokens of each answer, and the number of tokens at which it first appears."""
    texts = [TEXT.decode(each.tokens)[place : place + 3] for each, place in zip(free, places, strict=True)]
    counts = [
        next(count for count in range(1, 31) if text in TEXT.decode(each.tokens[:count]))
        for each, text in zip(free, texts, strict=True)
    ]
    found = [replace(each, stop_texts=StopTexts(TEXT, ("~", text))) for each, text in zip(FREE, texts, strict=True)]
    return [*found[:4], FREE[4]], [*counts[:4], 30]


@pytest.mark.parametrize("knobs", [{}, {"slots": 1}, {"slots": 4, "kv_tokens": 60}, {"static": True}])
def test_a_stop_text_ends_a_sequence_and_no_other_and_changes_no_token(knobs, monkeypatch):
    if knobs.pop("static", False):
        monkeypatch.setattr("actors.engines.torch_engine.is_static", lambda device: True)
    free, _ = sampled(new_model(), PROMPTS, FREE)
    limits, counts = stopping(free, (0, 5, 11, 27, 0))
    done, stats = sampled(new_model(), PROMPTS, limits, **knobs)
    assert [len(each.tokens) for each in done] == counts and stats["tokens"] == sum(counts)
    assert [each.finish for each in done] == ["stop_text"] * 4 + ["length"]
    assert "kv_tokens" not in knobs or stats["preemptions"] > 0
    for ours, theirs, count in zip(done, free, counts, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens[:count])
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs[:count], atol=1e-4)


@pytest.mark.parametrize("ids, finish", [((), "stop"), ((7,), "stop_id")])
def test_stop_tokens_of_a_run_are_told_from_the_tasks(ids, finish):
    free, _ = sampled(new_model(), PROMPTS[:1], FREE[:1])
    token = int(free[0].tokens[6])
    given = {"stop_ids": (token,)} if ids else {"stop": (token,)}
    (done,), _ = sampled(new_model(), PROMPTS[:1], [replace(FREE[0], **given)])
    assert done.finish == finish and done.tokens.tolist() == free[0].tokens[: len(done.tokens)].tolist()
    assert stop_reason(done, replace(FREE[0], **given)) == (token if ids else None)
    sent = generate_request("r", PROMPTS[0], 0, replace(FREE[0], **given), "a")["sampling_params"]
    assert sent["stop_token_ids"] == [token] and not sent["ignore_eos"]


class Served:
    """What servers return: `text`, in requests of at most as many tokens as asked for; some are broken off earlier."""

    def __init__(self, text: str, most: int):
        self.tokens, self.most, self.asked = TEXT.encode(text), most, []

    async def __call__(self, call: Any, prompt: Any, done: Completion, limits: Limits) -> Reply:
        begin = len(done.tokens)
        found = self.tokens[begin : min(begin + self.most, begin + sglang_engine.CHUNK, limits.max_tokens)]
        self.asked.append(begin)
        return Reply(found, np.full(len(found), -1.0, np.float32), [(0, len(found))], 0, "a")


@pytest.mark.parametrize(
    ("text", "stops", "begun", "count", "finish"),
    [
        ("abcdef", ("de",), 0, 5, "stop_text"),
        ("abcdefgh", ("gh", "cdefg"), 0, 7, "stop_text"),
        ("abcdef", ("29a",), 2, 1, "stop_text"),
        ("abc$", ("c", "zz"), 0, 3, "stop_text"),
        ("abc$", ("zz",), 0, 4, "stop"),
        ("abcdefgh", ("zz",), 0, 8, "length"),
    ],
)
@pytest.mark.parametrize("most", [1, 2, 3, 64])
@looped
async def test_servers_without_a_tokenizer_stop_there_too(text, stops, begun, count, finish, most, monkeypatch):
    engine: Any = SglangEngine.__new__(SglangEngine)
    engine._places, engine._label, engine._totals = asyncio.Semaphore(1), "a", {"tokens": 0}
    monkeypatch.setattr(sglang_engine, "CHUNK", 4)
    engine._ask = Served(text.replace("$", "z"), most)
    end = TEXT.encode("z")[0]
    limits = Limits(8, stop=(int(end),) if "$" in text else (), begun=begun)
    limits = replace(limits, stop_texts=StopTexts(TEXT, stops))
    done = await engine._finish(sglang_engine._Call("r"), TEXT.encode("129"), limits)
    assert (len(done.tokens), done.finish, done.runs) == (count, finish, [(0, count)])
    assert len(done.logprobs) == count


@pytest.mark.parametrize(("keep", "expected"), [(False, "é 1"), (True, "é 1</b>")])
def test_the_text_that_is_graded_is_cut_and_the_prompts_is_not(keep, expected):
    codec = TokenizerCodec(byte_tokenizer(), chat=True)
    prompt = Stops(("</b>", "</bb"), (), keep).cut(Prompt(codec.encode("</b>x"), 1, 9, (), codec))
    assert prompt.codec.decode(codec.encode("é 1</b>\n2")) == expected
    assert prompt.codec.decode(codec.encode("é 1")) == "é 1"
    assert prompt.codec.turn_end == codec.turn_end and Stops(keep=keep).cut(prompt) is prompt
    assert prompt.codec.first_end(codec.encode("é 1</b>\n2"), 0) == len("é 1</b>".encode())


def test_agents_see_cut_answers_and_why_they_end():
    found = []

    async def asking(base_url, key, row):
        for stop in (None, "r"):
            body = (await post(base_url, key, {"messages": row["messages"], "max_tokens": 20, "stop": stop}))[1]
            found.append(body["choices"][0])
        await post(base_url, key, {"messages": [*row["messages"], found[0]["message"], user("1")]})
        return 1.0

    free, _ = sampled(new_model(), [prompt_of().tokens], [limits_of(20)])
    text = TEXT.decode(free[0].tokens)
    stops = Stops((text[3:5],))
    prompt = stops.cut(prompt_of())
    sample = play(asking, stops.within(limits_of(), prompt), prompt)
    assert [each["stop_reason"] for each in found[:1]] == [text[3:5]]
    assert found[0]["finish_reason"] == "stop" and found[0]["message"]["content"] == text[: text.index(text[3:5])]
    shown = TEXT.decode(sample.tokens[sample.prompt_length :])
    assert shown.startswith(text[: text.index(text[3:5]) + 2]) and (~sample.loss_mask).any()


class Worded(Task):
    def prompt(self, split: str, row: int) -> Prompt:
        return replace(super().prompt(split, row), codec=TEXT)


class Grader(Actor):
    """Grades the length of the text."""

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return len(prompt.codec.decode(tokens))


@looped
async def test_samples_keep_the_tokens_of_the_text_that_is_cut():
    plain = await Grader(task=Worded()).group()
    texts = [TEXT.decode(each.tokens[each.prompt_length :]) for each in plain.samples]
    stop = max(texts, key=len)[8:10]
    group = await Grader(task=Worded(), stops=Stops((stop,))).group()
    assert [each.finish for each in group.samples].count("stop_text") == 1
    for sample, text in zip(group.samples, texts, strict=True):
        before, found, _ = text.partition(stop)
        assert TEXT.decode(sample.tokens[sample.prompt_length :]) == before + found
        assert sample.reward == len(before) and sample.loss_mask.all()
