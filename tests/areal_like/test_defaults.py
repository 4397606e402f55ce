"""Knobs that are not set: their values, by the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError, load

PRETRAINED = "model={name: folder, path: /somewhere}"


@pytest.mark.parametrize(
    ("overrides", "lr", "warmup"),
    [
        ([], 2e-3, 0),
        (["learner.lora={rank: 4}"], 2e-3, 0),
        ([PRETRAINED], 1e-5, 10),
        ([PRETRAINED, "learner.lora={rank: 4}"], 1e-4, 10),
        ([PRETRAINED, "learner.lr=3e-6", "learner.warmup_steps=0"], 3e-6, 0),
        ([PRETRAINED, "learner.lr=null"], 1e-5, 10),
    ],
)
def test_the_learning_rate_follows_the_model_unless_it_is_set(overrides: list[str], lr: float, warmup: int) -> None:
    learner = load(["configs/quickstart.yaml", *overrides]).learner
    assert (learner.lr, learner.warmup_steps) == (lr, warmup)
    assert "schedule_steps" not in learner


def test_a_schedule_goes_over_all_steps_unless_it_is_set() -> None:
    falling = ["configs/quickstart.yaml", "learner.schedule=linear", "run.steps=70"]
    assert load(falling).learner.schedule_steps == 70
    assert load([*falling, "learner.schedule_steps=50"]).learner.schedule_steps == 50
    assert load(["base", "learner=timed"]).learner == {"name": "timed"}


def test_a_warm_up_leaves_a_short_schedule_room_to_fall() -> None:
    short = ["configs/quickstart.yaml", "learner.schedule=cosine", "run.steps=3"]  # of two optimizer steps each
    assert load([*short, PRETRAINED]).learner.warmup_steps == 3
    with pytest.raises(ConfigError, match=r"learner\.warmup_steps"):
        load([*short, "learner.warmup_steps=6"])


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([PRETRAINED], ["learner.schedule=linear", "run.steps=5"], [1e-5, 5, 5]),
        ([PRETRAINED], ["learner.lora={}"], [1e-4, 10, None]),
        ([PRETRAINED, "learner.lr=3e-6"], ["learner.lora={}"], [3e-6, 10, None]),
        ([PRETRAINED, "learner.schedule=linear", "run.steps=5"], ["run.steps=50"], [1e-5, 10, None]),
        (["learner.schedule=linear", "learner.schedule_steps=50"], ["learner.schedule=linear"], [2e-3, 0, 50]),
        (["learner=timed"], [PRETRAINED], [1e-5, 10, None]),
    ],
)
def test_a_default_of_the_earlier_run_gives_way_to_the_one_that_fits(
    before: list[str], now: list[str], expected: list[object]
) -> None:
    earlier = load(["configs/quickstart.yaml", *before])
    learner = load(["configs/quickstart.yaml", *(before[:1] if before[0] == PRETRAINED else []), *now], earlier).learner
    assert [learner.get(knob) for knob in ("lr", "warmup_steps", "schedule_steps")] == expected


def test_a_value_of_the_earlier_run_that_does_not_fit_is_said_to_come_from_it() -> None:
    earlier = load(["configs/quickstart.yaml", "learner.warmup_steps=40"])
    with pytest.raises(ConfigError, match=r"learner\.warmup_steps.* \[from the earlier run\]"):
        load(["configs/quickstart.yaml", "learner.schedule=linear", "run.steps=5"], earlier)


# By the machine


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A config that chooses a pretrained model of 50 MB."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(50_000_000)
    return f"model={{name: folder, path: {tmp_path}}}"


def on(cores: int, *overrides: str, bfloat16: bool = True, gpu: bool = False, earlier: configs.Config | None = None):
    """A config on a machine of so many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "cores", lambda: cores)
        patch.setattr(configs, "has_bfloat16", lambda: bfloat16)
        patch.setattr(configs, "has_gpu", lambda: gpu)
        return load(["configs/quickstart.yaml", *overrides], earlier)


