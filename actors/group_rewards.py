"""Rewards that see all samples of a group: a judge that compares them, their diversity, their rank by length.

When the task's verifier has scored all samples of a group, the config's `group_reward` gets the prompt and the answers
as JSON values (`described`), and returns the rewards to train on, one finite number per answer:

- A function `(prompt, answers, *, knobs) -> rewards` runs in the reward pool, under its time limits.
- A class, `Class(folder, name, *, knobs)` with `async score(prompt, answers) -> rewards`, runs in the actor: one object
  for all groups, with time limits of its own (`examples/judge`). The actor awaits its `close()`, if it has one.

A group whose group reward fails is dropped as "group reward crashed". Answers to a held-out prompt are a group, too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import isclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.reward_pool import RewardError, RewardPool
from areal_like.config.registry import build, resolve, target
from areal_like.rewards import LARGEST_REWARD
from areal_like.types import Prompt, Sample

KIND = "group_reward"


class GroupRewards:
    """The config's `group_reward`. `folder` is for files of its own, those of the actor `name`."""

    def __init__(self, spec: Mapping[str, Any], pool: RewardPool, folder: Path, name: str):
        self.name, self._pool = str(spec["name"]), pool
        self._knobs = {key: value for key, value in spec.items() if key != "name"}
        held = self.name != "none" and isclass(resolve(KIND, self.name))
        self._object: Any = build(KIND, spec, folder, name) if held else None

    async def __call__(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """The samples with their final rewards. Raises RewardError for any error."""
        if self.name == "none":
            return samples
        group = described(prompt, samples)
        try:
            if self._object:
                found = [float(each) for each in await self._object.score(*group)]
            else:
                found = await self._pool.score(target(KIND, self.name), *group, knobs=self._knobs, several=True)
        except RewardError as error:
            self._pool.note = str(error)
            raise
        except Exception as error:
            raise RewardError(f"group_reward={self.name} raised {type(error).__name__}: {error}") from error
        if len(found) != len(samples) or not all(abs(each) <= LARGEST_REWARD for each in found):
            raise RewardError(f"group_reward={self.name}: got {found}, expected {len(samples)} finite numbers")
        return [replace(sample, reward=reward) for sample, reward in zip(samples, found, strict=True)]

    async def close(self) -> None:
        if hasattr(self._object, "close"):
            await self._object.close()


def none(prompt: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Each answer keeps its own reward."""
    return [answer["reward"] for answer in answers]


def described(prompt: Prompt, samples: Sequence[Sample]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A group as JSON values: the prompt as `{text, messages, answer}`, and each answer as `{text, tokens, length,
    reward, finish}`. `text` is None if the task has none, else `tokens` is; `answer` is None if JSON can't hold it. An
    answer ends with its last trained token; the tools' text before that is a part of it."""
    none = SimpleNamespace(decode=lambda tokens: None)
    codec = prompt.codec or none
    whole = getattr(codec, "whole", codec)  # an answer of one turn is cut (`areal_like.stops`)
    try:
        answer = json.loads(json.dumps(prompt.answer))
    except (TypeError, ValueError):
        answer = None
    about_answers = []
    for sample in samples:
        trained = np.flatnonzero(sample.loss_mask)
        end = sample.prompt_length + (int(trained[-1]) + 1 if len(trained) else 0)
        tokens = sample.tokens[sample.prompt_length : end]
        decode = codec.decode if sample.loss_mask.all() else whole.decode
        content = {"text": decode(tokens), "tokens": None if prompt.codec else tokens.tolist(), "length": len(tokens)}
        about_answers.append(content | {"reward": float(sample.reward), "finish": sample.finish})
    return {"text": whole.decode(prompt.tokens), "messages": list(prompt.messages), "answer": answer}, about_answers
