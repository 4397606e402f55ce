"""Loads under which an admission rule that counts groups breaks its own bound: ours holds, and training continues."""

import pytest

from scripts.bench.bound import (
    BOUND,
    POLICIES,
    SCENARIOS,
    STALENESS_POLICIES,
    CountingBuffer,
    OurBuffer,
    simulate,
)

BATCHES = 40


@pytest.mark.parametrize("staleness_policy", STALENESS_POLICIES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_bound_holds_and_training_goes_on(scenario: str, policy: str, staleness_policy: str) -> None:
    buffer = OurBuffer(BOUND, policy, staleness_policy)
    outcome = simulate(buffer, SCENARIOS[scenario], BATCHES)  # raises Deadlock where nothing can go on
    assert outcome.batches == BATCHES and max(outcome.staleness) <= BOUND
    assert buffer.replay.store.staleness_max <= BOUND
    ledger = buffer.replay.store.ledger()
    gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == gone + ledger["active"]
    assert bool(ledger["filtered"]) == (scenario == "rejections")
    if staleness_policy in ("wait", "requeue") or policy == "in_order":
        assert ledger["dropped"] == {}, "a straggler was lost"


@pytest.mark.parametrize("scenario", ["stragglers", "uneven"])
def test_counting_groups_breaks_the_bound(scenario: str) -> None:
    """If this fails, the scenario is too mild to show anything."""
    assert max(simulate(CountingBuffer(), SCENARIOS[scenario], BATCHES).staleness) > BOUND


def test_capacity_does_not_drift_when_half_is_rejected() -> None:
    """The number of groups ahead of the learner stays within the bound, however many are rejected."""
    buffer = OurBuffer(BOUND, "fifo", "drop")
    simulate(buffer, SCENARIOS["rejections"], BATCHES)
    assert buffer.replay.store.filtered["zero variance"] > 10 * BATCHES
    ahead = buffer.replay.store.slots.used - buffer.replay.store.trained
    assert ahead + buffer.replay.room(BATCHES) <= (BOUND + 1) * 16
