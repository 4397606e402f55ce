"""Contracts of what the buffer calls: schedulers, sizings, policies, samplers and filters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import msgpack
import numpy as np

from areal_like.config.registry import bind, build
from buffer.policies import Waiting
from buffer.results import WINDOW, Known
from buffer.samplers import NEW
from buffer.schedulers import GroupPlan, Round, Scheduler, View
from buffer.sizing import GroupLengths, Sizing

from . import Claim, Help, demand

BATCHES, SAMPLES = 6, 64
SEEN = [
    [GroupLengths((5, 9, 7, 8), (False,) * 4)],
    [GroupLengths((5, 90, 7, 8), (False,) * 4), GroupLengths((3, 40), (False, True))],
    [],
]
"""Groups that ended between two batches, for several batches: equal lengths, a straggler, none."""


def filter_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    keep = bind("filter", spec)
    groups = [([0.0, 1.0], [3, 5]), ([1.0, 1.0], [3, 5]), ([0.5], [1]), ([-1.0, 2.0, 0.0], [9, 9, 400])]

    def returns_text() -> str:
        found = [keep(rewards, lengths) for rewards, lengths in groups]
        wrong = [each for each in found if not isinstance(each, str)]
        demand(not wrong, f"it returned {wrong[:1]}: return '' to keep a group, or the reason as text")
        demand(not all(found), f"it leaves out all of {len(groups)} different groups: a run would never fill a batch")
        return f"kept {found.count('')} of {len(groups)} examples"

    return [
        ("it returns '' to keep a group, or a reason", returns_text),
        ("it changes none of its inputs, and repeats", lambda: _repeats(keep, groups)),
    ]


def _repeats(function: Callable[..., object], examples: Sequence[tuple[object, ...]]) -> None:
    for example in examples:
        given = copy.deepcopy(example)
        first, second = function(*given), function(*given)
        demand(given == example, f"it wrote into its inputs {example}")
        demand(first == second, f"two calls with the same input gave {first!r} and {second!r}")


def policy_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    policy = bind("batch_policy", spec)
    waiting = [
        Waiting(10 + slot, slot, 3, pushed, left) for slot, pushed, left in ((0, 3, 1), (1, 0, 2), (2, 2, 0), (3, 1, 2))
    ]

    def chooses() -> None:
        chosen = policy(waiting, set(), 2)
        demand(isinstance(chosen, tuple), f"it returned {chosen!r}: a tuple of ids, () for none")
        known = {group.id for group in waiting}
        demand(
            len(set(chosen)) == len(chosen) and set(chosen) <= known,
            f"it chose {chosen}: each an id of a waiting group",
        )
        demand(len(chosen) == 2, f"four groups wait and none is missing, but it chose {chosen}: the learner would wait")

    def waits() -> None:
        demand(policy(waiting[:1], set(), 2) == (), "with fewer groups than a batch it must return ()")
        demand(policy([], set(), 2) == (), "with no group it must return ()")

    return [
        ("it chooses as many different groups as a batch needs", chooses),
        ("with too few it returns ()", waits),
        ("it changes none of its inputs, and repeats", lambda: _repeats(policy, [(waiting, {2}, 2)])),
    ]


def sampler_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    sampler = bind("sampler", spec)
    examples = [_known(seen, new) for seen, new in ((0, 5), (1, 0), (1, 3), (20, 0), (20, 1_000_000))]

    def draw(known: Known, seed: int) -> int:
        return sampler(known, np.random.default_rng(seed))

    def chooses() -> None:
        for known in examples:
            seen = len(known.rows)
            for seed in range(BATCHES):
                chosen = draw(known, seed)
                demand(isinstance(chosen, int), f"it returned {chosen!r}: an int, the place of a prompt, or {NEW}")
                may = f"{seen} prompts were drawn before, {known.new} never"
                demand(0 <= chosen < seen or (chosen == NEW and known.new > 0), f"it chose {chosen}, but {may}")

    def repeats() -> None:
        for known in examples:
            before = copy.deepcopy(known)
            first, second = ([draw(known, seed) for seed in range(BATCHES)] for _ in range(2))
            demand(first == second, f"it chose {first}, then {second}, by the same results: use `dice`, and no clock")
            same = all(np.array_equal(*pair, equal_nan=True) for pair in zip(before[:5], known[:5], strict=True))
            demand(same, "it wrote into its inputs")

    return [
        ("it chooses a prompt that there is", chooses),
        ("it changes none of its inputs, and repeats", repeats),
    ]


def _known(seen: int, new: int) -> Known:
    """Prompts of all pass rates; a fourth of them without a result, a fifth under way."""
    rates = np.tile(np.linspace(0, 1, seen).reshape(-1, 1), WINDOW)
    places = np.arange(seen)
    rates[places % 4 == 3] = np.nan
    answers = np.where(np.isnan(rates), 0, 8)
    return Known(rates, answers, places % 3 + 1, places % 5 != 4, places * 7, new)


def sizing_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    def makes() -> Sizing:
        return build("sizing", spec)

    def sizes() -> None:
        sizing = makes()
        for _ in range(BATCHES):
            for seen in SEEN:
                size = sizing.next_size(seen)
                demand(
                    size in sizing.sizes and size >= 1, f"next_size gave {size}, which is not in sizes={sizing.sizes}"
                )

    def metrics() -> None:
        sizing = makes()
        sizing.next_size(SEEN[1])
        wrong = {name: value for name, value in sizing.metrics().items() if not isinstance(value, int | float)}
        demand(not wrong, f"metrics must be numbers: {wrong}")

    return [
        ("every size is one of `sizes`", sizes),
        ("its metrics are numbers", metrics),
        (
            "after a crash it decides as before (state_dict)",
            lambda: _goes_on(makes, lambda s, k: s.next_size(SEEN[k % 3])),
        ),
    ]


def scheduler_claims(spec: Mapping[str, object], help: Help) -> list[Claim]:
    def makes() -> Scheduler:
        return build("scheduler", spec, build("sizing", {"name": "fixed", "group_size": 8}))

    def bound() -> str:
        found = makes().max_staleness
        whole = isinstance(found, int | float) and found >= 0 and (math.isinf(found) or found == int(found))
        demand(whole, f"max_staleness={found!r}: a whole number of versions, 0 or more, or inf")
        return f"max_staleness={found:g}"

    def opens() -> None:
        scheduler = makes()
        for batch in range(BATCHES):
            demand(
                scheduler.ready_to_open(batch, batch), f"batch {batch} never opens, though all before it are trained"
            )
            groups = scheduler.open_batch(SAMPLES, 0, SEEN[batch % 3])
            demand(
                isinstance(groups, int) and groups >= 1, f"open_batch gave {groups!r}: the number of groups, 1 or more"
            )
            _rolls_out(scheduler, groups)

    def refuses() -> None:
        scheduler = makes()
        groups = scheduler.open_batch(SAMPLES, 0, [])
        none = scheduler.admit(_view(room=0, running=groups, left=0, groups=groups))
        demand(none is None, f"admit gave {none} though the bound has no room: return None")

    def asks_no_clock() -> None:
        first, second = (_plans(makes()) for _ in range(2))
        demand(first == second, "two schedulers that saw the same made different plans: no clock, no random numbers")

    return [
        ("it has a bound", bound),
        ("it opens batches and gives each of their groups work", opens),
        ("it starts nothing if the bound has no room", refuses),
        ("the same events give the same plans", asks_no_clock),
        ("after a crash it decides as before (state_dict)", lambda: _goes_on(makes, lambda s, _: _round(s))),
    ]


def _view(*, room: float, running: int, left: int, groups: int) -> View:
    now = Round(left=left, unfinished=groups, redundant=0, fresh=math.inf, current=True)
    return View(room=room, running=running, deferred=0, round=lambda: now)


def _rolls_out(scheduler: Scheduler, groups: int) -> list[GroupPlan]:
    """Ask for the groups of a batch; each is done at once."""
    plans = []
    for started in range(groups):
        plan = scheduler.admit(_view(room=groups - started, running=0, left=groups - started, groups=groups - started))
        demand(
            isinstance(plan, GroupPlan),
            f"admit gave {plan!r} for group {started + 1} of {groups}, though there is room and nothing runs: the run "
            "would stall; return a GroupPlan",
        )
        assert plan is not None
        demand(plan.launch >= plan.need >= 1, f"{plan}: launch at least `need` samples, and need 1 or more")
        plans.append(plan)
    return plans


def _round(scheduler: Scheduler) -> list[GroupPlan]:
    return _rolls_out(scheduler, scheduler.open_batch(SAMPLES, 0, SEEN[1]))


def _plans(scheduler: Scheduler) -> list[list[GroupPlan]]:
    return [_round(scheduler) for _ in range(BATCHES)]


def _goes_on(makes: Callable[[], Scheduler | Sizing], step: Callable[..., object]) -> str:
    """Its state is plain data, and a new one with that state makes the same decisions."""
    first, second = makes(), makes()
    for number in range(BATCHES):
        step(first, number)
    state = first.state_dict()
    if state is None:
        return "it keeps no state"
    try:
        carried = msgpack.unpackb(msgpack.packb(state), strict_map_key=False)
    except TypeError as error:
        demand(False, f"state_dict must be plain data (numbers, text, lists, dicts): {error}")
    second.load_state_dict(carried)
    for number in range(BATCHES):
        before, after = step(first, number), step(second, number)
        demand(before == after, f"after load_state_dict it decides {after}, before {before}")
    return "its state survives"


CLAIMS = {
    "filter": filter_claims,
    "batch_policy": policy_claims,
    "sampler": sampler_claims,
    "sizing": sizing_claims,
    "scheduler": scheduler_claims,
}
