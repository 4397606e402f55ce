"""Agents over real HTTP as trajectories: branches, stops, limits, a chat template. One that drops earlier thinking:
agents and multi_turn go on in a context that begins anew."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from actors import measures
from actors.measures import AGENTS
from actors.multi_turn import multi_turn
from areal_like.stops import Stops, beginning
from areal_like.tasks.chat import TokenizerCodec, parted
from areal_like.tasks.text import byte_tokenizer
from areal_like.types import Completion, Prompt
from tests.actors.agents import scene
from tests.actors.agents.scene import TEXT, limits_of, play, post, prompt_of, said, user, verifier
from tests.tasks.templates import QWEN3


def test_a_branch_shares_the_tokens_before_it_and_the_last_turn_is_trained():
    heard: list[Any] = []

    async def branching(base_url, key, row):
        start = [*row["messages"], await said(base_url, key, row["messages"], max_tokens=5)]
        for messages in ([*start, user("0")], [*start, user("0")], [user("zzz")], [*start, user("11")]):
            heard.append((await said(base_url, key, messages, max_tokens=8))["content"])
        heard.append(start[-1]["content"] + "11" + heard[-1])

    before = AGENTS.copy()
    sample = play(branching)
    assert TEXT.decode(sample.tokens[sample.prompt_length :]) == heard[-1] and (~sample.loss_mask).sum() == 2
    assert heard[0] != heard[1], "asking the same again is not in vain"
    assert AGENTS["turns"] - before["turns"] == 5
    assert AGENTS["turns_left_out"] - before["turns_left_out"] == 3


class Speaker:
    """An engine that answers every prompt with the same text, one token per character, from two versions."""

    version, digest = 0, ""

    def __init__(self, codec: Any, *texts: str):
        self.codec, self.texts, self.asked = codec, list(texts), []

    async def generate(self, tokens: Any, limits: Any, request: str = "") -> Completion:
        self.asked.append((tokens.tolist(), limits))
        said = self.codec.encode(self.texts.pop(0))[: limits.max_tokens]
        half = len(said) // 2
        runs = [(0, half), (1, len(said) - half)] if half else [(0, len(said))]
        stopped = int(said[-1]) in limits.stop
        made = Completion(said, -np.arange(len(said), dtype=np.float32), runs, "stop" if stopped else "length")
        count = limits.stop_texts.first_end(said, 0) if limits.stop_texts else None
        return beginning(made, count, "stop_text") if count else made

    async def close(self) -> None:
        pass


def test_a_stop_text_cuts_the_tokens_behind_it_and_shows_nothing_of_itself():
    async def stopping(base_url, key, row):
        status, body = await post(base_url, key, {"messages": row["messages"], "stop": ["xx", "yz", "no"]})
        assert status == 200 and body["choices"][0]["message"]["content"] == "abc"
        assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == 5
        await said(base_url, key, [*row["messages"], body["choices"][0]["message"], user("7")])
        return 1.0

    engine = Speaker(TEXT, "abcyz123", "4")
    sample = play(stopping, engine=engine)
    assert TEXT.decode(sample.tokens) == "3a7abcyz74"
    assert sample.loss_mask.tolist() == [True] * 5 + [False] + [True] and sample.runs == [(0, 4), (1, 2), (0, 1)]
    assert sample.logprobs.tolist() == [0, -1, -2, -3, -4, 0, 0]
    assert engine.asked[1][1].offset == 6


@pytest.mark.parametrize(("keep", "stop", "text"), [(True, "3", "abcyz"), (True, "bc", "a"), (False, "3", "abc")])
def test_agent_and_verifier_see_the_same_text_before_a_stop_of_the_request_or_as_the_run_has_it(
    keep, stop, text, monkeypatch
):
    seen = []

    async def stopping(base_url, key, row):
        seen.append((await said(base_url, key, row["messages"], stop=[stop]))["content"])

    async def graded(prompt, tokens):
        seen.append(prompt.codec.decode(tokens))
        return 1.0

    monkeypatch.setattr(scene, "verifier", graded)
    stops = Stops(("yz",), (), keep)
    prompt = stops.cut(prompt_of())
    play(stopping, stops.within(limits_of(), prompt), prompt, engine=Speaker(TEXT, "abcyz123"))
    assert seen == [text, text]


@pytest.mark.parametrize(("reward", "expected"), [(None, 0.09), (0.5, 0.5)])
def test_a_sample_without_room_ends_with_length_and_its_reward(reward, expected):
    async def endless(base_url, key, row):
        messages = [*row["messages"]]
        while True:
            status, answer = await post(base_url, key, {"messages": messages, "max_tokens": 9})
            if status == 400:
                assert answer["error"]["code"] == "context_length_exceeded"
                return reward
            messages += [answer["choices"][0]["message"], user("1")]

    sample = play(endless, replace(limits_of(20), stop=()))
    assert (sample.finish, sample.reward) == ("length", expected)
    assert sample.loss_mask.tolist() == [True] * 9 + [False] + [True] * 9


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}<{{ tools[0].function.name }}>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}(called {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def codec_of(template: str = TEMPLATE) -> TokenizerCodec:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template
    return TokenizerCodec(tokenizer, chat=True)


def chat_prompt(codec: TokenizerCodec, most: int = 200) -> Prompt:
    return Prompt(codec.opening([user("2+2?")]), "4", most, (), codec, (user("2+2?"),))  # type: ignore[arg-type]


def test_an_answer_that_an_agent_begins_is_one_message():
    async def beginning(base_url, key, row):
        talk = [*row["messages"], {"role": "assistant", "content": "It is"}]
        end = await said(base_url, key, talk)
        talk[-1] = {"role": "assistant", "content": talk[-1]["content"] + end["content"]}
        await said(base_url, key, [*talk, user("ok"), {"role": "assistant", "content": "No"}])
        return 1.0

    codec = codec_of()
    engine = Speaker(codec, " 4<eos>", "w<eos>")
    sample = play(beginning, replace(limits_of(200), stop=(256,)), chat_prompt(codec), engine=engine)
    whole = "[user]2+2?[assistant]It is 4<eos>[user]ok[assistant]Now<eos>"
    assert sample.tokens.tolist() == codec.encode(whole).tolist() and sample.forks == []
    assert codec.decode(sample.tokens[sample.prompt_length :][sample.loss_mask]) == " 4w"


def test_tool_calls_are_served_and_their_results_are_shown_in_the_templates_words():
    heard: list[Any] = []

    async def calling(base_url, key, row):
        talk = [*row["messages"]]
        body = (await post(base_url, key, {"messages": talk, "tools": TOOLS}))[1]
        heard.append(body["choices"][0])
        talk += [heard[0]["message"], {"role": "tool", "tool_call_id": "call_1_0", "content": "3"}]
        talk.append(await said(base_url, key, talk, tools=TOOLS))
        heard.append(talk[-1])
        await said(base_url, key, [*talk, user("ok")], tools=TOOLS)
        return [0.0, 0.0, 1.0]

    codec = codec_of()
    engine = Speaker(codec, f"Let me.\n{CALL}<eos>", "it is 3", "fine<eos>")
    sample = play(calling, replace(limits_of(200), stop=(256,)), chat_prompt(codec), engine=engine)
    call = {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert heard[0]["finish_reason"] == "tool_calls" and heard[0]["message"]["tool_calls"] == [call]
    assert heard[0]["message"]["content"] == "Let me." and heard[1]["content"] == "it is 3"
    whole = f"<add>[user]2+2?[assistant]Let me.\n{CALL}<eos>[tool]3[assistant]it is 3<eos>[user]ok[assistant]fine<eos>"
    assert sample.tokens.tolist() == codec.encode(whole).tolist()
    shown = codec.encode("[tool]3[assistant]").tolist() + codec.encode("<eos>[user]ok[assistant]").tolist()
    assert sample.tokens[sample.prompt_length :][~sample.loss_mask].tolist() == shown
    assert [sample.turn_rewards[0][0], sample.turn_rewards[2]] == [
        len(f"Let me.\n{CALL}"),
        (len(sample.logprobs) - 1, 1.0),
    ]


EOS = 256
LIMITS = replace(limits_of(300), stop=(EOS,))
THOUGHT = "<think>\nHm.\n</think>\n\n"
SAID = [f"{THOUGHT}It is 4.<eos>", f"{THOUGHT}Yes.<eos>", f"{THOUGHT}Bye.<eos>"]
START = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SURE = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


class Asks:
    """Doubts, and doubts again."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: Prompt) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float | None, bool]:
        self.turns += 1
        return "Sure?", 0.25 * self.turns, self.turns == 3


