"""Check your own loss, advantage, reward or environment: `areal-like check my_module:my_loss [knob=value ...]`.

Finds the component's kind by its parameters or methods, calls it on made-up input, and checks the rules of that kind:
shapes, finite numbers, gradients, no effect beside the result. Prints one line per claim; the exit code is 1 if one
does not hold. `--kind loss ppo` checks a shipped component. In tests: `areal_like.check("my_module:my_loss")`.
"""

import asyncio
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from actors.reward_pool import Verdict, verdict
from areal_like.config.layers import parse_override
from areal_like.config.registry import ConfigError, bind, build, check, resolve
from areal_like.errors import UserError

from .console.arguments import command, refusing
from .console.output import console
from .contracts import demand

PARAMETERS: dict[tuple[str, ...], str] = {
    ("batch", "denominator"): "loss",
    ("answer", "response"): "reward",
    ("rewards", "groups"): "advantage",
    ("episodes",): "advantage",
}
"""Positional parameters of a function → its kind."""
Claims = Mapping[str, Callable[[], None]]
"""What is claimed → its check, which raises AssertionError or any other error."""


def loss_claims(spec: Mapping[str, object], answer: str, response: str) -> Claims:
    from .contracts import losses  # imports torch

    return losses.claims(bind("loss", spec), str(spec["name"]))


def advantage_claims(spec: Mapping[str, object], answer: str, response: str) -> Claims:
    from learners.advantages import Episodes, marked

    advantage = bind("advantage", spec)
    per = 2 if marked(advantage, "per_token") else 1  # two tokens of each sample

    def called(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        if per == 1:
            return np.asarray(advantage(rewards, groups))
        sample = np.repeat(np.arange(len(rewards)), per)
        zeros = np.zeros(len(sample))
        made = Episodes(rewards, groups, sample, zeros, teacher=rewards[sample], student=zeros)
        return np.asarray(advantage(made))

    def shape() -> None:
        rewards, groups = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25]), np.arange(8) // 4
        kept = rewards.copy(), groups.copy()
        first, second = called(rewards, groups), called(rewards, groups)
        demand(first.shape == (8 * per,), f"got shape {list(first.shape)}, expected [{8 * per}]")
        demand(np.isfinite(first).all(), f"got {first.tolist()}, expected finite numbers")
        demand(all(map(np.array_equal, (rewards, groups), kept)), "it wrote into its inputs")
        demand(np.array_equal(first, second), "two calls with the same rewards differ")

    def order() -> None:
        found = called(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, np.int64))
        demand(found[:per].sum() > found[per : 2 * per].sum(), f"rewards 1, 0, 0, 0 of a group gave {found.tolist()}")

    def degenerate() -> None:
        for rewards, groups in (([0.5], [3]), ([1.0, 1.0], [0, 0]), ([0.0, 0.0, 0.0], [0, 0, 1]), ([], [])):
            found = called(np.array(rewards), np.array(groups, np.int64))
            demand(np.isfinite(found).all(), f"rewards {rewards} of groups {groups} gave {found.tolist()} (÷ 0?)")

    return {
        "one finite number per sample (per trained token, if marked per_token), and no effect beside it": shape,
        "the better answer of a group gets the higher advantage": order,
        "groups of one sample, and of equal rewards, stay finite": degenerate,
    }


ANSWERS = ("", "42", "The answer is 42.", "\\boxed{\\frac{1}", "é∑\x00" * 20, "7 " * 5000)
"""What a model may write: nothing, something, broken LaTeX, odd characters, far too much."""


def reward_claims(spec: Mapping[str, object], answer: str, response: str) -> Claims:
    reward = bind("reward", spec)

    def earned(each: str) -> Verdict:
        found = reward(answer, each)
        try:
            return verdict(found)
        except ValueError as error:
            raise AssertionError(f"the response {each[:40]!r}: {error}, without `async`") from None

    def numbers() -> None:
        for each in (response, *ANSWERS):
            first, second = earned(each), earned(each)
            demand(first == second, f"the response {each[:40]!r} earned {first}, then {second}")

    def tells_apart() -> None:
        found = [earned(response), earned("")]
        right, empty = (sum(each.values()) if isinstance(each, dict) else each or 0.0 for each in found)
        demand(
            right > empty,
            f"the response {response[:40]!r} to {answer[:40]!r} earns {right:g}, an empty one {empty:g}; if this is no "
            "right one, give --answer and --response",
        )

    return {
        "whatever the model writes earns a finite number, or its parts, or None, twice the same": numbers,
        "a right response earns more than an empty one": tells_apart,
    }


