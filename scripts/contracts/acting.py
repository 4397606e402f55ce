"""Contracts of what actors call: tasks, rewards, environments, workflows and engines."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from actors.reward_pool import RewardPool
from areal_like.config.registry import bind, build, resolve, target
from areal_like.interfaces import PooledTask, Task
from areal_like.places import python_path
from areal_like.types import Completion, Group, Limits, Prompt
from areal_like.wire.groups import decode_group, encode_group

from . import Broken, Claim, Help, demand

ROWS, SEED, SECONDS = 64, 3, 30.0
ANSWERS = ("", "42", "The answer is 42.", "\\boxed{\\frac{1}", "é∑\x00" * 20, "7 " * 5000)
"""What a model may write: nothing, something, broken LaTeX, odd characters, far too much."""
_ELSEWHERE = """
import importlib, json, os, sys
contracts = importlib.import_module(sys.argv[1])
print(contracts.digest(contracts.build("task", json.loads(sys.argv[2]), contracts.SEED)), flush=True)
os._exit(0)  # to take apart what a task imports takes up to a second
"""


# Tasks


def task_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    task: Task = build("task", spec, SEED)
    claims: list[Claim] = [
        ("its splits have rows, and its tokens a vocabulary", lambda: _splits(task)),
        ("prompts are int32 tokens of that vocabulary, with room for an answer", lambda: _prompts(task)),
        ("train and heldout share no prompt", lambda: _disjoint(task)),
        ("every process makes the same prompts", lambda: _same_elsewhere(spec)),
        ("any answer earns a finite reward, twice the same", lambda: _rewards(task)),
    ]
    if isinstance(task, PooledTask):
        claims.append(("its verifier runs in a process of its own", lambda: _pooled(task)))
    return claims


def _splits(task: Task) -> str:
    sizes = {split: task.size(split) for split in ("train", "heldout")}
    demand(min(sizes.values()) >= 1, f"sizes are {sizes}: each split needs a row")
    demand(isinstance(task.vocab_size, int) and task.vocab_size >= 2, f"vocab_size={task.vocab_size!r}")
    special = [task.pad_token, *task.stop_tokens]
    inside = all(0 <= token < task.vocab_size for token in special)
    demand(inside, f"pad and stop tokens {special} must lie in 0 … {task.vocab_size - 1}")
    return f"{sizes['train']} and {sizes['heldout']} rows"


def _prompts(task: Task) -> None:
    for split in ("train", "heldout"):
        for row in range(min(ROWS, task.size(split))):
            prompt, place = task.prompt(split, row), f"{split} row {row}"
            demand(isinstance(prompt, Prompt), f"{place}: prompt returned {type(prompt).__name__}, not a Prompt")
            tokens = prompt.tokens
            right = isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1 and len(tokens) > 0
            demand(right, f"{place}: tokens must be a NumPy array, int32 [P], P of at least 1; got {tokens!r}")
            demand(
                tokens.min() >= 0 and tokens.max() < task.vocab_size,
                f"{place}: tokens {tokens.min()} … {tokens.max()} are outside of the vocabulary of {task.vocab_size}",
            )
            demand(prompt.max_tokens >= 1, f"{place}: max_tokens={prompt.max_tokens}")


def _disjoint(task: Task) -> None:
    rows = {split: range(min(ROWS, task.size(split))) for split in ("train", "heldout")}
    prompts = {split: [task.prompt(split, row) for row in rows[split]] for split in rows}
    # With its answer: that is the seed of an episode, which an environment shows.
    train, heldout = ({(each.tokens.tobytes(), repr(each.answer)) for each in prompts[split]} for split in rows)
    demand(not train & heldout, f"{len(train & heldout)} prompts are in both: held-out rewards would tell nothing")


def digest(task: Task) -> str:
    """A digest of a task's first prompts."""
    found = hashlib.sha256()
    for split in ("train", "heldout"):
        for row in range(min(ROWS, task.size(split))):
            prompt = task.prompt(split, row)
            found.update(prompt.tokens.tobytes() + repr((prompt.answer, prompt.max_tokens)).encode())
    return found.hexdigest()


