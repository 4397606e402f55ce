"""Check your own component: `python -m scripts.check my_module:MyLoss [knob=value ...] [--kind loss]`.

Finds out the component's kind, calls it on made-up input as the processes of a run do, and checks the rules of that
kind. Prints one line per claim; the exit code is 1 if one does not hold. For a shipped component give the kind:
`--kind loss ppo`. From a test: `areal_like.check("my_module:my_loss")` raises AssertionError.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from areal_like.config.layers import parse_override
from areal_like.config.registry import COMPONENTS, ConfigError, check, resolve
from areal_like.errors import UserError

from .console.arguments import command, refuse
from .console.output import console

CONTRACTS = {
    **dict.fromkeys(("loss", "advantage"), "learning"),
    **dict.fromkeys(("scheduler", "sizing", "batch_policy", "sampler", "filter"), "serving"),
    **dict.fromkeys(("task", "reward", "group_reward", "environment", "workflow", "engine"), "acting"),
}
"""Kind → the module of `scripts.contracts` that has its claims."""
METHODS = {
    "task": {"prompt", "size", "reward"},
    "environment": {"reset", "step"},
    "scheduler": {"admit", "open_batch"},
    "sizing": {"next_size", "sizes"},
    "engine": {"generate", "load"},
}
PARAMETERS = {
    ("batch", "denominator"): "loss",
    ("rewards", "groups"): "advantage",
    ("episodes",): "advantage",
    ("rewards", "lengths"): "filter",
    ("answer", "response"): "reward",
    ("prompt", "answers"): "group_reward",
    ("waiting", "missing", "want"): "batch_policy",
    ("known", "dice"): "sampler",
}
"""Positional parameters of a function → its kind."""


@dataclass(frozen=True)
class Result:
    """A claim, and why it does not hold ("": it holds)."""

    claim: str
    problem: str
    remark: str = ""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("check", __doc__)
    parser.add_argument("component", help="module:Name, found from the current folder; with --kind also a shipped name")
    parser.add_argument("knobs", nargs="*", metavar="knob=value", help="knobs of the component")
    parser.add_argument("--kind", choices=CONTRACTS, help="if methods or parameters do not show it")
    parser.add_argument("--answer", default="42", help="reward: an answer, as a row of the data set has it")
    parser.add_argument("--response", default="The answer is 42", help="reward: a right response to it")
    parser.add_argument("--task", default="", help="environment, workflow: a task with prompts for it")
    return parser.parse_intermixed_args(argv)


def kind_of(name: str) -> str:
    """The kind of a shipped component, or of `module:Name`, by its methods or parameters. Raises ConfigError."""
    if shipped := [kind for kind in CONTRACTS if name in COMPONENTS[kind]]:
        return shipped[0]
    if ":" not in name:
        own = f"{name.removesuffix('.py').replace('/', '.')}:NAME" if name.endswith(".py") else "module:Name"
        raise ConfigError(f"there is no shipped component {name!r}; name your own as {own}")
    try:
        found = resolve("task", name)  # any kind: `module:Name` is looked up in the same way
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("task.name: ")) from None
    except Exception as error:  # the user's module: whatever it raises
        raise ConfigError(f"{name.partition(':')[0]} cannot be imported: {in_words(error)}") from None
    function = getattr(found, "func", found)
    if not callable(function):
        raise ConfigError(f"{name} is {function!r}: a component is a function or a class")
    if inspect.isclass(function):
        fitting = [kind for kind, methods in METHODS.items() if methods <= set(dir(function))]
        if len(fitting) == 1:
            return fitting[0]
        raise ConfigError(f"{name}: its methods fit {' and '.join(fitting) or 'no kind'}; set --kind")
    if inspect.iscoroutinefunction(function):
        return "workflow"
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    for given in PARAMETERS:
        if names[: len(given)] == given and len(names) > len(given):
            knob = names[len(given)]
            raise ConfigError(f"{name}: knobs are keyword-only: write `*,` before {knob!r}, and give it a default")
    if names not in PARAMETERS:
        known = "; ".join(f"{kind}({', '.join(by)})" for by, kind in PARAMETERS.items())
        raise ConfigError(f"{name}({', '.join(names)}): which kind is that? Known are {known}; or set --kind")
    return PARAMETERS[names]


def results(kind: str, spec: Mapping[str, object], **help: Any) -> Iterator[Result]:
    """The claims of a component, one by one. Raises ConfigError if there is no such component or knob."""
    from .contracts import Help

    check(kind, spec)
    contracts = import_module(f".contracts.{CONTRACTS[kind]}", __package__)
    try:
        claims = contracts.CLAIMS[kind](spec, Help(**help))
    except UserError:
        raise
    except Exception as error:
        yield Result("it can be built", in_words(error))
        return
    for claim, holds in claims:
        try:
            yield Result(claim, "", holds() or "")
        except Exception as error:
            yield Result(claim, in_words(error))


def in_words(error: Exception) -> str:
    """The text of a broken claim; for any other error also the place where it was raised."""
    if type(error).__name__ in ("Broken", "BadLoss"):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    others = (str(Path(__file__).parent), sys.prefix, sys.base_prefix)
    own = [frame for frame in frames if not frame.filename.startswith(others)]  # of the component
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def require(
    component: str, kind: str | None = None, knobs: Mapping[str, object] | None = None, **help: str
) -> list[str]:
    """Check a component against its contract, for tests: `areal_like.check("my_module:MyLoss")`. Returns the claims.

    `help`: answer, response, task, as the command's options. Raises AssertionError with all claims that do not hold,
    and ConfigError if there is no such component.
    """
    found = list(results(kind or kind_of(component), {"name": component, **(knobs or {})}, **help))
    broken = [f"{each.claim}: {each.problem}" for each in found if each.problem]
    if broken:
        raise AssertionError(f"{component}:\n" + "\n".join(broken))
    return [each.claim for each in found]


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    out, broken = console(), 0
    try:
        kind = args.kind or kind_of(args.component)
        spec = {"name": args.component} | dict(parse_override(each) for each in args.knobs)
        out.print(f"{args.component} is checked as: {kind}", markup=False)
        for each in results(kind, spec, answer=args.answer, response=args.response, task=args.task):
            broken += bool(each.problem)
            mark = "BROKEN" if each.problem else "holds "
            remark = each.problem or each.remark
            out.print(f"{mark}  {each.claim}{f': {remark}' if remark else ''}", markup=False)
    except (UserError, ValueError, OSError) as error:
        refuse(error)
    print(f"{broken} broken" if broken else "all hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
