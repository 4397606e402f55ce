"""Agents over real HTTP as trajectories: compared with multi_turn; branches, stops, limits, a chat template."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engines.torch_engine import TorchEngine
from actors.measures import AGENTS
from actors.workflows import multi_turn
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.chat import TokenizerCodec
from areal_like.types import Completion, Prompt
from tests.actors.agents.scene import TEXT, engine_of, limits_of, play, post, prompt_of, rollout, said, user, verifier
from tests.actors.tiny_models import new_model, update_of
from tests.folders import CONFIGS

REPLIES = ["12", "xyz", "0"]


class Three:
    """Sends the replies in turn; the weights change after the first turn. Every turn has a reward."""

    engine: Any = None

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, action: str) -> tuple[str, float | None, bool]:
        self.turns += 1
        if self.turns == 1:
            await self.engine.load(update_of(new_model(seed=1), 1))
        return ("", 0.5, True) if self.turns > len(REPLIES) else (REPLIES[self.turns - 1], 0.25, False)


async def three(base_url: str, key: str, row: dict[str, Any]) -> list[float]:
    """The same conversation, held by an agent."""
    messages = [*row["messages"]]
    for reply in [*REPLIES, None]:
        messages.append(await said(base_url, key, messages, max_tokens=6))
        if len(messages) == 2:
            await Three.engine.load(update_of(new_model(seed=1), 1))
        if reply is not None:
            messages.append(user(reply))
    return [0.25, 0.25, 0.25, 0.5]


def same(ours: Any, theirs: Any) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
    assert ours.tokens.dtype == theirs.tokens.dtype and ours.logprobs.dtype == theirs.logprobs.dtype
    fields = ("prompt_length", "runs", "reward", "finish", "turn_rewards")
    assert [getattr(ours, each) for each in fields] == [getattr(theirs, each) for each in fields]


@pytest.mark.parametrize("key", [0, 1, 2])
def test_a_conversation_becomes_the_trajectory_that_multi_turn_makes_of_it(key):
    async def by_multi_turn(prompt: Prompt, limits: Any) -> Any:
        Three.engine = engine_of()
        place = {"name": f"{__name__}:Three"}
        return await multi_turn(
            Three.engine, verifier, prompt, limits, "r", environment=place, max_turns=4, turn_tokens=6
        )

    async def by_an_agent(prompt: Prompt, limits: Any) -> Any:
        Three.engine = engine_of()
        return await rollout(three, Three.engine, limits, prompt)

    theirs = asyncio.run(by_multi_turn(prompt_of(), limits_of(key=key)))
    ours = asyncio.run(by_an_agent(prompt_of(), limits_of(key=key)))
    same(ours, theirs)
    assert [version for version, _ in ours.runs] == [0, 1] and len(ours.turn_rewards) == 4 and ours.reward == 1.25
    assert 0 < ours.loss_mask.sum() < len(ours.loss_mask)


def test_a_branch_shares_the_tokens_before_it_and_the_last_turn_is_trained():
    heard: dict[str, Any] = {}

    async def branching(base_url, key, row):
        start = [*row["messages"], await said(base_url, key, row["messages"], max_tokens=5)]
        heard["first"] = start[-1]["content"]
        heard["left"] = await said(base_url, key, [*start, user("0")], max_tokens=8)
        heard["again"] = await said(base_url, key, [*start, user("0")], max_tokens=8)
        heard["aside"] = await said(base_url, key, [user("zzz")], max_tokens=8)
        heard["right"] = await said(base_url, key, [*start, user("11")], max_tokens=8)

    before = AGENTS.copy()
    sample = play(branching)
    response = sample.tokens[sample.prompt_length :]
    assert TEXT.decode(response) == heard["first"] + "11" + heard["right"]["content"]
    assert (~sample.loss_mask).sum() == 2
    assert heard["left"] != heard["again"], "asking the same again is not in vain"
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
        return Completion(said, -np.arange(len(said), dtype=np.float32), runs, "stop" if stopped else "length")

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


def test_a_sample_without_room_ends_with_length_and_what_it_has_earned():
    async def endless(base_url, key, row):
        messages = [*row["messages"]]
        while True:
            messages += [await said(base_url, key, messages, max_tokens=9), user("1")]

    async def polite(base_url, key, row):
        messages = [*row["messages"]]
        while True:
            status, answer = await post(base_url, key, {"messages": messages, "max_tokens": 9})
            if status == 400:
                assert answer["error"]["code"] == "context_length_exceeded"
                return 0.5
            messages += [answer["choices"][0]["message"], user("1")]

    limits = replace(limits_of(20), stop=())
    for agent, reward in ((endless, 0.09), (polite, 0.5)):
        sample = play(agent, limits)
        assert (sample.finish, sample.reward) == ("length", reward)
        assert sample.loss_mask.tolist() == [True] * 9 + [False] + [True] * 9


# With a chat template

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}<{{ tools[0].function.name }}>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}(called {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def words() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_prompt(codec: TokenizerCodec) -> Prompt:
    return Prompt(codec.opening([user("2+2?")]), "4", 200, (), codec, (user("2+2?"),))  # type: ignore[arg-type]


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

    codec = TokenizerCodec(words(), chat=True)
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


def test_what_the_model_says_is_never_encoded_again():
    """The model samples random bytes: as text they could not be encoded to the same tokens again."""

    async def talking(base_url, key, row):
        messages = [*row["messages"]]
        for _ in range(3):
            messages += [await said(base_url, key, messages, max_tokens=12), user("ü")]
        return 0.0

    torch.manual_seed(0)
    engine = TorchEngine(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["qwen2"]), attn_implementation="eager"))
    codec = TokenizerCodec(words(), chat=True)
    sample = play(talking, replace(limits_of(150), stop=()), chat_prompt(codec), engine=engine)
    parts = np.split(sample.tokens[sample.prompt_length :], np.flatnonzero(np.diff(sample.loss_mask)) + 1)
    shown = codec.encode("<eos>[user]ü[assistant]")
    assert [part.tolist() == shown.tolist() for part in parts] == [False, True, False, True, False]
    assert all(len(part) == 12 and codec.encode(codec.decode(part)).tolist() != part.tolist() for part in parts[::2])
