"""The dry run, device by device: what fits a card of 80 GB, and whether its suggestions are enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_like.config import run_config as configs
from areal_like.config.layers import CONFIGS
from areal_like.launch.plan import plan
from scripts.starting.devices import describe
from scripts.starting.estimate import model_of, plain_of
from scripts.starting.gpus import Gpus, placed
from scripts.train import main
from tests.folders import write_folder
from tests.scripts.test_estimate import write_config

H100 = 80 * 10**9
GROUPS = {"algorithm", "gpu", "launcher", "mode", "model", "task", "ablation"}
SHIPPED = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name not in GROUPS)
MODELS: dict[str, Any] = {}
"""By `model.path`, on the meta device: to make one takes seconds."""


def table(*overrides: str, devices: int = 8, memory: int = H100, base: str = "configs/qwen2.5/math.yaml") -> str:
    """The dry run's table of devices."""
    config = placed(configs.load([base, *overrides]), Gpus("stated", devices))
    path = config.model.get("path", "")
    if path not in MODELS:
        MODELS[path] = model_of(plain_of(config))
    return describe(config, plan(config), MODELS[path], memory)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json for each size of Qwen2.5, and nothing else."""
    place = tmp_path_factory.mktemp("shapes")
    for size in ("0.5b", "7b", "32b"):
        write_config(place / size, size)
    return place


@pytest.mark.parametrize(
    ("gpu", "size", "words"),
    [
        ("1x", "0.5b", "it fits"),
        ("1x", "7b", "too small for both: "),
        ("1x", "32b", "too small for both"),
        ("8x", "0.5b", "it fits"),
        ("8x", "7b", "it fits"),
        ("8x", "32b", "too small for the learner: "),
    ],
)
def test_on_h100_each_size_fits_or_is_told_what_to_change(shapes: Path, gpu: str, size: str, words: str) -> None:
    devices = int(gpu[0])
    said = table(f"gpu={gpu}", f"model.path={shapes / size}", devices=devices)
    assert words in said, said
    assert said.startswith(f"\n{devices} device{'s' * (devices > 1)} of 74.5 GiB\n")


def test_more_ranks_hold_less_each(shapes: Path) -> None:
    def of_a_rank(ranks: int) -> float:
        said = table(
            "gpu=8x", f"model.path={shapes / '7b'}", "launcher=slurm", "placement=auto", f"learner.ranks={ranks}"
        )
        return float(re.findall(r"learner\.0 +learner +([\d.]+) GiB", said)[0])

    assert of_a_rank(2) > of_a_rank(4) > of_a_rank(8)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small model and rows for any task."""
    place = tmp_path_factory.mktemp("material")
    write_folder(place / "model", "qwen2")
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    for name, first in (("train", 0), ("heldout", 600)):
        rows = [(f"{n} + {n} =", f"#### {2 * n}") for n in range(first, first + 600)]
        lines = [
            json.dumps(
                {key: prompt for key in ("prompt", "question", "problem")} | {"answer": answer, "completion": answer}
            )
            for prompt, answer in rows
        ]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        f"model.path={place / 'model'}",
        *(f"task.{key}={place / file}.jsonl" for key, file in (("path", "train"), ("heldout_path", "heldout"))),
    ]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_every_shipped_config_passes_the_dry_run_of_a_node(
    file: Path, material: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = file.read_text()
    needed = (
        material
        if file.parent.name in ("qwen2.5", "smollm2") or file.stem == "sft"
        else material[:1] * ("name: folder" in source)
    )
    if file.stem == "gym":
        needed = material[:1]  # it needs no files
    code = main([str(file), "--dry-run", "--devices", "8", "--device-memory", "80GB", *needed])
    said, error = capsys.readouterr()
    assert code == 0, error
    assert ("it fits" in said) == ("8 devices" in said or "2 devices" in said or "1 device" in said)
    assert "TOO MUCH" not in said