def environment_claims(spec: Mapping[str, object], answer: str, response: str) -> Claims:
    prompt = build("task", {"name": "copy"}, 3).prompt("train", 0)

    async def maybe(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def played() -> list[Any]:
        world = build("environment", spec)
        seen: list[Any] = [await maybe(world.reset(prompt))]
        for action in ("12*34=", "", 'x<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "|", "42"):
            seen.append(tuple(await maybe(world.step(action))))
            if seen[-1][2:] == (True,):
                break
        if hasattr(world, "close"):
            await maybe(world.close())
        return seen

    def answers() -> None:
        shown, *outcomes = asyncio.run(played())
        demand(isinstance(shown, str), f"reset: got {shown!r}, expected the text that the model is shown, often ''")
        for each in outcomes:
            right = len(each) == 3 and isinstance(each[0], str) and isinstance(each[2], bool)
            right = right and (each[1] is None or math.isfinite(each[1]))
            demand(right, f"step: got {each!r}, expected (text, a finite reward or None, True or False)")

    def repeats() -> None:
        first, second = asyncio.run(played()), asyncio.run(played())
        demand(first == second, f"the same actions gave {first}, then {second}: an interrupted sample is replayed")

    return {
        "reset shows text; step gives (text, reward or None, done)": answers,
        "the same actions have the same outcomes": repeats,
    }


CLAIMS = {
    "loss": loss_claims,
    "advantage": advantage_claims,
    "reward": reward_claims,
    "environment": environment_claims,
}


def kind_of(name: str) -> str:
    """The kind of `module:Name`, by its methods or parameters. Raises ConfigError."""
    if ":" not in name:
        raise ConfigError(f"component: got {name!r}, expected module:Name; or give --kind with a shipped name")
    found = resolve("loss", name)  # any kind: `module:Name` is looked up in the same way
    function = getattr(found, "func", found)
    if inspect.isclass(function) and {"reset", "step"} <= set(dir(function)):
        return "environment"
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    for given, kind in PARAMETERS.items():
        if names[: len(given)] == given:
            if names[len(given) :]:
                raise ConfigError(f"{name}: knobs are keyword-only: write `*,` before {names[len(given)]!r}")
            return kind
    if "completions" in names:
        raise ConfigError(f"{name}: got a reward of TRL, expected (answer, response, *, knobs) of one answer")
    raise ConfigError(f"{name}({', '.join(names)}): which kind is that? Known are {', '.join(CLAIMS)}; set --kind")


def results(
    kind: str, spec: Mapping[str, object], answer: str = "42", response: str = "The answer is 42"
) -> Iterator[tuple[str, str]]:
    """The claims of a component, and why each does not hold ("": it holds). Raises ConfigError."""
    check(kind, spec)
    for claim, holds in CLAIMS[kind](spec, answer, response).items():
        problem = ""
        try:
            holds()
        except (AssertionError, UserError) as error:
            problem = str(error)
        except Exception as error:  # the component's own
            frame = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        yield claim, problem


def require(
    component: str, kind: str | None = None, knobs: Mapping[str, object] | None = None, **help: str
) -> list[str]:
    """Check a component in tests; `help`: the command's options. Returns claims. Raises AssertionError, ConfigError."""
    found = dict(results(kind or kind_of(component), {"name": component, **(knobs or {})}, **help))
    if broken := [f"{claim}: {problem}" for claim, problem in found.items() if problem]:
        raise AssertionError(f"{component}:\n" + "\n".join(broken))
    return list(found)


def main(argv: list[str] | None = None) -> int:
    parser = command("check", __doc__)
    parser.add_argument("component", help="module:Name, found from the current folder; with --kind also a shipped name")
    parser.add_argument("knobs", nargs="*", metavar="knob=value", help="knobs of the component")
    parser.add_argument("--kind", choices=CLAIMS, help="kind of component (default: by its methods or parameters)")
    parser.add_argument("--answer", default="42", help="for a reward: the answer of a row (default: 42)")
    parser.add_argument("--response", default="The answer is 42", help="a right response (default: The answer is 42)")
    args = parser.parse_intermixed_args(argv)
    out, broken = console(), 0
    with refusing():
        kind = args.kind or kind_of(args.component)
        spec = {"name": args.component} | dict(parse_override(each) for each in args.knobs)
        out.print(f"{args.component} is checked as: {kind}", markup=False)
        for claim, problem in results(kind, spec, args.answer, args.response):
            broken += bool(problem)
            out.print(f"BROKEN  {claim}: {problem}" if problem else f"holds   {claim}", markup=False)
    print(f"{broken} broken" if broken else "all hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
