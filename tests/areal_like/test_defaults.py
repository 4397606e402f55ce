"""Knobs that are not set: their values, by the trained model and by the machine; cores and number formats, as the
system reports them."""

import os
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError, load
from areal_like.machine import cores, free_memory, has_bfloat16, has_gpu

PRETRAINED = "model={name: folder, path: /somewhere}"


LINEAR = ["learner.schedule=linear", "run.steps=70"]
SHORT = ["learner.schedule=cosine", "run.steps=3"]  # of two optimizer steps each


@pytest.mark.parametrize(
    ("overrides", "lr", "warmup", "schedule"),
    [
        ([], 2e-3, 0, None),
        (["learner.lora={rank: 4}"], 2e-3, 0, None),
        ([PRETRAINED], 1e-5, 10, None),
        ([PRETRAINED, "learner.lora={rank: 4}"], 1e-4, 10, None),
        ([PRETRAINED, "learner.lr=3e-6", "learner.warmup_steps=0"], 3e-6, 0, None),
        ([PRETRAINED, "learner.lr=null"], 1e-5, 10, None),
        (LINEAR, 2e-3, 0, 70),
        ([*LINEAR, "learner.schedule_steps=50"], 2e-3, 0, 50),
        ([*SHORT, PRETRAINED], 1e-5, 3, 3),
    ],
)
def test_the_learning_rate_and_its_schedule_follow_model_and_run(
    overrides: list[str], lr: float, warmup: int, schedule: int | None
) -> None:
    learner = load(["configs/quickstart.yaml", *overrides]).learner
    assert (learner.lr, learner.warmup_steps, learner.get("schedule_steps")) == (lr, warmup, schedule)


def test_a_warm_up_leaves_a_short_schedule_room_to_fall() -> None:
    assert load(["base", "learner=timed"]).learner == {"name": "timed"}
    with pytest.raises(ConfigError, match=r"learner\.warmup_steps"):
        load(["configs/quickstart.yaml", *SHORT, "learner.warmup_steps=6"])


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


def chosen(made: configs.Config) -> str:
    """The learner's threads and number format, the actors' count and threads, the engine's number format and slots."""
    learner, engine = made.learner, made.engine
    found = [learner.get("threads"), learner.get("compute_dtype"), made.actors.count, made.actors.threads]
    return " ".join(map(str, [*found, engine.get("compute_dtype"), engine.get("slots")]))


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_a_small_model_takes_one_thread_per_process_on_any_machine(cores: int) -> None:
    assert chosen(on(cores)) == chosen(on(cores, PRETRAINED)) == "None float32 2 1 float32 64"


GPU, NO_BFLOAT16 = {"gpu": True, "bfloat16": False}, {"bfloat16": False}


@pytest.mark.parametrize(
    ("cores", "machine", "overrides", "expected"),
    [
        (1, {}, [], "1 bfloat16 1 1 bfloat16 64"),
        (2, {}, [], "2 bfloat16 1 1 bfloat16 64"),
        (16, {}, [], "12 bfloat16 1 4 bfloat16 256"),
        (16, {}, ["actors.count=2"], "12 bfloat16 2 2 bfloat16 128"),
        (16, {}, ["learner.ranks=4"], "3 bfloat16 1 4 bfloat16 256"),
        (16, {}, ["mode=sync"], "16 bfloat16 1 16 bfloat16 128"),
        (16, {}, ["learner.device=cuda"], "None bfloat16 1 16 bfloat16 256"),
        (16, {}, ["engine=sglang"], "16 bfloat16 1 1 None None"),
        (16, {}, ["engine=timed"], "16 bfloat16 2 1 None None"),
        (16, {}, ["launcher=slurm"], "None float32 2 1 float32 64"),
        (
            2,
            {},
            ["learner.threads=1", "actors.threads=2", "learner.compute_dtype=float32"],
            "1 float32 1 2 float32 128",
        ),
        (2, {}, ["loss=gspo"], "2 float32 1 1 float32 64"),  # it clips finely
        # slots: all that the bound lets run, here 10 groups of 8, of two versions
        (16, {}, ["groups_per_batch=10"], "12 bfloat16 1 4 bfloat16 160"),
        (16, {}, ["mode=sync", "groups_per_batch=2"], "16 bfloat16 1 16 bfloat16 64"),
        (16, {}, ["engine.slots=5"], "12 bfloat16 1 4 bfloat16 5"),
        # an engine rounds as its learner does, and on a GPU in bfloat16
        (16, {}, ["learner.compute_dtype=float32"], "12 float32 1 4 float32 256"),
        (16, NO_BFLOAT16, [], "12 float32 1 4 float32 256"),
        (16, NO_BFLOAT16, ["learner.device=cuda"], "None bfloat16 1 16 float32 256"),
        (16, GPU, [], "16 float32 1 1 bfloat16 64"),  # the actors' cores only feed the GPU
        (16, GPU, ["engine.device=cpu"], "12 float32 1 4 float32 256"),
        (16, NO_BFLOAT16, ["engine.device=cuda", "learner.compute_dtype=float32"], "16 float32 1 1 float32 64"),
    ],
)
def test_a_large_model_takes_what_the_machine_has(
    large: str, cores: int, machine: dict, overrides: list[str], expected: str
) -> None:
    assert chosen(on(cores, large, *overrides, **machine)) == expected


