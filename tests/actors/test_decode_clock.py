"""Continuous batching as arithmetic on time: costs of steps, a full cache, updates."""

import math

import numpy as np
import pytest

from actors.engines.decode_clock import DecodeClock, DecodeCost, Load, TimedRequest
from actors.engines.lengths import AnswerLengths
from areal_like.sampling import stream_key, uniform, uniforms


def test_steps_cost_what_each_of_them_costs() -> None:
    cost = DecodeCost(base=0.5, per_sequence=0.25, per_token=0.125)
    one_by_one = sum(cost.steps(1, 3, 10 + 3 * step) for step in range(7))
    assert cost.steps(7, 3, 10) == pytest.approx(one_by_one)


@pytest.mark.parametrize("per_token", [0.0, 0.003])
def test_steps_within_a_time_are_those_that_end_in_it(per_token: float) -> None:
    cost = DecodeCost(base=0.02, per_sequence=0.001, per_token=per_token)
    for count in range(1, 200, 7):
        seconds = cost.steps(count, 5, 40)
        assert cost.steps_within(seconds + 1e-9, 5, 40) == count
        assert cost.steps_within(seconds - 1e-9, 5, 40) == count - 1
    assert cost.steps_within(-1.0, 5, 40) == 0


class Ends:
    """Notes when requests end."""

    def __init__(self, clock: DecodeClock):
        self.clock, self.seen = clock, dict[str, tuple[float, str, int]]()

    def __call__(self, request: TimedRequest, finish: str) -> None:
        self.seen[request.name] = self.clock.now, finish, request.made


def decode(clock: DecodeClock, *asked: tuple[str, int, int]) -> Ends:
    """Ask at 0 for (name, prompt, length), and run until all is done."""
    ends = Ends(clock)
    for name, prompt, length in asked:
        clock.submit(TimedRequest(name, length, True, 0.0, ends, prompt))
    while (due := clock.due()) < math.inf:
        clock.advance(due)
    return ends


def test_prompts_cost_their_prefill() -> None:
    clock = DecodeClock(DecodeCost(base=1.0, prefill=0.5), slots=4)
    ends = decode(clock, ("a", 4, 2), ("b", 2, 3))
    assert ends.seen == {"a": (5.0, "stop", 2), "b": (6.0, "stop", 3)}  # 3 s of prefill, then the steps
    assert clock.totals["busy_seconds"] == pytest.approx(6.0) and clock.held == 0


def test_only_the_fresh_share_of_a_prompt_is_computed() -> None:
    clock = DecodeClock(DecodeCost(base=1.0, prefill=0.5, fresh=0.25), slots=4)
    ends = decode(clock, ("a", 4, 2), ("b", 4, 3))
    assert ends.seen == {"a": (3.0, "stop", 2), "b": (4.0, "stop", 3)}  # twice .5 s of prefill


def test_a_full_cache_preempts_the_newest_and_nothing_is_lost() -> None:
    clock = DecodeClock(DecodeCost(base=1.0), slots=4, kv_tokens=20)
    ends = decode(clock, ("a", 4, 12), ("b", 4, 9))
    assert clock.totals["preemptions"] >= 1 and clock.held == 0
    assert {name: made for name, (_, _, made) in ends.seen.items()} == {"a": 12, "b": 9}
    assert ends.seen["a"][0] == 12.0  # the older one was never held up
    assert clock.totals["tokens"] == 21


def test_a_sequence_larger_than_the_cache_runs_alone() -> None:
    clock = DecodeClock(DecodeCost(base=1.0), slots=4, kv_tokens=5)
    ends = decode(clock, ("a", 4, 12), ("b", 1, 2))
    assert ends.seen["a"] == (12.0, "stop", 12) and ends.seen["b"][0] == 14.0


def test_runs_of_a_preempted_sequence_cover_it_by_version() -> None:
    clock, runs = DecodeClock(DecodeCost(base=1.0, recompute=False), slots=4, kv_tokens=20), {}
    for name, length in (("a", 12), ("b", 9)):
        clock.submit(
            TimedRequest(name, length, True, 0.0, lambda request, _: runs.update({request.name: request.runs}), 4)
        )
    clock.advance(3.0)
    clock.load(Load(1, 3.0, lambda: None, lambda: None))
    clock.advance(3.0)
    while (due := clock.due()) < math.inf:
        clock.advance(due)
    assert runs["a"] == [(0, 3), (1, 9)] and runs["b"] == [(0, 3), (1, 6)]


def test_lengths_are_those_of_their_keys() -> None:
    keys = [stream_key(7, number) for number in range(50)]
    assert [uniform(key) for key in keys] == uniforms(np.array(keys, np.uint64), np.zeros(50, np.int64)).tolist()
    lengths, other = AnswerLengths(100.0, 1.0, 0.3, seed=1), AnswerLengths(100.0, 1.0, 0.3, seed=2)
    assert lengths.of(3, 4) == lengths.of(3, 4) != other.of(3, 4)
    assert {AnswerLengths(100.0, 0.0, 0.0).of(prompt, 5) for prompt in range(9)} == {100}


@pytest.mark.parametrize("slots", [8, 40])
def test_what_matters_next_is_when_it_comes(slots: int) -> None:
    """Every third sequence matters, others end in between and join late: nobody needs to look before."""
    cost = DecodeCost(base=0.02, per_sequence=0.001, per_token=1e-5, prefill=1e-4, apply=0.3, fresh=0.5)

    def ends_of(lazily: bool) -> tuple[dict[str, tuple[float, str, int]], int]:
        clock, looks = DecodeClock(cost, slots), 0
        ends, asked = Ends(clock), [(0.0, range(20)), (0.71, range(20, 26)), (0.715, range(26, 30)), (2.0, range(0))]
        for when, numbers in [*asked, (math.inf, ())]:
            while (
                due := clock.due_for(lambda request: int(request.name) % 3 == 0) if lazily else clock.due()
            ) <= when and due < math.inf:
                clock.advance(due)
                looks += 1
            if when == math.inf:
                break
            clock.advance(when)
            for number in numbers:
                length = 5 + number * 37 % 90
                clock.submit(TimedRequest(str(number), length, True, when, ends, prompt=number))
            if not numbers:
                clock.load(Load(1, when, lambda: None, lambda: None))
            clock.advance(when)
        return ends.seen, looks

    (each, many), (lazy, few) = ends_of(False), ends_of(True)
    assert lazy.keys() == each.keys() and len(lazy) == 30 and few < 0.9 * many
    assert all(lazy[name] == (pytest.approx(at), how, made) for name, (at, how, made) in each.items())
