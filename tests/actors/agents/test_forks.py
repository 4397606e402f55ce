"""A chat template that drops earlier thinking: agents and multi_turn go on in a context that begins anew."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actors import turn_counts
from actors.agents.counts import TOTALS
from actors.resumption import Recorder
from actors.workflows import multi_turn
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.chat import TokenizerCodec
from areal_like.types import PartialSample, Prompt, Sample
from tests.actors.agents.scene import limits_of, play, post, said, user, verifier
from tests.actors.agents.test_conversation import Speaker
from tests.tasks.templates import QWEN3

EOS = 256
NO_CALLS = {"calls": 0, "errors": 0}
LIMITS = replace(limits_of(300), stop=(EOS,))
THOUGHT = "<think>\nHm.\n</think>\n\n"
SAID = [f"{THOUGHT}It is 4.<eos>", f"{THOUGHT}Yes.<eos>", f"{THOUGHT}Bye.<eos>"]
START = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SURE = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def codec_of(template: str = QWEN3) -> TokenizerCodec:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return TokenizerCodec(tokenizer, chat=True)


def prompt_of(codec: TokenizerCodec) -> Prompt:
    return Prompt(codec.opening([user("2+2?")]), "4", 300, (), codec, (user("2+2?"),))  # type: ignore[arg-type]


def texts(codec: TokenizerCodec, sample: Sample) -> list[str]:
    """Of its contexts, ends of turns included."""
    return [codec.decode(sample.tokens[begin:end]) for begin, end in sample.contexts]


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
    return asyncio.run(multi_turn(engine, verifier, prompt_of(codec), limits, "r", environment=place, **knobs))


def test_each_turn_is_trained_in_the_context_that_the_model_was_given():
    codec = codec_of()
    engine = Speaker(codec, *SAID)
    sample = by_multi_turn(codec, engine)
    expected = [
        f"{START}{THOUGHT}It is 4.",
        f"{START}It is 4.{SURE}{THOUGHT}Yes.",
        f"{START}It is 4.{SURE}Yes.{SURE}{THOUGHT}Bye.",
    ]
    assert texts(codec, sample) == expected
    assert [codec.decode(tokens) for tokens, _ in engine.asked] == [text.rpartition("<think>")[0] for text in expected]
    trained = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert codec.decode(trained) == "".join(text.removesuffix("<eos>") for text in SAID)
    assert sample.reward == 1.5 and [earned for _, earned in sample.turn_rewards] == [0.25, 0.5, 0.75]
    places = [place for place, _ in sample.turn_rewards]
    assert sample.tokens[sample.prompt_length :][places].tolist() == [EOS] * 3, "each turn's own last token"
    ranges = [range(limits.offset, limits.offset + limits.max_tokens) for _, limits in engine.asked]
    assert all(set(a).isdisjoint(b) for a, b in pairwise(ranges)), "no number is used twice"


def test_an_agent_makes_the_same_of_it():
    codec = codec_of()
    before = TOTALS["turns_left_out"]
    turn_counts.TOTALS.clear()
    ours, theirs = play(doubts, LIMITS, prompt_of(codec), engine=Speaker(codec, *SAID)), None
    theirs = by_multi_turn(codec, Speaker(codec, *SAID))
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.forks == theirs.forks
    assert ours.loss_mask.tolist() == theirs.loss_mask.tolist() and ours.runs == theirs.runs
    assert {
        "samples": 2,
        "turns": 6,
        "contexts": 6,
        "tokens": 2 * ours.loss_mask.sum(),
    } | NO_CALLS == turn_counts.TOTALS
    assert ours.turn_rewards == theirs.turn_rewards and TOTALS["turns_left_out"] == before


def test_a_tool_call_does_not_fork_and_a_question_behind_it_does():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def calls(base_url, key, row):
        talk = [*row["messages"]]
        talk.append(await said(base_url, key, talk, tools=tools))
        talk += [{"role": "tool", "tool_call_id": "call_1_0", "content": "3"}]
        talk += [await said(base_url, key, talk, tools=tools), user("Sure?")]
        await said(base_url, key, talk, tools=tools)
        return 1.0

    codec = codec_of()
    engine = Speaker(codec, f"{THOUGHT}{call}<eos>", f"{THOUGHT}It is 3.<eos>", f"{THOUGHT}Yes.<eos>")
    turn_counts.TOTALS.clear()
    sample = play(calls, replace(LIMITS, max_tokens=900), prompt_of(codec), engine=engine)
    stats = turn_counts.stats()
    assert [stats[f"part:turns/{name}"] for name in ("per_sample", "contexts_per_sample", "tool_calls_per_sample")] == [
        3.0,
        2.0,
        1.0,
    ]
    assert (stats["part:turns/tool_error_share"], stats["whole:turns/tool_error_share"]) == (0.0, 1.0)
    assert stats["part:turns/tokens_per_turn"] == sample.loss_mask.sum() and stats["whole:turns/tokens_per_turn"] == 3
    first, second = texts(codec, sample)
    result = "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{START}{THOUGHT}{call}{result}{THOUGHT}It is 3."
    assert "Hm" not in second.removesuffix(f"{THOUGHT}Yes.") and call in second and "It is 3." in second


@pytest.mark.parametrize("most, turns", [(70, 1), (300, 3)])
def test_each_context_has_the_room_of_the_response(most, turns):
    """Without the dropped thinking there is more of it; where the conversation itself fills it, the sample ends."""
    codec = codec_of()
    sample = by_multi_turn(codec, Speaker(codec, *SAID), replace(LIMITS, max_tokens=most))
    assert len(sample.turn_rewards or [0]) == turns and sample.finish == ("stop" if turns == 3 else "length")
    assert sample.reach <= most and len(sample.forks) == turns - 1

    async def asks(base_url, key, row):
        messages = [*row["messages"]]
        while True:
            status, answer = await post(base_url, key, {"messages": messages})
            if status == 400:
                return answer["error"]["code"] == "context_length_exceeded"
            messages += [answer["choices"][0]["message"], user("Sure?")]

    cut = play(asks, replace(LIMITS, max_tokens=70), prompt_of(codec), engine=Speaker(codec, *SAID))
    assert (cut.reward, cut.finish, cut.forks) == (1.0, "length", [])


def test_a_sample_that_was_broken_off_forks_again_at_the_same_place():
    """The record answers what is known; the rest goes on with the same random numbers."""
    codec, record = codec_of(), PartialSample()
    whole = by_multi_turn(codec, Speaker(codec, *SAID))
    engine = Speaker(codec, *SAID)
    by_multi_turn(codec, Recorder(engine, verifier, record), max_turns=2)
    again = Recorder(Speaker(codec, SAID[2]), verifier, record)
    sample = by_multi_turn(codec, again)
    assert sample.tokens.tolist() == whole.tokens.tolist() and sample.forks == whole.forks
    assert len(engine.asked) == 2 and len(again.engine.asked) == 1
