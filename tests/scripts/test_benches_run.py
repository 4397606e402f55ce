"""Benches that README and results name run to their end, scaled down; the test doesn't look at their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from areal_like.models.causal_lm import qwen2
from tests.forked import forked, said

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("bench", "metric"),
    [
        ("delta --millions 1 --repeats 1 --updates 3", "ratio_1pct"),
        ("buffer --rounds 1 --seconds 0.3", "trajectories_per_second"),
        ("engine --repeats 1 --answers 4 8 --model {model}", "engine_bfloat16_tokens_per_second"),
        ("engine --quick --repeats 1", "engine_over_generate_longtail"),
        ("modes --scenario rounds --quick", "tail_over_sync"),
    ],
)
def test_a_bench_runs(bench: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process forked from one that has imported torch: each would import it for seconds."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # no idle workers
    found, model = tmp_path / "found.json", tmp_path / "model"
    if "{model}" in bench:
        qwen2(0, 64).save_pretrained(model)
        bench = bench.format(model=model)
    module, *arguments = f"scripts.bench.{bench}".split()
    with forked(module, [[*arguments, "--json", str(found)]], tmp_path) as (process,):
        assert process.wait(240) == 0, said(tmp_path)[-4000:]
    assert math.isfinite(json.loads(found.read_text())[metric])
