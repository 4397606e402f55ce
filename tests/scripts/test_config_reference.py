"""Every key of a config is explained, from the code."""

from pathlib import Path

import pytest

from areal_like.registry import COMPONENTS, knobs
from areal_like.schema import SECTIONS
from scripts import config

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == config.reference(), "run: python -m scripts.config --markdown docs/config.md"


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


def test_parts_are_found_by_name_and_a_wrong_name_is_told_the_right_one(capsys: pytest.CaptureFixture) -> None:
    assert config.main(["run.steps", "loss.dg", "loss", "buffer", "learner.lora"]) == 0
    said = capsys.readouterr().out
    assert "train steps to make" in said and "gate_temperature" in said and "heartbeat_timeout" in said
    assert config.main([]) == 0 and "decoupled_ppo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        config.main(["los"])
    assert "Did you mean 'loss'?" in capsys.readouterr().err


def test_comments_below_a_key_are_its_own() -> None:
    text = "# A file.\n\nrun:   # how long\n  steps: 3   # so many\n             # in all\n\n# no key\n"
    text += "loss: {name: ppo}   # which\n"
    assert config.said(text) == {
        "run": ("", "how long"), "run.steps": ("3", "so many in all"), "loss": ("{name: ppo}", "which"),
    }  # fmt: skip
