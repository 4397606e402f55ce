"""`scripts.check`: shipped components keep their contracts, and each broken one is found."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import areal_like as al
from actors.tools import Tools
from actors.workflows import single_turn
from areal_like.config.registry import COMPONENTS, ConfigError
from areal_like.types import Outcome
from buffer.schedulers import AsyncScheduler
from buffer.sizing import Sizing
from learners.losses.contract import LossBatch, masked_sum, ratio, total
from scripts import check
from tests.scripts.broken_tasks import (
    Hashed,
    Lottery,
    SameRows,
    looks_at_the_clock,
    not_a_number,
    pays_for_nothing,
)

NEEDS: dict[tuple[str, str], Mapping[str, object]] = {
    ("task", "mixture"): {"tasks": {"short": {"name": "copy", "digits": 2}, "long": {"name": "copy", "digits": 3}}},
    ("task", "reasoning_gym"): {"dataset": "chain_sum", "tokenizer": "bytes"},
    ("task", "episodes"): {"tokenizer": "bytes", "instructions": "Go."},
    ("task", "verifiers"): {"env": "examples.verifiers_digits", "tokenizer": "bytes"},
    ("group_reward", "judge"): {"base_url": "http://127.0.0.1:1/v1", "model_name": "m"},
    ("batch_policy", "priority"): {"key": f"{__name__}:oldest"},
    ("workflow", "multi_turn"): {"environment": {"name": "desk"}},
}
HELP: dict[tuple[str, str], dict[str, str]] = {
    ("reward", "exact"): {"response": "42"},
    ("reward", "unit_tests"): {
        "answer": '{"function": "f", "cases": [[[1], 2]], "isolation": "weak"}',
        "response": "def f(x):\n    return x + 1",
    },
}
ELSEWHERE = {
    ("task", "jsonl"),
    ("task", "demonstrations"),
    ("workflow", "agent"),
    ("engine", "sglang"),
    ("environment", "openenv"),
}
"""These need files, programs or servers."""
SHIPPED = [(k, name) for k in check.CONTRACTS for name in COMPONENTS[k] if (k, name) not in ELSEWHERE]


def oldest(group: Any) -> float:
    return -group.oldest


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_what_is_shipped_keeps_its_contract(kind: str, name: str) -> None:
    spec = {"name": name} | dict(NEEDS.get((kind, name), {}))
    broken = [each for each in check.results(kind, spec, **HELP.get((kind, name), {})) if each.problem]
    assert not broken


# What is wrong with each is in its name


def mean_loss(batch: LossBatch, denominator: float):
    return -(batch.current * batch.advantages)[batch.mask].mean(), {}


def wrong_sign(batch: LossBatch, denominator: float):
    return -total(batch.current * batch.advantages, batch, denominator), {}


def trains_masked_tokens(batch: LossBatch, denominator: float):
    return -(batch.current * batch.advantages).sum() / denominator, {}


def without_clamp(batch: LossBatch, denominator: float):
    ratios = (batch.current - batch.behaviour).exp()
    return total(torch.where(batch.mask, ratios * batch.advantages, 0.0), batch, denominator), {}


def without_shares(batch: LossBatch, denominator: float):
    return -masked_sum(
        ratio(batch.current, batch.behaviour, batch.mask) * batch.advantages, batch.mask
    ) / denominator, {}


def loss_that_draws(batch: LossBatch, denominator: float):
    return total(batch.current * batch.advantages * random.random(), batch, denominator), {}


def divides_by_zero(rewards, groups):
    return (rewards - rewards.mean()) / rewards.std()


def compares_groups(rewards, groups):
    return rewards - (rewards.mean() if len(rewards) else 0.0)


def upside_down(rewards, groups):
    return -rewards


def says_true(rewards, lengths):
    return max(rewards) == min(rewards)


def leaves_out_all(rewards, lengths):
    return "too long"


def takes_what_is_missing(waiting, missing, want):
    return (999,) * want


def never_waits(waiting, missing, want):
    return tuple(group.id for group in waiting)[:want]


def beyond(known, dice):
    return len(known.rows)


def draws_by_itself(known, dice):
    return -1 if known.new else random.randrange(len(known.rows))


class RandomSize(Sizing):
    def next_size(self, seen):
        return random.choice((2, 3, 5))


class Idle(AsyncScheduler):
    def admit(self, view):
        return None


class Forgetful(AsyncScheduler):
    count = 0

    def admit(self, view):
        plan = super().admit(view)
        self.count += 1
        return plan and plan._replace(launch=plan.launch + self.count % 5)

    def state_dict(self):
        return {"sizing": None, "sizes": [self.group_size, self.launch]}


class Overbooked(AsyncScheduler):
    def admit(self, view):
        return super().admit(view._replace(room=9))


class Moody(Tools):
    async def step(self, action):
        return Outcome(str(random.random()), 0.0, False)


async def keeps_what_was_aborted(engine, reward, prompt, limits, request):
    class Deaf:
        async def generate(self, *arguments):
            said = await engine.generate(*arguments)
            said.finish = "stop"
            return said

    return await single_turn(Deaf(), reward, prompt, limits, request)


async def asks_at_random(engine, reward, prompt, limits, request):
    return await single_turn(engine, reward, prompt, replace(limits, offset=random.randrange(1 << 30)), request)


class StaysOld:
    """An engine that never takes new weights."""

    slots, version = 4, 0

    async def generate(self, tokens, limits, request=""):
        from areal_like.types import Completion

        n = limits.max_tokens
        return Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), [(0, n)], "length")

    async def load(self, update):
        pass

    def abort(self, requests):
        pass

    def stats(self):
        return {"tokens": 1.0}

    async def close(self):
        pass


BROKEN = [
    (mean_loss, "loss", "the cut into micro-batches"),
    (mean_loss, "loss", "it is a sum ÷ denominator"),
    (wrong_sign, "loss", "better answers become more likely"),
    (trains_masked_tokens, "loss", "masked tokens change nothing"),
    (without_clamp, "loss", "far off-policy"),
    (without_shares, "loss", "shares"),
    (loss_that_draws, "loss", "the same bits"),
    (divides_by_zero, "advantage", "stay finite"),
    (compares_groups, "advantage", "a group by itself"),
    (upside_down, "advantage", "the better answer"),
    (says_true, "filter", "'' to keep a group"),
    (leaves_out_all, "filter", "'' to keep a group"),
    (takes_what_is_missing, "batch_policy", "it chooses"),
    (never_waits, "batch_policy", "with too few"),
    (beyond, "sampler", "a prompt that there is"),
    (draws_by_itself, "sampler", "and repeats"),
    (RandomSize, "sizing", "every size is one of"),
    (Idle, "scheduler", "gives each of their groups work"),
    (Forgetful, "scheduler", "after a crash"),
    (Overbooked, "scheduler", "no room"),
    (Hashed, "task", "every process makes the same prompts"),
    (SameRows, "task", "share no prompt"),
    (Lottery, "task", "twice the same"),
    (not_a_number, "reward", "earns a finite number"),
    (pays_for_nothing, "reward", "more than an empty one"),
    (looks_at_the_clock, "reward", "earns the same"),
    (Moody, "environment", "the same outcomes"),
    (keeps_what_was_aborted, "workflow", "an aborted answer"),
    (asks_at_random, "workflow", "the same calls"),
    (StaysOld, "engine", "new weights arrive"),
    (StaysOld, "engine", "it keeps count"),
]


@pytest.mark.parametrize(("component", "kind", "claim"), BROKEN, ids=lambda each: getattr(each, "__name__", None))
def test_a_broken_component_is_found_out(component: Any, kind: str, claim: str) -> None:
    name = f"{component.__module__}:{component.__name__}"
    assert check.kind_of(name) == kind
    broken = [each.claim for each in check.results(kind, {"name": name}) if each.problem]
    assert any(claim in each for each in broken), broken


def good_loss(batch: LossBatch, denominator: float, *, power: float = 1.0):
    """A policy gradient weighted by a power of the ratio."""
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    return total(moved * batch.advantages * power, batch, denominator), {"ratio": moved.detach()}


def with_a_positional_knob(batch: LossBatch, denominator: float, clip: float = 0.2):
    return total(batch.current, batch, denominator), {}


NUMBER = 5


def test_the_command_says_which_claims_hold(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "check_syntax.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    assert check.main([f"{__name__}:good_loss", "power=2"]) == 0
    said = capsys.readouterr().out
    assert "checked as: loss" in said and said.count("holds") == 8 and "all hold" in said
    assert check.main([f"{__name__}:mean_loss"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "BROKEN it is a sum" in said and "no .mean()" in said
    for arguments, told in (
        ([f"{__name__}:good_loss", "pwoer=2"], "no knob 'pwoer'"),
        ([f"{__name__}:oldest"], "which kind is that?"),
        (["lsos"], "name your own as module:Name"),
        (["nowhere:f"], "cannot be found"),
        (["mine.py"], "name your own as mine:NAME"),
        ([f"{__name__}:NUMBER"], "NUMBER is 5: a component is a function or a class"),
        (["check_syntax:f"], "check_syntax cannot be imported: SyntaxError"),
        ([f"{__name__}:nothing"], "has no 'nothing'"),
        ([f"{__name__}:with_a_positional_knob"], "write `*,` before 'clip'"),
    ):
        with pytest.raises(SystemExit):
            check.main(arguments)
        assert told in capsys.readouterr().err


def test_a_test_of_the_users_own_calls_it() -> None:
    assert "masked tokens change nothing" in " ".join(al.check(f"{__name__}:good_loss", knobs={"power": 0.5}))
    with pytest.raises(AssertionError, match="better answers become more likely"):
        al.check(f"{__name__}:wrong_sign")
    with pytest.raises(ConfigError):
        al.check(f"{__name__}:oldest")
