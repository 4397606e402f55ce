"""Many more random histories than a test run has time for: `python -m tests.buffer.many_histories --histories 200000`.

The model, its rules and what must hold are those of `test_replay_properties`; only the dice are plain ones, which makes
a history cost a third, and shrinks nothing. Some rules are left out of each history, others come twice as often. A
failure names its number: `--first N --histories 1` plays it again.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from tests.buffer import test_replay_properties as properties

STEPS = 40
MACHINES = [
    type(f"{policy}, {staleness}", (properties.BufferHistory,), {"policy": policy, "staleness_policy": staleness})
    for policy in properties.POLICIES
    for staleness in properties.STALENESS_POLICIES
]


def roll(strategy: Any, dice: random.Random) -> Any:
    """Draw a value from one of the few strategies that the rules use."""
    inner = getattr(strategy, "wrapped_strategy", strategy)
    match type(inner).__name__:
        case "IntegersStrategy":
            return dice.randint(inner.start, inner.end)
        case "SampledFromStrategy":
            return dice.choice(list(inner.elements))
        case "BooleansStrategy":
            return dice.random() < 0.5
        case "BuildsStrategy":
            named = {name: roll(each, dice) for name, each in inner.kwargs.items()}
            return inner.target(*[roll(each, dice) for each in inner.args], **named)
    raise TypeError(f"no dice for {inner!r}")


def play(number: int) -> str:
    """Play one history; returns the name of its machine. Raises if an invariant fails."""
    dice = random.Random(number)
    machine: RuleBasedStateMachine = MACHINES[number % len(MACHINES)]()
    for first in machine.setup_state().initializers:
        _call(machine, first, dice)
    rules = [each for each in machine.rules if dice.random() < 0.8] or list(machine.rules)
    weights = [dice.choice([1, 1, 2]) for _ in rules]
    for _ in range(dice.randint(1, STEPS)):
        rule = dice.choices(rules, weights)[0]
        if all(condition(machine) for condition in rule.preconditions):
            _call(machine, rule, dice)
        for invariant in machine.invariants:
            invariant.function(machine)
    machine.teardown()
    return type(machine).__name__


def _call(machine: RuleBasedStateMachine, rule: Any, dice: random.Random) -> None:
    rule.function(machine, **{name: roll(strategy, dice) for name, strategy in rule.arguments.items()})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.buffer.many_histories", description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    played: Counter[str] = Counter()
    begin = told = time.monotonic()
    for number in range(args.first, args.first + args.histories):
        try:
            played[play(number)] += 1
        except BaseException:
            print(f"history {number} ({MACHINES[number % len(MACHINES)].__name__}):", file=sys.stderr)
            raise
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"  {played.total():,} of {args.histories:,}, {told - begin:.0f} s", flush=True)
    print(f"{played.total():,} histories, at least {min(played.values()):,} of each of {len(played)} kinds: all hold")


if __name__ == "__main__":
    main()
