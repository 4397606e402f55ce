"""The reference of all keys, made from the code and `configs/base.yaml`."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from areal_like.config.annotations import type_and_range
from areal_like.config.registry import COMPONENTS, described, knobs
from areal_like.config.schema import RANGES, SECTIONS, Config
from scripts import config

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_and_knob_has_a_meaning_and_every_number_a_range() -> None:
    base, page = config.said((ROOT / "configs" / "base.yaml").read_text()), config.reference()
    bare, unbounded = [], []
    for name, shape in [("", Config), *SECTIONS.items()]:
        for field in dataclasses.fields(shape):
            key = f"{name}.{field.name}".lstrip(".")
            bare += [key] if name and not base.get(key, ("", ""))[1] else []
            is_number = {"int", "float"} & set(type_and_range(str(field.type))[0].split())
            unbounded += [key] if is_number and key not in RANGES else []
    for kind, name in ((kind, name) for kind, names in COMPONENTS.items() for name in names):
        section = page.split(f"\n### {kind}: {name}\n")[1].split("\n##")[0]
        assert [knob for knob in knobs(kind, name) if f"`{knob}`" not in section] == []
        for knob, known in described(kind, name).knobs.items():
            types, limits = type_and_range(ast.unparse(known.annotation)) if known.annotation else ("", "")
            is_number = {"int", "float"} & set(re.findall(r"\w+", re.sub(r"\w+\[.*\]", "", types)))
            unbounded += [f"{kind}.{name}.{knob}"] if is_number and not limits else []
    assert set(bare) <= {"buffer.host"} and unbounded == []
    assert "| `lr` | `float \\| None` | `null` | [0, inf) |" in page


def test_a_text_that_components_share_is_shown_once() -> None:
    text = [line for line in config.reference().splitlines() if len(line) > 60 and not line.startswith(("|", "As "))]
    assert sorted(set(text)) == sorted(text)


def test_every_loss_has_its_paper() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = set(re.findall(r"^\| (\w+) \|", page, re.M))
    assert COMPONENTS["loss"].keys() <= rows, "docs/algorithms.md needs a row for each loss"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([], ["decoupled_ppo", "grpo"]),
        (["run.steps", "buffer", "learner.lora"], ["train steps to make", "heartbeat_timeout", "rank"]),
        (["loss.dg", "learner.lr"], ["gate_temperature", "[0, inf)"]),
        (["algorithm=grpo"], ["2402.03300", "0.04"]),
        (["sampling", "task.jsonl"], ["</answer>", "</think>", "max_prompt_tokens: a longer prompt", "save_to_disk"]),
    ],
)
def test_parts_are_shown(capsys: pytest.CaptureFixture, parts: list[str], shown: list[str]) -> None:
    assert config.main(parts) == 0
    found = capsys.readouterr().out
    assert [text for text in shown if text not in found] == []
