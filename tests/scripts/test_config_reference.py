"""Every key of a config is explained, from the code."""

import dataclasses
import re
from pathlib import Path

import pytest

from areal_like.config.ranges import RANGES
from areal_like.config.registry import COMPONENTS, described, knobs
from areal_like.config.schema import SECTIONS, Config
from scripts import config

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == config.reference(), "run: areal-like config --markdown docs/config.md"


def test_every_key_and_knob_stands_there_with_its_meaning(capsys: pytest.CaptureFixture) -> None:
    base = config.said((ROOT / "configs" / "base.yaml").read_text())
    for name in SECTIONS:
        missing = [key for key in SECTIONS[name].__dataclass_fields__ if not base.get(f"{name}.{key}", ("", ""))[1]]
        assert set(missing) <= {"host"}, f"{name}: base.yaml does not explain {missing}"
    page = config.reference()
    for kind, names in COMPONENTS.items():
        for name in names:
            assert f"### {kind}: {name}\n" in page
            assert all(f"| `{knob}` |" in page for knob in knobs(kind, name))
    assert "| `clip_grad` | `float` | `1.0` | [0, inf) |" in page
    assert "| `lr` | `float \\| None` | `null` | [0, inf) |" in page


def test_every_loss_has_its_paper() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = set(re.findall(r"^\| (\w+) \|", page, re.M))
    assert COMPONENTS["loss"].keys() - rows == {"sft"}, "docs/algorithms.md needs a row for each loss of rewards"


def numeric_without_range() -> list[str]:
    """Numeric knobs and keys without a stated range."""
    found = []
    for kind, names in COMPONENTS.items():
        for name in names:
            for knob, known in described(kind, name)[0].knobs.items():
                kinds, limits = config._type_and_range(known.annotation)
                if {"int", "float"} & set(re.findall(r"\w+", re.sub(r"\w+\[.*\]", "", kinds))) and not limits:
                    found.append(f"{kind}.{name}.{knob}")
    for name, fields in [("", Config), *SECTIONS.items()]:
        for field in dataclasses.fields(fields):
            key = f"{name}.{field.name}".lstrip(".")
            if {"int", "float"} & set(str(field.type).split()) and key not in RANGES:
                found.append(key)
    return found


def test_every_number_has_a_range() -> None:
    assert numeric_without_range() == []


def test_a_preset_is_shown_with_what_it_sets(capsys: pytest.CaptureFixture) -> None:
    assert config.main(["algorithm.grpo"]) == 0
    said = capsys.readouterr().out
    assert "2402.03300" in said and "sequence_mean" in said and "kl_loss: 0.04" in said
    config.main(["algorithm.gspo"])
    assert "3.0e-4" in (said := capsys.readouterr().out) and "geometric mean" in said and "clip_high" in said
    config.main([])
    assert "algorithm: dapo, dr_grpo, grpo, gspo" in " ".join(capsys.readouterr().out.split())


def test_parts_are_found_by_name_and_a_wrong_name_is_told_the_right_one(capsys: pytest.CaptureFixture) -> None:
    assert config.main(["run.steps", "loss.dg", "loss", "buffer", "learner.lora"]) == 0
    said = capsys.readouterr().out
    assert "train steps to make" in said and "gate_temperature" in said and "heartbeat_timeout" in said
    assert config.main([]) == 0 and "decoupled_ppo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        config.main(["los"])
    assert "Did you mean 'loss'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        config.main(["grpo"])
    assert "Did you mean 'algorithm.grpo'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        config.main(["learning_rate"])
    assert "Here that is learner.lr." in capsys.readouterr().err
    assert config.main(["algorithm=grpo"]) == 0 and "sets" in capsys.readouterr().out


def test_a_knob_is_found_by_its_key(capsys: pytest.CaptureFixture) -> None:
    assert config.main(["learner.lr"]) == 0
    said = capsys.readouterr().out
    assert "learner.lr of learner=torch" in said and "[0, inf)" in said and "weight_decay" not in said


def test_comments_below_a_key_are_its_own() -> None:
    text = "# A file.\n\nrun:   # how long\n  steps: 3   # so many\n             # in all\n\n# no key\n"
    text += "loss: {name: ppo}   # which\n"
    assert config.said(text) == {
        "run": ("", "how long"), "run.steps": ("3", "so many in all"), "loss": ("{name: ppo}", "which"),
    }  # fmt: skip