def _same_elsewhere(spec: Mapping[str, object]) -> None:
    """In this process and in another one, where texts have other hashes."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONPATH": python_path(), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", _ELSEWHERE, __name__, json.dumps(dict(spec))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    demand(done.returncode == 0, f"another process cannot make them: {last}")
    same = done.stdout.strip() == digest(build("task", spec, SEED))
    demand(same, "two processes made different prompts: take random numbers from (seed, split, row)")


def _answers(task: Task, prompt: Prompt) -> list[np.ndarray]:
    rng = np.random.default_rng(SEED)
    lengths = {1, min(7, prompt.max_tokens), prompt.max_tokens}
    random = [rng.integers(0, task.vocab_size, n).astype(np.int32) for n in sorted(lengths)]
    return [*random, np.full(prompt.max_tokens, task.pad_token, np.int32)]


def _rewards(task: Task) -> str:
    seen = set()
    for row in range(min(4, task.size("train"))):
        prompt = task.prompt("train", row)
        for tokens in _answers(task, prompt):
            earned = [float(asyncio.run(_awaited(task.reward(prompt, tokens)))) for _ in range(2)]
            demand(math.isfinite(earned[0]), f"tokens {tokens[:8].tolist()} … earned {earned[0]}")
            demand(earned[0] == earned[1], f"the same answer earned {earned[0]}, then {earned[1]}")
            seen.add(earned[0])
    return f"random answers earned {min(seen):g} to {max(seen):g}"


async def _awaited(value: Any) -> Any:
    demand(inspect.isawaitable(value), "reward must be `async def`")
    return await value


def _pooled(task: PooledTask) -> None:
    prompt = task.prompt("train", 0)
    verifier, arguments, *knobs = task.verification(prompt, _answers(task, prompt)[0])
    _in_a_process(verifier, arguments, knobs[0] if knobs else {})


def _in_a_process(verifier: str, arguments: tuple[Any, ...], knobs: Mapping[str, object]) -> float:
    async def score() -> float:
        pool = RewardPool(workers=1, timeout=SECONDS)
        try:
            return await pool.score(verifier, *arguments, knobs=knobs)
        finally:
            await pool.close()

    return asyncio.run(score())


# Rewards


def reward_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    reward = bind("reward", spec)
    knobs = {key: value for key, value in spec.items() if key != "name"}

    def numbers() -> str:
        found, slowest = [], 0.0
        for response in (help.response, *ANSWERS):
            begin = time.monotonic()
            earned = reward(help.answer, response)
            slowest = max(slowest, time.monotonic() - begin)
            demand(not inspect.isawaitable(earned), "it is `async def`: a reward is a plain function")
            right = isinstance(earned, int | float) and math.isfinite(earned)
            demand(right, f"the response {response[:40]!r} earned {earned!r}: return a finite number")
            found.append(float(earned))
        demand(slowest < SECONDS, f"an answer took {slowest:.1f} s; after rewards.timeout={SECONDS:g} s it earns 0")
        return f"{min(found):g} to {max(found):g} on {len(found)} responses; {slowest * 1000:.0f} ms at most"

    def repeats() -> None:
        first, second = reward(help.answer, help.response), reward(help.answer, help.response)
        demand(first == second, f"the same response earned {first}, then {second}")

    def tells_apart() -> str:
        right, empty = reward(help.answer, help.response), reward(help.answer, "")
        demand(
            right > empty,
            f"the response {help.response[:40]!r} to {help.answer[:40]!r} earns {right:g}, an empty one {empty:g};"
            " if this is no right one, give --answer and --response",
        )
        return f"{right:g} for a right one, {empty:g} for none"

    def elsewhere() -> None:
        earned = _in_a_process(target("reward", str(spec["name"])), (help.answer, help.response), knobs)
        demand(earned == reward(help.answer, help.response), f"in a process of its own it earns {earned}")

    return [
        ("whatever the model writes earns a finite number", numbers),
        ("the same response earns the same", repeats),
        ("a right response earns more than an empty one", tells_apart),
        ("it runs in a process of its own", elsewhere),
    ]


# Group rewards


def _made(spec: Mapping[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build("group_reward", spec, Path(folder), "actor-0")


def group_reward_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    name, knobs = str(spec["name"]), {key: value for key, value in spec.items() if key != "name"}
    if inspect.isclass(resolve("group_reward", name)):
        return [("it takes its knobs (a class may ask others, so no answers are shown to it)", lambda: _made(spec))]
    prompt = {"text": "6*7", "messages": [{"role": "user", "content": "6*7"}], "answer": help.answer}
    texts = (help.response, *ANSWERS)
    answers = [
        {"text": text, "tokens": None, "length": len(text), "reward": float(place == 0), "finish": "stop"}
        for place, text in enumerate(texts)
    ]

    async def _scores(groups: Sequence[list[dict[str, Any]]]) -> list[list[float]]:
        pool = RewardPool(workers=1, timeout=SECONDS)
        try:
            return [await pool.scores(target("group_reward", name), prompt, group, knobs=knobs) for group in groups]
        finally:
            await pool.close()

    sizes = [answers[:size] for size in (1, 2, len(answers))]

    # In two processes, and no more: to start one and import the function may take seconds.
    @cache
    def once() -> list[list[float]]:
        return asyncio.run(_scores(sizes))

    @cache
    def again() -> list[list[float]]:
        return asyncio.run(_scores([answers, answers[::-1]]))

    def numbers() -> str:
        for group, found in zip(sizes, once(), strict=True):
            demand(len(found) == len(group), f"{len(group)} answers got {len(found)} rewards: {found}")
        return f"{min(found):g} to {max(found):g} for {len(answers)} answers"

    def repeats() -> None:
        first, second = once()[-1], again()[0]
        demand(first == second, f"the same answers got {first}, then {second}")

    def forgets_places() -> None:
        forward, backward = again()
        demand(
            np.allclose(forward, backward[::-1]), f"in another order the answers got {backward[::-1]}, not {forward}"
        )

    return [
        ("groups of any size get a finite reward per answer, in a process of its own", numbers),
        ("the same answers get the same", repeats),
        ("the order of the answers does not matter", forgets_places),
    ]


# Environments and workflows


def _scene(help: Help) -> tuple[Task, Prompt]:
    """The task of `help`, or the calculator, which has text; and its first prompt."""
    task: Task = build("task", {"name": help.task or "calculator"}, SEED)
    return task, task.prompt("train", 0)


def environment_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    _, prompt = _scene(help)
    actions = ["12*34=", "", 'x<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "|", "42"]

    async def played() -> list[object]:
        world = build("environment", spec)
        seen: list[object] = [await _maybe(world.reset(prompt))]
        for action in actions:
            outcome = tuple(await _maybe(world.step(action)))
            seen.append(outcome)
            if outcome[2]:
                break
        if hasattr(world, "close"):
            await _maybe(world.close())
        return seen

    def episode() -> list[object]:
        return asyncio.run(played())

    def answers() -> str:
        shown, *outcomes = episode()
        demand(isinstance(shown, str), f"reset returned {shown!r}: the text that the model is shown, often ''")
        for outcome in outcomes:
            demand(isinstance(outcome, tuple) and len(outcome) == 3, f"step returned {outcome!r}: (text, reward, done)")
            text, reward, done = cast(tuple[Any, Any, Any], outcome)
            right = isinstance(text, str) and (reward is None or math.isfinite(reward)) and isinstance(done, bool)
            demand(right, f"step returned {outcome!r}: (text, a finite reward or None, True or False)")
        return f"an episode of {len(outcomes)} turns"

    def repeats() -> None:
        first, second = episode(), episode()
        demand(first == second, f"the same actions gave {first}, then {second}: an interrupted sample is replayed")

    return [
        ("reset shows text; step gives (text, reward or None, done)", answers),
        ("the same actions have the same outcomes", repeats),
    ]


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class _Script:
    """An engine that writes random tokens from a seed, two versions per answer; `ends`: how its answers finish."""

    slots = 8

    def __init__(self, task: Task, ends: str):
        self._task, self._ends, self.calls = task, ends, list[object]()

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        self.calls.append((tokens.tolist(), limits, request))
        demand(limits.max_tokens >= 1, f"it asked for max_tokens={limits.max_tokens}")
        await asyncio.sleep(0)
        count = min(limits.max_tokens, 5)
        rng = np.random.default_rng([len(tokens), limits.offset, limits.key])
        said = rng.integers(0, self._task.vocab_size, count).astype(np.int32)
        runs = [(1, 1), (2, count - 1)] if count > 1 else [(2, 1)]
        return Completion(said, -rng.random(count).astype(np.float32), runs, self._ends)  # type: ignore[arg-type]

    def abort(self, requests: object) -> None:
        """Does nothing: no request runs."""


def workflow_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    workflow = bind("workflow", spec)
    task, prompt = _scene(help)
    limits = Limits(max_tokens=prompt.max_tokens, stop=task.stop_tokens, key=7)

    async def reward(prompt: Prompt, tokens: np.ndarray) -> float:
        return len(tokens) / 8

    def rolled(ends: str) -> tuple[Any, _Script]:
        engine = _Script(task, ends)
        call = workflow(engine, reward, prompt, limits, "group 0, sample 0")
        demand(inspect.isawaitable(call), "a workflow is `async def`")
        return asyncio.run(asyncio.wait_for(call, SECONDS)), engine

    def travels() -> str:
        sample, engine = rolled("stop")
        demand(sample is not None, "it rejected (None) a sample that ended well")
        group = Group(0, [sample], {1: "a", 2: "b"})
        decoded = decode_group(*encode_group(group)).samples[0]
        demand(np.array_equal(decoded.tokens, sample.tokens), "the sample does not survive its way to the learner")
        count = sample.response_length
        lengths = {len(sample.logprobs), len(sample.loss_mask), sum(n for _, n in sample.runs)}
        demand(lengths == {count}, f"a response of {count} tokens has logprobs, masks and runs of {sorted(lengths)}")
        demand(sample.loss_mask.any(), "no token is trained: loss_mask is all False")
        demand(set(sample.runs) and all(v in (1, 2) for v, _ in sample.runs), "versions come from the engine alone")
        demand(math.isfinite(sample.reward), f"its reward is {sample.reward}")
        return f"{count} tokens from {len(engine.calls)} calls of the engine"

    def repeats() -> None:
        (first, before), (second, after) = rolled("stop"), rolled("stop")
        demand(
            before.calls == after.calls, "two rollouts with the same answers made other calls: a resume repeats them"
        )
        demand(np.array_equal(first.tokens, second.tokens), "two rollouts with the same answers differ")

    def aborted() -> None:
        sample, _ = rolled("abort")
        demand(sample is None, "an answer that was aborted became a sample: return None, it earns no fair reward")

    return [
        ("its sample is whole, and travels to the learner", travels),
        ("with the same answers it makes the same calls", repeats),
        ("an aborted answer is no sample", aborted),
    ]


# Engines


def engine_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    return [
        ("it writes tokens with log probabilities and versions", lambda: _ran(spec, _writes)),
        ("the same stream of random numbers gives the same tokens", lambda: _ran(spec, _keyed)),
        ("an aborted request ends at once, with what it has", lambda: _ran(spec, _aborts)),
        ("new weights arrive while it writes, and name the version of later tokens", lambda: _ran(spec, _updates)),
        ("it keeps count (stats)", lambda: _ran(spec, _counts)),
    ]


VOCABULARY = 13
_PROMPT = np.array([1, 2, 3], np.int32)


def _ran(spec: Mapping[str, object], claim: Callable[[Any, Any], Any]) -> object:
    """A claim about an engine with a tiny random model, if it needs one."""
    kind = resolve("engine", str(spec["name"]))
    if getattr(kind, "needs_folder", False):
        raise Broken("an engine with processes of its own cannot be checked here")

    async def run() -> object:
        state = None
        if getattr(kind, "needs_model", False):
            from areal_like.models.causal_lm import publishable

            model = build("model", {"name": "qwen2"}, SEED, VOCABULARY)
            state = publishable(model)
            engine = build("engine", spec, model)
        else:
            engine = build("engine", spec)
        try:
            return await asyncio.wait_for(claim(engine, state), SECONDS)
        finally:
            await engine.close()

    return asyncio.run(run())


async def _writes(engine: Any, state: Any) -> str:
    demand(isinstance(getattr(engine, "slots", None), int) and engine.slots >= 1, "it needs `slots`: sequences at once")
    answers = await asyncio.gather(*(engine.generate(_PROMPT, Limits(9, key=key), f"r{key}") for key in range(4)))
    for said in answers:
        n = len(said.tokens)
        demand(1 <= n <= 9, f"asked for at most 9 tokens it wrote {n}")
        demand(len(said.logprobs) == n and sum(c for _, c in said.runs) == n, f"{n} tokens: as many logprobs, and runs")
        demand(bool((said.logprobs <= 1e-6).all()), f"log probabilities are not above 0: {said.logprobs.tolist()}")
        demand(said.finish in ("stop", "length"), f"finish={said.finish!r}")
    return f"{sum(len(said.tokens) for said in answers)} tokens"


async def _keyed(engine: Any, state: Any) -> None:
    first = await engine.generate(_PROMPT, Limits(9, key=5), "a")
    await engine.generate(_PROMPT, Limits(9, key=6), "b")
    second = await engine.generate(_PROMPT, Limits(9, key=5), "c")
    same = np.array_equal(first.tokens, second.tokens)
    demand(same, "the same prompt and Limits.key gave other tokens: draw with areal_like.sampling, or document this")


async def _aborts(engine: Any, state: Any) -> None:
    asked = asyncio.ensure_future(engine.generate(_PROMPT, Limits(3000), "long"))
    await asyncio.sleep(0.05)
    engine.abort(["long"])
    said = await asyncio.wait_for(asked, 5.0)
    demand(said.finish == "abort" or len(said.tokens) <= 3000, f"finish={said.finish!r}")
    demand(len(said.tokens) == len(said.logprobs), "the tokens it had come with their log probabilities")


async def _updates(engine: Any, state: Any) -> None:
    from areal_like.weights.update import Update

    engine.version = 0
    asked = asyncio.ensure_future(engine.generate(_PROMPT, Limits(200), "long"))
    await asyncio.sleep(0.02)
    await engine.load(Update(1, "digest", state))
    demand(engine.version == 1, f"after load(version 1) engine.version is {engine.version}")
    await asked
    later = await engine.generate(_PROMPT, Limits(3), "later")
    demand({version for version, _ in later.runs} == {1}, f"tokens after load(version 1) say runs={later.runs}")


async def _counts(engine: Any, state: Any) -> None:
    await engine.generate(_PROMPT, Limits(4), "r")
    found = engine.stats()
    missing = {
        "tokens",
        "busy_seconds",
        "updates",
        "apply_seconds",
        "pauses",
        "pause_seconds",
        "running",
    } - found.keys()
    demand(not missing, f"stats() lacks {', '.join(sorted(missing))}")
    demand(found["tokens"] >= 1, f"tokens={found['tokens']} after a request")


CLAIMS = {
    "task": task_claims,
    "reward": reward_claims,
    "group_reward": group_reward_claims,
    "environment": environment_claims,
    "workflow": workflow_claims,
    "engine": engine_claims,
}
