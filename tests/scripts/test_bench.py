"""Every bench at its smallest size: it ends, and writes the metrics that others read; their values are not checked."""

import json
import math
import subprocess
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import learners.learner
import learners.packing
from areal_like.config import run_config as configs
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from scripts.bench import all as bench_all
from scripts.bench import gpu, learner, modes, pretrained
from tests.forked import Command
from tests.learners.batches import make_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
BENCHES = {
    "delta --millions 1 --repeats 1": "ratio_1pct ratio_01pct encode_over_memcpy apply_over_memcpy",
    "buffer --rounds 1 --seconds 0.2 --without-ray": "tcp_over_raw_zmq tcp_over_mp_queue fsync_over_off ack_p99_ms",
    "engine --quick --repeats 1": "engine_over_generate engine_over_generate_longtail",
}
LEAST = {"ratio_1pct": 100, "ratio_01pct": 600}
"""Metrics that do not depend on the machine."""
GPU = {
    "correct": "gradient_error logprob_error",
    "train_0.5b": "train_tokens_per_second_0.5b",
    "decode_0.5b": "engine_tokens_per_second_4 engine_over_generate",
    "update": "update_seconds publish_limit held_up_ms pause_p50_ms pause_p99_ms",
    "timeline": "learner_train learner_waits actor-0_generate all_waits",
    "learn": "learn_seconds mismatch_kl",
    "step_over_trl_0.5b": "step_over_trl_0.5b",
}
"""Item → metrics. `one_card` and `checkpoint_stall` compare two runs like that of `timeline`."""


