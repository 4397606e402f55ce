"""Random histories (`tests.buffer.histories`) under every policy: after any of them each batch keeps the bound, no
group is lost or trained twice, and the run goes on. The environment's HISTORIES sets how many are played in all."""

import contextlib
import os
import random

import pytest

from buffer.checks import RolloutsFail
from tests.buffer.histories import SIZINGS, in_rounds, overlapping
from tests.buffer.house import B

HISTORIES = int(os.environ.get("HISTORIES", "480"))


@pytest.mark.parametrize("part", range(4))
def test_batches_come_and_leases_are_known_whatever_happens(part: int) -> None:
    for number in range(part, HISTORIES // 2, 4):
        run = overlapping(random.Random(number))
        with contextlib.suppress(RolloutsFail):
            for _ in range(60):
                run.step()
            run.crash()
            run.go_on(until=len(run.trained) + 2)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("sizing", SIZINGS)
def test_every_prompt_of_a_run_in_rounds_is_trained_once(sizing: str, staleness: int) -> None:
    for number in range(HISTORIES // 60):
        dice = random.Random(number)
        run = in_rounds(dice, sizing, batches=8, staleness=staleness)
        for _ in range(dice.randint(0, 120)):
            run.step()
        run.go_on(until=8)
        ledger = run.store.ledger()
        assert not set(ledger["dropped"]) - {"rejected"} and ledger["active"] == 0, ledger
        assert ledger["trained"] == 8 * B or sizing != "fixed"


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("sizing", SIZINGS)
def test_a_drained_run_leaves_nothing(sizing: str, staleness: int) -> None:
    for number in range(HISTORIES // 120):
        dice = random.Random(number)
        run = in_rounds(dice, sizing, batches=1000, staleness=staleness)
        for _ in range(dice.randint(0, 120)):
            run.step()
        run.say("someone", "stop", {"drain": True})
        run.go_on(run.is_drained)
        ledger = run.store.ledger()
        assert ledger["active"] == 0 and not set(ledger["dropped"]) - {"rejected"}, (number, ledger)


@pytest.mark.parametrize("sizing", ["fixed", "restless"])
def test_an_epoch_has_each_prompt_once_though_some_wait_until_the_next_one_has_begun(sizing: str) -> None:
    overtaken = 0
    for number in range(6):
        run = in_rounds(random.Random(number), sizing, batches=8, zero_variance=False, rows=7)
        for turn in range(80):
            run.step(calm=True)
            if turn == 40:
                run.crash()  # with prompts of the epoch before in the queue
        run.go_on(until=8)
        ids = [group_id for batch in run.trained for group_id in batch]
        assert sorted(ids) == list(range(len(ids)))
        for epoch in range(len(ids) // 7):
            assert sorted(run.row_of[7 * epoch + place] for place in range(7)) == list(range(7))
        overtaken += ids != sorted(ids, key=lambda group_id: group_id // 7)
    assert overtaken >= 2
