"""The actor's half of the probe: an engine that computes something else raises an alarm, one that rounds does not."""

import asyncio
import logging

import numpy as np
import pytest
import torch

from actors.engines.torch_engine import TorchEngine
from actors.probe_check import ServedProbe
from areal_like.interfaces import Scored
from areal_like.models.causal_lm import publishable
from areal_like.wire.messages import Manifest, Probe
from tests.learners.batches import tiny_model

TOKENS = [[1, 2, 3], [4, 5]]
LOGPROBS = [[-1.0, -2.0], [-3.0]]


class Engine:
    """Its servers are off by so much."""

    def __init__(self, dtype: str = "float32", version: int = 7, **errors: float):
        self.dtype, self.version, self.errors = dtype, version, errors

    async def logprobs_of(self, sequences: list[np.ndarray]) -> list[Scored]:
        rows = [np.array(row, np.float32) for row in LOGPROBS]
        return [Scored(name, self.version, [row + e for row in rows]) for name, e in self.errors.items()]


def probed(engine: object, most: float | None = None, dtype: str = "float32") -> ServedProbe:
    probe = ServedProbe(engine, "actor-3", most)
    again(probe, dtype)
    return probe


def again(probe: ServedProbe, dtype: str = "float32") -> None:
    async def run() -> None:
        manifest = Manifest(7, "", probe=Probe(TOKENS, LOGPROBS, dtype))
        probe.begin(Manifest(6, ""))
        probe.begin(manifest)
        if probe._task:
            await probe._task

    asyncio.run(run())


def test_an_alarm_names_actor_server_version_figure_and_threshold(caplog: pytest.LogCaptureFixture) -> None:
    probe = probed(Engine(a=1e-6, b=0.25))
    stats = {"sum:served/probes": 2, "sum:served/alarms": 1}
    stats |= {"max:served/logprob_error_max": 0.25, "mean:served/logprob_error": 0.125}
    assert probe.stats() == pytest.approx(stats, rel=1e-3)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    for part in ("actor-3", "b does not serve version 7", "0.25", "0.001", "weights.probe_error"):
        assert part in record.getMessage()
    assert "b does not serve version 7" in probe.note
    probe._engine.errors["b"] = 0.0
    again(probe)
    assert probe.note == "" and probe.stats()["sum:served/alarms"] == 1


@pytest.mark.parametrize(
    ("engine", "learner", "most", "alarms"),
    [
        ("float32", "float32", None, 1),
        ("bfloat16", "float32", None, 0),
        ("float32", "bfloat16", None, 0),
        ("", "float32", None, 0),
        ("bfloat16", "bfloat16", 0.01, 1),
        ("float32", "float32", 0.5, 0),
    ],
)
def test_the_threshold_follows_the_coarser_side_or_the_config(
    engine: str, learner: str, most: float | None, alarms: int
) -> None:
    probe = probed(Engine(engine, s=0.02), most, learner)
    assert probe.stats()["sum:served/alarms"] == alarms


def test_an_engine_that_has_moved_on_or_fails_or_can_not_score_is_not_judged() -> None:
    assert probed(Engine(version=8, s=9.0)).stats()["sum:served/probes"] == 0
    broken = Engine()
    del broken.errors
    assert probed(broken).note == "" and probed(object()).note == ""


def test_the_embedded_engine_scores_with_the_weights_that_it_computes_with() -> None:
    model = tiny_model()
    publishable(model)
    engine, ids = TorchEngine(model, device="cpu"), np.array([3, 1, 4, 1, 5], np.int32)
    (found,) = asyncio.run(engine.logprobs_of([ids[:2], ids]))
    with torch.no_grad():
        every = model(torch.from_numpy(ids)[None].long()).logits[0].log_softmax(-1)
        expected = every[:-1].gather(-1, torch.from_numpy(ids[1:, None]).long())[:, 0]
        model.base_model.layers[0].mlp.down_proj.weight *= 1.5  # not those received
    np.testing.assert_allclose(found.logprobs[1], expected, atol=1e-5)
    (falsified,) = asyncio.run(engine.logprobs_of([ids]))
    assert np.abs(falsified.logprobs[0] - found.logprobs[1]).mean() > 1e-3
