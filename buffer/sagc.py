"""Straggler-aware group control by what a batch teaches per second."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

from areal_like.wire.messages import GradientNoise
from buffer.reward_noise import RewardNoise
from buffer.round_model import CostFit, LengthFit, RoundModel
from buffer.sagc_plain import SagcPlain
from buffer.sizing import GroupLengths, Keep, State

log = logging.getLogger(__name__)
SLACK, LEAST_GAP = 5.0, 0.02
"""The dual variable's bound: enough for the least risky size to win for sure, plus the excess of some steps. Risks that
differ by less than LEAST_GAP count as LEAST_GAP apart."""


class Sagc(SagcPlain):
    """Straggler-aware group control (the idea of arXiv 2606.02218): among the sizes that keep the long-run share of
    groups with a straggler at or below `budget`, it chooses the one that teaches most per second.

    The next size is argmax_G rate(G) / max rate − Q · risk(G), with rate(G) = value(G) / time(G).

    value: the signal-to-noise ratio of the batch's gradient, from the variance of rewards within prompts (some have
    none) and the noise that the learner measures within prompts (`buffer.reward_noise`). time: the length of the
    scheduler's round, including over-provisioned prompts and responses, plus the batch's other costs
    (`buffer.round_model`). Lengths are fitted to those seen. risk, Q and what counts as a straggler: as in `SagcPlain`,
    but Q is bounded. At the bound a warning says that the budget can't be held.

    It starts with `group_size` and stays there until 32 groups have been seen. Sizes that leave a batch with fewer than
    `least_prompts` prompts are not chosen, except `group_size` itself. `keep`: "samples", every batch has
    groups_per_batch · group_size samples, and larger groups mean fewer prompts; "prompts": every batch has
    groups_per_batch prompts, and larger groups mean more samples. `decisions`: choices of an answer that share its
    reward; with fewer, smaller groups are worth more. None: as many as explain the measured gradients (32 where none
    is: `learner.gradient_noise`).

    All candidates are compared by the same evidence, which fades by `forget` per batch. A filter of groups makes the
    scheduler start others in their place; the times do not count these.
    """

    hears_gradients = True
    least_evidence = 32
    """With fewer groups seen, the size stays at `group_size`."""

    def __init__(
        self,
        *,
        candidates: Sequence[Annotated[int, "[4, inf)"]] = (4, 8, 16, 32),
        budget: Annotated[float, "(0, 1)"] = 0.3,
        straggler_ratio: Annotated[float, "(1, inf)"] = 3.0,
        group_size: Annotated[int, "[4, inf)"] = 8,
        forget: Annotated[float, "(0, 1]"] = 0.98,
        least_prompts: Annotated[int, "[1, inf)"] = 8,
        decisions: Annotated[int, "[1, inf)"] | None = None,
        keep: Keep = "samples",
    ):
        super().__init__(
            candidates=candidates,
            budget=budget,
            straggler_ratio=straggler_ratio,
            group_size=group_size,
            forget=forget,
        )
        if self.candidates[0] < 4 or group_size not in self.candidates:
            raise ValueError(
                f"sizing.candidates={list(candidates)} must be 4 or more, and sizing.group_size={group_size}, with "
                "which a run begins, one of them"
            )
        if least_prompts < 1 or (decisions is not None and decisions < 1) or keep not in ("samples", "prompts"):
            raise ValueError("sizing needs least_prompts and decisions >= 1, and keep is samples or prompts")
        self.least_prompts, self.keep = least_prompts, keep
        self.chosen = group_size
        self.lengths, self.rewards, self.cost = LengthFit(forget), RewardNoise(forget, decisions), CostFit(forget)
        self.told: dict[str, float] = {}
        self._warned = False

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        self.lengths.note(seen)
        self.rewards.note([group.rewards for group in seen])
        self.cost.note(seen, self.rounds)
        if self.rewards.seen >= self.least_evidence:
            self._judge_candidates()
        super().next_size(seen)
        self._warn()
        return self.chosen

    def note_gradient(self, measured: GradientNoise) -> None:
        self.rewards.note_gradient(measured.size, measured.signal, measured.between, measured.within)

    @property
    def allowed(self) -> list[int]:
        """Sizes that leave a batch enough prompts."""
        enough = [size for size in self.candidates if self.groups(size) >= self.least_prompts]
        return sorted({*enough, self.group_size})

    def _judge_candidates(self) -> None:
        values = {size: self.rewards.value(size, self.groups(size)) for size in self.candidates}
        extra = self.cost.extra
        models = {size: RoundModel(self.rounds, size, max(1, self.groups(size))) for size in self.candidates}
        times = {size: model.steps(self.lengths) + extra for size, model in models.items()}
        rates = {size: values[size] / times[size] for size in self.candidates}
        best = max(rates[size] for size in self.allowed)
        self.told = {f"sizing/value_{size}": value for size, value in values.items()}
        self.told |= {f"sizing/steps_{size}": time for size, time in times.items()}
        self.told |= {f"sizing/rate_{size}": rate / best for size, rate in rates.items()}
        self.told |= {"sizing/extra_steps": extra, "sizing/zero_variance": self.rewards.dull_share}
        self.told |= {"sizing/decisions": self.rewards.decisions}
        self.told |= {"sizing/sigma": self.lengths.sigma, "sizing/tau": self.lengths.tau}

    def _choose(self) -> int:
        return max(self.allowed, key=self._score) if self.told else self.group_size

    def _score(self, size: int) -> float:
        rate = self.told.get(f"sizing/rate_{size}", float(size == self.group_size))
        return rate - self.queue * self.risk(size)

    def _most_queue(self) -> float:
        risks = sorted(map(self.risk, self.allowed))
        return SLACK + 1.0 / max(LEAST_GAP, risks[1] - risks[0] if len(risks) > 1 else 1.0)

    @property
    def infeasible(self) -> bool:
        """Is the dual variable at its bound?"""
        return self.steps > 0 and self.queue >= self._most_queue()

    def _warn(self) -> None:
        if self.infeasible and not self._warned:
            least = min(self.allowed, key=self.risk)
            log.warning(
                "sizing.budget=%g can't be held: even of groups of %d a share of %.2f has a straggler (mean so far "
                "%.2f). Set a larger budget or straggler_ratio, or add smaller sizing.candidates",
                *(self.budget, least, self.risk(least), self.share_mean),
            )
        self._warned = self.infeasible

    def metrics(self) -> dict[str, float]:
        scores = {f"sizing/score_{size}": self._score(size) for size in self.candidates}
        return super().metrics() | self.told | scores | {"sizing/infeasible": float(self.infeasible)}

    def state_dict(self) -> dict[str, object]:
        held = {part: {name: getattr(of, name) for name in names} for part, of, names in self._parts()}
        return super().state_dict() | held | {"told": self.told, "samples": self.rounds.samples}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.told = state.get("told", {})
        self.rounds = self.rounds._replace(samples=state.get("samples", self.rounds.samples))
        for part, of, names in self._parts():
            for name in names:
                setattr(of, name, state.get(part, {}).get(name, getattr(of, name)))

    def _parts(self) -> list[tuple[str, object, tuple[str, ...]]]:
        return [
            ("lengths", self.lengths, _LENGTHS),
            ("rewards", self.rewards, _REWARDS),
            ("cost", self.cost, ("batches", "n", "x", "y", "xx", "xy")),
        ]


_LENGTHS = ("groups", "mean_sum", "square_sum", "inverse_sum", "responses", "sigma_sum", "longest")
_REWARDS = ("seen", "groups", "v", "square", "dull", "low", "high", "batches", "scale", "alike", "own")