def shares(made: configs.Config) -> list[object]:
    """The learner's threads and number format, and the actors' count and threads."""
    return [made.learner.get("threads"), made.learner.get("compute_dtype"), made.actors.count, made.actors.threads]


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_a_small_model_takes_one_thread_per_process_on_any_machine(cores: int) -> None:
    assert shares(on(cores)) == shares(on(cores, PRETRAINED)) == [None, "float32", 2, 1]


@pytest.mark.parametrize(
    ("cores", "overrides", "expected"),
    [
        (1, [], [1, "bfloat16", 1, 1]),
        (2, [], [2, "bfloat16", 1, 1]),
        (16, [], [12, "bfloat16", 1, 4]),
        (16, ["actors.count=2"], [12, "bfloat16", 2, 2]),
        (16, ["learner.ranks=4"], [3, "bfloat16", 1, 4]),
        (16, ["mode=sync"], [16, "bfloat16", 1, 16]),
        (16, ["launcher=inline"], [16, "bfloat16", 1, 16]),
        (16, ["learner.device=cuda"], [None, "bfloat16", 1, 16]),
        (16, ["engine=sglang"], [16, "bfloat16", 1, 1]),
        (16, ["launcher=slurm"], [None, "float32", 2, 1]),
        (2, ["learner.threads=1", "actors.threads=2", "learner.compute_dtype=float32"], [1, "float32", 1, 2]),
        (2, ["loss=gspo"], [2, "float32", 1, 1]),  # it clips finely
    ],
)
def test_a_large_model_takes_the_cores_there_are(
    large: str, cores: int, overrides: list[str], expected: list[object]
) -> None:
    assert shares(on(cores, large, *overrides)) == expected


@pytest.mark.parametrize(
    ("cores", "overrides", "slots"),
    [
        (16, [], 256),
        (16, ["actors.count=2"], 128),
        (16, ["groups_per_batch=10"], 160),  # all that the bound lets run: 10 groups of 8, of two versions
        (16, ["mode=sync", "groups_per_batch=2"], 64),
        (16, ["engine.slots=5"], 5),
    ],
)
def test_slots_follow_the_threads_and_the_bound(large: str, cores: int, overrides: list[str], slots: int) -> None:
    assert on(cores, large, *overrides).engine.slots == slots


GPU, NO_BFLOAT16 = {"gpu": True, "bfloat16": False}, {"bfloat16": False}


@pytest.mark.parametrize(
    ("overrides", "machine", "learner", "engine", "threads"),
    [
        ([], {}, "bfloat16", "bfloat16", 12),
        (["learner.compute_dtype=float32"], {}, "float32", "float32", 12),
        (["engine=timed"], {}, "bfloat16", None, 16),
        ([], NO_BFLOAT16, "float32", "float32", 12),
        (["learner.device=cuda"], NO_BFLOAT16, "bfloat16", "float32", None),
        ([], GPU, "float32", "bfloat16", 16),  # the learner is on the CPU; the actors' cores only feed the GPU
        (["engine.device=cpu"], GPU, "float32", "float32", 12),
        (["engine.device=cuda", "learner.compute_dtype=float32"], NO_BFLOAT16, "float32", "float32", 16),
    ],
)
def test_an_engine_rounds_as_its_learner_does_and_on_a_gpu_in_bfloat16(
    large: str, overrides: list[str], machine: dict, learner: str, engine: str | None, threads: int | None
) -> None:
    made = on(16, large, *overrides, **machine)
    found = made.learner.compute_dtype, made.engine.get("compute_dtype"), made.learner.get("threads")
    assert found == (learner, engine, threads)


def test_a_resume_takes_the_numbers_of_the_run_also_on_another_machine(large: str) -> None:
    earlier = on(8, large)
    assert on(2, large, earlier=earlier).learner.threads == 6
    assert on(2, large, "learner.threads=1", earlier=earlier).learner.threads == 1
