"""Environments written for the package verifiers (Prime Intellect): their examples are the prompts. The environment
is the agent (`play`): its `rollout` calls the actor's endpoint, and its rubric gives the reward. Its code (tools,
rewards) runs in the actor's event loop: it must not block.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from areal_like.errors import UserError
from areal_like.tasks.rows import Row, Rows, TaskOfRows
from areal_like.tasks.text import TextTask
from areal_like.types import Prompt

if TYPE_CHECKING:
    from datasets import Dataset
    from verifiers import Environment

_ELSEWHERE = "it runs programs, and wants Prime's sandboxes, a browser or a server: train it as an agent of your own"
REFUSED = {kind: _ELSEWHERE for kind in ("SandboxEnv", "CliAgentEnv", "RLMEnv", "MCPEnv", "BrowserEnv", "OpenEnvEnv")}
"""Classes of the package's own whose subclasses are not taken → why."""
EVALUATED = {"binary_matrix", "countdown", "intermediate_integration", "n_queens"}
EVALUATED |= {"puzzle24", "simple_integration", "spiral_matrix", "string_insertion"}
"""Data sets of reasoning_gym whose scorers evaluate answers as Python."""
UNSTEADY = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Those whose items depend on the order of Python's sets, which each process draws anew."""


class Verifiers(TaskOfRows, TextTask):
    """Examples of an environment. Knobs of the text: see `areal_like.tasks.text`.

    env: its name, as `verifiers.load_environment` takes it: a module with a function `load_environment`. args: the
        function's arguments.
    heldout_fraction: of the different prompts, where the environment has no data set for evaluation.
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
        if importlib.util.find_spec("verifiers") is None:
            raise UserError("task=verifiers needs the package: pip install 'areal_like[verifiers]'")
        if not (found := version("verifiers")).startswith("0.1."):
            hint = "later ones have no load_environment: pip install 'areal_like[verifiers]'"
            raise UserError(f"task=verifiers: got verifiers {found}, expected 0.1; {hint}")
        super().__init__(**text)  # type: ignore[arg-type]  # its knobs, checked by the registry
        self._seed, self._env, self._fraction = seed, env, heldout_fraction
        self._args = json.dumps(dict(args or {}), sort_keys=True)

    def prompt(self, split: str, row: int) -> Prompt:
        found, name = self._rows.row(split, row)
        answer = {"env": self._env, "args": self._args, "example": json.loads(found.answer)}
        return self._prompt(name, self._messages(found.prompt), answer)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """The rubric's reward of a conversation of this one answer: all there is in an environment of a single turn."""
        place = self._env, self._args
        env, given = environment(*place), example(*place, *prompt.answer["example"])
        state = await env.init_state(given | {"prompt": list(prompt.messages)}, None, "policy", {})
        state["completion"] = [{"role": "assistant", "content": prompt.codec.decode(tokens)}]
        await env.rubric.score_rollout(state)
        return float(state["reward"])

    @cached_property
    def _rows(self) -> Rows:  # type: ignore[override]  # read on first need
        env = environment(self._env, self._args)
        train = self._of("train", env.get_dataset())
        has_own = env.eval_dataset_source is not None or env.eval_dataset is not None
        heldout = self._of("eval", env.get_eval_dataset()) if has_own else None
        return Rows(self._seed, train, heldout, self._fraction)

    def _of(self, name: str, data: Dataset) -> list[Row]:
        rows = []
        for number, messages in enumerate(data["prompt"]):
            said = [{key: value for key, value in each.items() if value is not None} for each in messages]
            rows.append(Row(f"{self._env}, {name} {number}", said, json.dumps([name, number])))
        return rows


@lru_cache(maxsize=16)
def environment(name: str, args: str) -> Environment:
    """A process's own; `args` are JSON text. Raises ValueError for one that can't be loaded, or is not taken."""
    import datasets
    import verifiers

    datasets.disable_progress_bars()
    with _signals_kept():
        try:
            env = verifiers.load_environment(name, **json.loads(args))
        except Exception as error:  # the environment's code may raise anything
            raise ValueError(f"task.env: {name!r} with {args} can't be loaded: {error}") from error
    for each in [env, *getattr(env, "envs", [])]:
        if problem := _problem(each):
            raise ValueError(f"task.env: {name!r} is not taken: {problem}")
    return env


def example(name: str, args: str, split: str, number: int) -> dict[str, object]:
    """A row of an environment's data sets, "train" or "eval"."""
    env = environment(name, args)
    data = env.get_dataset() if split == "train" else env.get_eval_dataset()
    return dict(data[number])


async def play(base_url: str, key: str, row: dict[str, Any]) -> float:
    """One rollout, and its reward. An answer without a word earns what the rubric gives an empty conversation. Raises
    what went wrong otherwise: the sample is drawn again."""
    import verifiers

    asked = row["answer"]
    place = asked["env"], asked["args"]
    env = environment(*place)
    client = client_of(base_url).with_options(api_key=key)
    given = example(*place, *asked["example"]) | {"prompt": row["messages"]}
    state = await env.rollout(given, client, "policy", {})
    error = state.get("error")
    if error is not None and not isinstance(error, verifiers.EmptyModelResponseError):
        raise error
    await env.rubric.score_rollout(state)
    return float(state["reward"])


@cache
def client_of(base_url: str) -> Any:
    """An actor's one client: its connections serve all samples."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="of each sample", max_retries=0, timeout=None)


def _problem(env: Environment) -> str:
    for kind in type(env).__mro__:
        if kind.__module__.startswith("verifiers.") and kind.__name__ in REFUSED:
            return f"{kind.__name__}: {REFUSED[kind.__name__]}"
        if kind.__name__ == "ReasoningGymEnv":
            asked = {*env.get_dataset()["task"], *env.get_eval_dataset()["task"]}
            if evaluated := sorted(asked & EVALUATED):
                return f"scorers of {', '.join(evaluated)} evaluate answers as Python"
            if unsteady := sorted(asked & UNSTEADY):
                return f"items of {', '.join(unsteady)} follow the order of Python's sets, which processes differ in"
    if env.message_type != "chat":
        return "it asks for completions, and the endpoint serves chat completions only"
    if any(map(env.rubric._is_group_func, env.rubric._get_reward_funcs())):
        return "a reward function of its rubric sees whole groups: write it as a group_reward (docs/extending.md)"
    return ""


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Environments take SIGINT and SIGTERM, which are the actor's."""
    takes, signal.signal = signal.signal, lambda *_: None
    try:
        yield
    finally:
        signal.signal = takes
