"""The actor's half of the probe: an engine that computes something else raises an alarm, one that rounds does not."""

import asyncio
import copy
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
        known = dict(zip(map(tuple, TOKENS), LOGPROBS, strict=True))
        rows = [np.array(known[tuple(each.tolist())], np.float32) for each in sequences]
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


@pytest.mark.parametrize(
    ("first", "later", "alarms"),
    [
        (0.13, 0.13, 0),
        (0.13, 0.38, 0),
        (0.13, 0.41, 1),
        (0.001, 0.09, 0),
        (0.001, 0.11, 1),
        (0.5, 0.29, 1),
        (0.5, 0.5, 2),
    ],
)
def test_a_coarse_engine_alarms_at_a_multiple_of_its_noise_at_the_first_probe(
    first: float, later: float, alarms: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise beyond what rounding explains is none."""
    probe = probed(engine := Engine("bfloat16", s=first))
    engine.errors["s"] = later
    again(probe)
    assert probe.stats()["sum:served/alarms"] == alarms
    if later == 0.41:
        assert "above 0.39" in probe.note and "noise at the first probe was 0.13" in probe.note
        assert "0.41" in caplog.text


def test_the_noise_is_the_largest_of_three_batches() -> None:
    engine, sizes = Engine("bfloat16", s=0.0), list[int]()
    plain = engine.logprobs_of

    async def logprobs_of(sequences: list[np.ndarray]) -> list[Scored]:
        sizes.append(len(sequences))
        engine.errors["s"] = {1: 0.05, 2: 0.02, 4: 0.03}[len(sequences)]
        return await plain(sequences)

    engine.logprobs_of = logprobs_of  # type: ignore[method-assign]
    probe = probed(engine)
    again(probe)
    assert sizes == [2, 4, 1, 1, 2] and probe._noise == {"s": pytest.approx(0.05)}


@pytest.mark.parametrize("falsified", [False, True])
def test_rounding_of_a_real_model_raises_no_alarm_and_a_falsified_layer_does(falsified: bool) -> None:
    """The learner's half, in float32, has the weights that the engine rounds."""
    model = tiny_model()
    publishable(model)
    rows = [np.array(row, np.int32) for row in ([3, 1, 4, 1, 5, 9], [2, 6, 5, 3], [5, 8, 9, 7, 9])]
    exact = asyncio.run(TorchEngine(copy.deepcopy(model), device="cpu").logprobs_of(rows))[0]
    engine = TorchEngine(model, device="cpu", compute_dtype="bfloat16")
    message = Probe([row.tolist() for row in rows], [row.tolist() for row in exact.logprobs], "float32")
    probe = ServedProbe(engine, "actor-0", None)

    async def run(version: int) -> None:
        probe.begin(Manifest(version, "", probe=message))
        await probe._task

    asyncio.run(run(exact.version))
    assert 0 < probe._noise[""] < 0.1
    if falsified:
        with torch.no_grad():
            model.base_model.layers[0].mlp.down_proj.weight.neg_()
    asyncio.run(run(exact.version))
    assert probe.stats()["sum:served/alarms"] == falsified


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
