"""A chat template that drops earlier thinking: agents and multi_turn go on in a context that begins anew."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

from actors import measures
from actors.multi_turn import multi_turn
from actors.resumption import Recorder
from areal_like.partial import PartialSample
from areal_like.tasks.chat import TokenizerCodec
from areal_like.types import Prompt
from tests.actors.agents.scene import limits_of, play, said, user, verifier
from tests.actors.agents.test_conversation import Speaker, chat_prompt, codec_of
from tests.tasks.templates import QWEN3

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


def test_a_sample_that_was_broken_off_forks_again_at_the_same_place():
    """The record answers finished calls; the rest goes on with the same random numbers."""
    codec, record = codec_of(QWEN3), PartialSample()
    whole = by_multi_turn(codec, Speaker(codec, *SAID))
    engine = Speaker(codec, *SAID)
    by_multi_turn(codec, Recorder(engine, verifier, record), max_turns=2)
    again = Recorder(Speaker(codec, SAID[2]), verifier, record)
    sample = by_multi_turn(codec, again)
    assert sample.tokens.tolist() == whole.tokens.tolist() and sample.forks == whole.forks
    assert len(engine.asked) == 2 and len(again.engine.asked) == 1