async def doubts(base_url: str, key: str, row: dict[str, Any]) -> list[float]:
    """The same, by an agent."""
    messages = [*row["messages"]]
    for _ in range(3):
        messages += [await said(base_url, key, messages), user("Sure?")]
    return [0.25, 0.5, 0.75]


def by_multi_turn(codec: TokenizerCodec, engine: Any, limits: Any = LIMITS, **knobs: Any) -> Any:
    place = {"name": f"{__name__}:Asks"}
    return asyncio.run(multi_turn(engine, verifier, chat_prompt(codec, 300), limits, "r", environment=place, **knobs))


def test_each_turn_is_trained_in_the_context_that_the_model_was_given():
    codec = codec_of(QWEN3)
    engine = Speaker(codec, *SAID)
    sample = by_multi_turn(codec, engine)
    expected = [
        f"{START}{THOUGHT}It is 4.",
        f"{START}It is 4.{SURE}{THOUGHT}Yes.",
        f"{START}It is 4.{SURE}Yes.{SURE}{THOUGHT}Bye.",
    ]
    assert [codec.decode(sample.tokens[begin:end]) for begin, end in sample.contexts] == expected
    assert [codec.decode(tokens) for tokens, _ in engine.asked] == [text.rpartition("<think>")[0] for text in expected]
    trained = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert codec.decode(trained) == "".join(text.removesuffix("<eos>") for text in SAID)
    assert sample.reward == 1.5 and [earned for _, earned in sample.turn_rewards] == [0.25, 0.5, 0.75]
    places = [place for place, _ in sample.turn_rewards]
    assert sample.tokens[sample.prompt_length :][places].tolist() == [EOS] * 3, "each turn's own last token"
    ranges = [range(limits.offset, limits.offset + limits.max_tokens) for _, limits in engine.asked]
    assert all(set(a).isdisjoint(b) for a, b in pairwise(ranges)), "no number is used twice"