CARD = ["learner.device=cuda", "engine.device=cuda"]


@pytest.mark.parametrize(
    ("overrides", "proximal"),
    [
        ([], None),
        (CARD, "recompute"),
        ([*CARD, "learner.compute_dtype=float32"], None),
        ([*CARD, "engine.compute_dtype=float32"], "recompute"),
        ([*CARD, "loss.proximal=interpolate"], "interpolate"),
        (["learner.compute_dtype=bfloat16"], "recompute"),
        (["engine=sglang"], "recompute"),
        (["engine={name: sglang, device: cpu}"], None),
        (["engine={name: sglang, dtype: float32}"], None),
        ([*CARD, "loss=ppo"], None),
    ],
)
def test_a_fine_clip_range_needs_logprobs_that_one_side_alone_has_rounded(
    large: str, overrides: list[str], proximal: str | None
) -> None:
    assert on(2, large, "loss=gspo", *overrides).loss.get("proximal") == proximal


def test_a_resume_takes_the_numbers_of_the_run_also_on_another_machine(large: str) -> None:
    earlier = on(8, large)
    assert on(2, large, earlier=earlier).learner.threads == 6
    assert on(2, large, "learner.threads=1", earlier=earlier).learner.threads == 1


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


OWN, V2 = "proc/self/cgroup", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({OWN: "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
        ({OWN: "0::/a/b\n", f"{V2}/a/cpu.max": "200000 100000\n"}, 2),
        ({OWN: "0::/a\n", f"{V2}/a/cpu.max": "50000 100000\n"}, 1),
    ],
)
def test_cores_are_those_that_may_be_used(tmp_path: Path, monkeypatch, files: dict[str, str], count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, files)
    assert cores(tmp_path) == count


MEMINFO, STAT = "MemTotal: 9000 kB\nMemAvailable: 5000 kB\nHugePages_Total: 0\n", "anon 1000\nfile 90000\nshmem 24\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 0),
        ({"proc/meminfo": MEMINFO}, 5_120_000),
        ({OWN: "0::/a/b\n", f"{V2}/a/memory.max": "100000\n", f"{V2}/a/memory.stat": STAT}, 98_976),
        ({OWN: "0::/a\n", f"{V2}/a/memory.max": "max\n", f"{V2}/a/memory.stat": STAT}, 5_120_000),
    ],
)
def test_free_memory_is_that_of_the_machine_and_of_its_control_group(
    tmp_path: Path, files: dict[str, str], free
) -> None:
    """Files that are only cached take none."""
    write(tmp_path, files if not files else {"proc/meminfo": MEMINFO} | files)
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f\nbugs: avx512_bf16\n", False),
        ("Features : fp asimd bf16\n", True),
    ],
)
def test_bfloat16_is_a_flag_of_the_processor(tmp_path: Path, text: str, found: bool) -> None:
    write(tmp_path, {"proc/cpuinfo": text})
    assert has_bfloat16(tmp_path) is found


@pytest.mark.parametrize(("allowed", "found"), [("", False), ("-1", False), ("0", True)])
def test_a_gpu_is_a_device_that_this_process_may_use(tmp_path: Path, monkeypatch, allowed: str, found: bool) -> None:
    write(tmp_path, {"dev/nvidia0": ""})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert has_gpu(tmp_path) is found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert has_gpu(tmp_path) and not has_gpu(tmp_path / "dev")
