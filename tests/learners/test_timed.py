"""The timed learner with a clock that the test sets: its waits and its publications."""

import subprocess
import sys

import pytest

from learners import timed
from learners.batch_metrics import batch_metrics
from learners.timed import TimedLearner
from tests.learners.batches import make_batch
from tests.seeds import seeded


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 0.001  # everything takes a little
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 0.9 * seconds  # an early wake-up


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timed, "time", clock)
    monkeypatch.setattr(timed.turns, "sleep", clock.sleep)
    return clock


def test_a_step_takes_as_long_as_told_without_drift(clock):
    batch = make_batch(seeded(0))
    tokens = batch_metrics(batch)["tokens"]
    learner = TimedLearner(base=1.0, per_sample=0.25, per_token=0.01)
    for _ in range(20):
        before = clock.now
        learner.train(batch)
        assert clock.now - before == pytest.approx(1.0 + 0.25 * 16 + 0.01 * tokens, abs=0.005)


def test_metrics_are_those_of_the_batch(clock):
    batch = make_batch(seeded(0))
    assert TimedLearner().train(batch) == batch_metrics(batch)


def test_every_step_publishes_other_bytes_of_the_given_size(clock):
    learner, batch = TimedLearner(weight_bytes=5000), make_batch(seeded(0))
    states = [learner.snapshot()]
    for _ in range(4):
        learner.train(batch)
        states.append(learner.snapshot())
    assert {s.nbytes for s in states} == {5000} and len({s.digest() for s in states}) == 5


def test_a_restored_learner_publishes_the_same_bytes(clock, tmp_path):
    learner, restored, batch = TimedLearner(), TimedLearner(), make_batch(seeded(0))
    learner.train(batch)
    learner.save_state(tmp_path)
    restored.load_state(tmp_path)
    assert restored.snapshot().digest() == learner.snapshot().digest()
    learner.save(str(tmp_path))
    assert (tmp_path / "weights.bin").read_bytes() == learner.snapshot().buffer.tobytes()


def test_it_needs_no_torch():
    code = "import sys, learners.timed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
