"""Group rewards that need no model: plain functions of the answers of one group, so that they run in the reward pool.

    (prompt, answers, *, knobs) -> one reward per answer

`prompt` is `{"text", "messages", "answer"}`, and each of `answers` `{"text", "tokens", "length", "reward", "finish"}`
(`actors.group_rewards.described`). `reward` is the reward of the task's verifier. A group of one, as in an evaluation,
keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict


class Answer(TypedDict):
    """One answer of a group; `text` or `tokens` is None."""

    text: str | None
    tokens: list[int] | None
    length: int
    reward: float
    finish: str


def none(prompt: Mapping[str, object], answers: Sequence[Answer]) -> list[float]:
    """Each answer keeps its own reward."""
    return [answer["reward"] for answer in answers]


def length_rank(
    prompt: Mapping[str, object],
    answers: Sequence[Answer],
    *,
    weight: Annotated[float, "[0, inf)"] = 0.1,
    right: Annotated[float, "(-inf, inf)"] = 1.0,
) -> list[float]:
    """Among answers whose own reward is at least `right`, the shortest keeps its reward and the longest loses `weight`;
    the others lose a part of it by their rank. Equal lengths share their mean rank. Wrong answers keep their reward, so
    that being short pays only if it is right."""
    rewards = [float(answer["reward"]) for answer in answers]
    among = [place for place, reward in enumerate(rewards) if reward >= right]
    if len(among) < 2:
        return rewards
    lengths = [answers[each]["length"] for each in among]
    for place, length in zip(among, lengths, strict=True):
        rank = (sum(each < length for each in lengths) + sum(each <= length for each in lengths) - 1) / 2
        rewards[place] -= weight * rank / (len(among) - 1)
    return rewards