def run(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m scripts.bench.WORDS`, forked from a process that has imported torch."""
    monkeypatch.chdir(ROOT)
    module, *arguments = f"scripts.bench.{words}".split()
    assert Command([module, *arguments], folder / "output").wait(SECONDS) == 0, (folder / "output").read_text()[-4000:]


@pytest.mark.integration
@pytest.mark.parametrize("words", BENCHES)
def test_a_bench_has_its_metrics(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"{words} --json {tmp_path}/found", tmp_path, monkeypatch)
    found = json.loads((tmp_path / "found").read_text())
    for metric in BENCHES[words].split():
        assert LEAST.get(metric, -math.inf) < found[metric] < math.inf


@pytest.mark.integration
@pytest.mark.parametrize("item", GPU)
def test_an_item_of_the_gpu_bench_runs_on_a_cpu(item: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "trl" in item:
        pytest.importorskip("trl")
    run(f"gpu --item {item} --folder {tmp_path} --device cpu --tiny", tmp_path, monkeypatch)
    found = {name: value for line in (tmp_path / "found").open() for name, value in json.loads(line).items()}
    assert all(math.isfinite(found[metric]) for metric in GPU[item].split())


def test_an_item_that_fails_is_an_error_and_nothing_more() -> None:
    found, error, _ = gpu.attempt("train_0.5b", Namespace(device="nowhere", tiny=True, model=None))
    assert not found and error.startswith("exit code 1") and "nowhere" in error


def test_the_table_of_bars_has_where_each_figure_stands() -> None:
    lines = list(gpu.judged({"train_mfu_0.5b": 0.27, "update_seconds": 0.06}))
    ends = {line.split()[0]: line.split()[-1] for line in lines}
    bars = {**gpu.AT_LEAST, **gpu.AT_MOST}
    assert ends == dict.fromkeys(bars, "measured") | {"train_mfu_0.5b": "missed", "update_seconds": "met"}


def test_metrics_of_the_learner_and_of_a_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names only: the training steps themselves take minutes."""

    def measured(*_: Any) -> dict[str, float]:
        return {"seconds": 2.0, "peak_bytes": 1.0}

    monkeypatch.setattr(learner, "in_own_process", measured)
    found = learner.compare(1, True)
    assert found["packed_over_padded"] == found["step_over_trl"] == 1.0
    for name in ("run_ours", "run_trl"):
        monkeypatch.setattr(pretrained, name, measured)
    found = pretrained.compare(tmp_path, "python")
    assert found["async_over_trl"] == found["sync_over_trl"] == 1.0


def test_metrics_of_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run simulated in place of real processes, which `tests/integration` has: so the simulator has no error."""
    found: dict[Path, dict[str, float]] = {}

    def simulated(run: Path, words: list[str]) -> list[dict[str, Any]]:
        config = configs.load(words)
        found[run] = modes.Simulation(config, modes.of_timed(config)).run().figures
        return [{"seconds": found[run]["seconds"], "staleness/histogram": {0: 160}}]

    monkeypatch.setattr(modes, "HISTORIES", 1)
    monkeypatch.setitem(modes.SCENARIOS, "rounds", [*modes.SCENARIOS["rounds"], "run.steps=5", "groups_per_batch=4"])
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(modes, "trained", simulated)
    monkeypatch.setattr(modes, "figures_of", found.get)
    monkeypatch.setattr("sys.argv", f"modes --scenario rounds --modes tail all --json {tmp_path}/found".split())
    modes.main()
    metrics = json.loads((tmp_path / "found").read_text())
    assert 1 < metrics["tail_over_sync"] < math.inf and 1 < metrics["all_over_sync"] < math.inf
    assert metrics["samples_error_max"] == metrics["staleness_error_max"] == metrics["idle_error_max"] == 0
    monkeypatch.setattr(modes, "figures_of", lambda run: found[run] | {"samples_per_second": 1.0})
    modes.main()
    assert json.loads((tmp_path / "found").read_text())["samples_error_max"] > 1


def test_padding_changes_the_time_and_not_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, knobs = make_batch(np.random.default_rng(0), masked=0.0), {"num_minibatches": 1, "micro_batch_tokens": 40}
    packed = TorchLearner(tiny_model(), ppo, partial(group), **knobs)
    packed.train(batch)
    for module, name in ((learners.learner, "forward_logprobs"), (learners.learner, "Passes")):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    monkeypatch.setattr(learners.packing, "is_worth", learners.packing.is_worth)
    padded = learner.padded_learner(tiny_model(), ppo, partial(group), **knobs)
    padded.train(batch)
    torch.testing.assert_close(padded.optimizer.gradient, packed.optimizer.gradient, rtol=1e-3, atol=1e-5)


def test_rows_of_all_benches_are_written_and_name_older_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(path: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        git("add", "-A")
        git("commit", "-qm", path)
        return git("rev-parse", "--short=8", "HEAD")

    def cells() -> list[list[str]]:
        above, _, _, _, *rows, _, below = page.read_text().splitlines()  # between: marks and the table's head
        assert (above, below) == ("above", "below")
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

    def ended(command: list[str]) -> None:
        if "scripts.bench.engine" in command:
            raise RuntimeError("a bench that fails")
        Path(command[-1]).write_text(json.dumps(dict.fromkeys(metrics["delta"], 160)))

    git("init", "-q")
    first, page, data = commit("README.md"), tmp_path / "docs/results.md", tmp_path / "docs/data/bench.json"
    metrics = {name: [metric for bench, metric, _ in bench_all.CLAIMS if bench == name] for name in ("delta", "engine")}
    about = {"date": "11-28", "commit": first, "machine": "2 × X", "arguments": "--repeats 1"}
    found = {name: about | {"metrics": {key: [1.25, 2.0, 1.5] for key in metrics[name]}} for name in metrics}
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps(found))
    page.write_text(f"above\n{bench_all.BEGIN}| old |\n{bench_all.END}\nbelow\n")
    bench_all.write_rows(found, page)
    assert [cell[1] for cell in cells()] == ["1.58 [1.25, 2.00]"] * 7
    origins = [[f"`scripts.bench.{name} --repeats 1`", f"11-28, {first}, 2 × X"] for name in metrics]
    assert [cell[2:] for cell in cells()] == [origins[0], *[["", ""]] * 3, origins[1], *[["", ""]] * 2]

    assert bench_all.outdated(found, tmp_path) == {}
    newer = [commit(f"actors/engines/{name}.py") for name in "ab"]
    assert {name: len(commits) for name, commits in bench_all.outdated(found, tmp_path).items()} == {"engine": 2}

    monkeypatch.setattr(bench_all, "REPOSITORY", tmp_path)
    monkeypatch.setattr(bench_all, "ended", ended)
    monkeypatch.setattr("sys.argv", ["all", "--quick", "--only", "engine", "delta"])
    assert bench_all.main() == 1
    assert [cell[1] for cell in cells()] == ["160 [160, 160]"] * 4 + ["1.58 [1.25, 2.00]"] * 3
    assert [json.loads(data.read_text())[name]["commit"] for name in metrics] == [newer[1], first]
