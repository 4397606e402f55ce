"""Knobs that nobody has set: what they become, by what the run trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config import ConfigError, load
from areal_like.defaults import describe_learning

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
        (["learner.lr=0"], 0, 0),
    ],
)
def test_the_learning_rate_follows_the_model_unless_it_is_set(overrides: list[str], lr: float, warmup: int) -> None:
    learner = load(["configs/quickstart.yaml", *overrides]).learner
    assert (learner.lr, learner.warmup_steps) == (lr, warmup)
    assert "schedule_steps" not in learner


def test_a_model_of_ones_own_says_itself_that_it_is_pretrained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from areal_like.models import pretrained\n{}def mine(seed, vocab_size): ...\n"
    for name, mark in (("trained_model", "@pretrained\n"), ("random_model", "")):
        (tmp_path / f"{name}.py").write_text(source.format(mark))
    assert [load(["base", f"model={name}:mine"]).learner.lr for name in ("trained_model", "random_model")] == [
        1e-5,
        2e-3,
    ]


def test_a_schedule_goes_over_all_steps_unless_it_is_set() -> None:
    falling = ["configs/quickstart.yaml", "learner.schedule=linear", "run.steps=70"]
    assert load(falling).learner.schedule_steps == 70
    assert load([*falling, "learner.schedule_steps=50"]).learner.schedule_steps == 50


def test_a_warm_up_leaves_a_short_schedule_room_to_fall() -> None:
    short = ["configs/quickstart.yaml", "learner.schedule=cosine", "run.steps=3"]  # of two optimizer steps each
    assert load([*short, PRETRAINED]).learner.warmup_steps == 3
    with pytest.raises(ConfigError, match=r"learner.warmup_steps=6: learner.schedule=cosine ends after 6 optimizer"):
        load([*short, "learner.warmup_steps=6"])


def test_a_learner_without_a_rate_gets_none() -> None:
    assert load(["base", "learner=timed"]).learner == {"name": "timed"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["learner.lr=0.002, constant, ", "clip_grad=1 (random initial weights)"]),
        ([PRETRAINED], ["lr=1e-05, constant, warm-up 10 optimizer steps, weight_decay=0", "(a pretrained model)"]),
        (
            [PRETRAINED, "learner.schedule=cosine", "learner.lora={}"],
            ["lr=0.0001, cosine over 1000 train steps", "LoRA"],
        ),
    ],
)
def test_the_rate_is_said(overrides: list[str], words: list[str]) -> None:
    said = describe_learning(load(["configs/quickstart.yaml", *overrides]))
    assert [word for word in words if word not in said] == [], said
    assert describe_learning(load(["configs/quickstart.yaml", "learner=timed"])) == ""
