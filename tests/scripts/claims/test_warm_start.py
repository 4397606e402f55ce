"""The claim's task and the settings of its students."""

import asyncio

import numpy as np
import pytest

from areal_like.config import run_config as config
from areal_like.launch.plan import plan
from scripts.claims.warm_start import COMMON, STUDENTS, WholeReverse


def test_only_the_whole_answer_earns() -> None:
    task = WholeReverse(0, digits=5)
    shown = task.demonstration("train", 3)
    almost = np.append(shown.tokens[:-1], (shown.tokens[-1] + 1) % 10)
    for answer, reward in ((shown.tokens, 1.0), (almost, 0.0), (shown.tokens[:-1], 0.0)):
        assert asyncio.run(task.reward(shown.prompt, answer)) == reward


@pytest.mark.parametrize("label", STUDENTS)
def test_students_are_what_their_labels_say(label: str) -> None:
    made = config.load([*COMMON, *STUDENTS[label], "learner.teacher.path=x"])
    assert made.inject_staleness == (8 if "age 8" in label else None)
    assert (made.mode == "sync") is ("age 0" in label)
    assert bool(made.learner.teacher.get("top")) is ("all tokens" in label)
    corrected = made.loss["name"] == "tis" and made.advantage.get("of") != "behaviour"
    assert corrected is ("sampled token, no correction" not in label)
    assert [role.name for role in plan(made)][:2] == ["buffer", "learner"]