def test_an_agent_makes_the_same_of_it():
    codec = codec_of(QWEN3)
    measures.TURNS.clear()
    ours = play(doubts, LIMITS, chat_prompt(codec, 300), engine=Speaker(codec, *SAID))
    theirs = by_multi_turn(codec, Speaker(codec, *SAID))
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    assert (ours.forks, ours.runs, ours.turn_rewards) == (theirs.forks, theirs.runs, theirs.turn_rewards)
    tokens = 2 * ours.loss_mask.sum()
    assert {"samples": 2, "turns": 6, "contexts": 6, "tokens": tokens, "calls": 0, "errors": 0} == measures.TURNS


class Silent(Asks):
    def step(self, action: str) -> tuple[str, float | None, bool]:
        return "Sure?", None, super().step(action)[2]


async def silent(base_url: str, key: str, row: dict[str, Any]) -> None:
    await doubts(base_url, key, row)


def test_the_text_that_a_prompt_begins_an_answer_with_is_graded_with_that_answer_alone(monkeypatch):
    codec, seen = TokenizerCodec(byte_tokenizer(), chat=True), []
    talk = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It"})
    prompt = Prompt(codec.opening(talk), "right", 300, (), codec, talk)

    async def graded(prompt: Prompt, tokens: np.ndarray) -> float:
        assert prompt.tokens.tolist() == codec.opening(prompt.messages).tolist()
        seen.append(parted(prompt.messages)[1] + prompt.codec.decode(tokens))
        return 0.0

    monkeypatch.setattr(scene, "verifier", graded)
    said = " is 4.<eos>", "Yes.<eos>", "Bye.<eos>"
    place = {"name": f"{__name__}:Silent"}
    asyncio.run(multi_turn(Speaker(codec, *said), graded, prompt, LIMITS, "r", environment=place))
    play(silent, LIMITS, prompt, engine=Speaker(codec, *said))
    assert seen == ["It is 4.", "Yes.", "Bye.", "Bye."]
