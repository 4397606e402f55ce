"""Verifiers that exceed their time: reported from the actors' totals; a run in which all do so ends."""

import pytest

from buffer.checks import RolloutsFail, VerifierTimeouts
from tests.buffer.house import SIGN_OF_LIFE, House, asynchronous


def totals(answered: float, timeouts: float) -> dict[str, float]:
    return {"sum:rewards/answered": answered, "sum:rewards/timeouts": timeouts}


def test_a_window_of_late_answers_ends_the_run_with_the_verifier_and_its_limit() -> None:
    house = House(asynchronous())
    house.server.verifiers = VerifierTimeouts("jsonl (task.reward=mine:verify)", timeout=2.5, limit=0.95, window=8)
    house.start()
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"stats": totals(7, 7)})
    assert house.server.status()["rewards/timeouts"] == 7, "told at once, before the run ends of it"
    with pytest.raises(RolloutsFail, match=r"12 of the last 12 .* jsonl \(task.reward=mine:verify\) .*\(2.5 s\)"):
        house.say("actor-1", "heartbeat", SIGN_OF_LIFE | {"stats": totals(5, 5)})


def test_slow_ones_among_others_and_old_ones_end_nothing() -> None:
    seen = VerifierTimeouts(limit=0.95, window=8)
    seen.see("actor-0", totals(7, 7))
    seen.see("actor-0", totals(15, 14))
    for more in range(10):
        seen.see("actor-0", totals(15 + 4 * more, 14 + 3 * more))
    seen.see("actor-0", totals(4, 4))
    seen.see("actor-0", totals(4, 4))
    with pytest.raises(RolloutsFail, match="8 of the last 8"):
        seen.see("actor-0", totals(8, 8))
