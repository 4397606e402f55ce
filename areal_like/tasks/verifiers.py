"""Environments written for the package verifiers (Prime Intellect): the tasks of a taskset are the prompts, and the
environment is the agent (`areal_like.tasks.verifiers_env`)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from typing import Annotated

import numpy as np

from areal_like.errors import UserError
from areal_like.tasks.rows import Row, Rows, TaskOfRows, checked_prompt
from areal_like.tasks.text import TextTask
from areal_like.types import Prompt


class Verifiers(TaskOfRows, TextTask):
    """Tasks of a taskset. Knobs of the text: see `areal_like.tasks.text`.

    env: a module, or an installed package by the package's name for it. args: more of the block `[env]` in the
        package's own configurations: `{taskset: {...}, agent: {max_turns: 8}}`.
    heldout_fraction: of the different prompts.
    """

    def __init__(
        self,
        seed: int,
        *,
        env: str,
        args: Mapping[str, object] | None = None,
        heldout_fraction: Annotated[float, "(0, 1)"] = 0.05,
        **text: object,
    ):
        found = version("verifiers") if importlib.util.find_spec("verifiers") else "no package"
        if not found.startswith("0.4."):
            raise UserError(f"task=verifiers: got verifiers {found}, expected 0.4: pip install 'areal_like[verifiers]'")
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._seed, self._env, self._fraction = seed, env, heldout_fraction
        self._args = json.dumps(dict(args or {}), sort_keys=True)

    def prompt(self, split: str, row: int) -> Prompt:
        found, name = self._rows.row(split, row)
        answer = {"env": self._env, "args": self._args, "task": json.loads(found.answer)[0]}
        return self._prompt(name, self._messages(found.prompt), answer)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        from areal_like.tasks.verifiers_env import score

        return await score(prompt.answer, prompt.messages, prompt.codec.decode(tokens))

    @cached_property
    def _rows(self) -> Rows:  # type: ignore[override]  # read on first need
        from areal_like.tasks.verifiers_env import environment, messages_of

        rows = []
        for number, task in enumerate(environment(self._env, self._args)[1]):
            place = f"{self._env}, task {number}"
            prompt = checked_prompt(place, "prompt", messages_of(task.data), chat=True)
            rows.append(Row(place, prompt, json.dumps([number, task.hash])))
        return Rows(self._seed, rows, None, self._fraction)
