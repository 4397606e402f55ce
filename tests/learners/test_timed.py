"""The timed learner with a clock that the test sets: its waits and its publications."""

import pytest

from learners import timed
from learners.batch_metrics import batch_metrics
from learners.timed import TimedLearner
from tests.learners.batches import make_batch
from tests.seeds import seeded


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        self.now += 0.001  # everything takes a little
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 0.9 * seconds  # an early wake-up


def test_a_step_takes_its_time_without_drift_and_each_publishes_other_bytes(monkeypatch, tmp_path):
    clock, batch = Clock(), make_batch(seeded(0))
    monkeypatch.setattr(timed, "time", clock)
    monkeypatch.setattr(timed.turns, "sleep", clock.sleep)
    knobs = {"base": 1.0, "per_sample": 0.25, "per_token": 0.01, "weight_bytes": 5000}
    learner, restored = TimedLearner(**knobs), TimedLearner(**knobs)
    states = [learner.snapshot()]
    for _ in range(20):
        before, metrics = clock.now, learner.train(batch)
        assert metrics == batch_metrics(batch)
        assert clock.now - before == pytest.approx(1.0 + 0.25 * 16 + 0.01 * metrics["tokens"], abs=0.005)
        states.append(learner.snapshot())
    assert {s.nbytes for s in states} == {5000} and len({s.digest() for s in states}) == 21
    learner.save_state(tmp_path)
    restored.load_state(tmp_path)
    assert restored.snapshot().digest() == states[-1].digest()
    learner.save(str(tmp_path))
    assert (tmp_path / "weights.bin").read_bytes() == states[-1].buffer.tobytes()
