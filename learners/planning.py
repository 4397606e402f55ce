"""Plans: losses that weigh all tokens of a minibatch before any of them is differentiated (`contract.planned_for`)."""

from __future__ import annotations

import numpy as np
import torch

from learners.collectives import Ranks
from learners.losses.contract import LossFunction, marks_of, planned_for
from learners.objective import Objective
from learners.packing import Columns
from learners.passes import Passes
from learners.step import Step


class Planner:
    """`loss` makes plans. `starts_known`: a step's proximal logprobs are there before its first minibatch."""

    def __init__(self, loss: LossFunction, passes: Passes, ranks: Ranks, objective: Objective, starts_known: bool):
        self._loss, self._marks = loss, marks_of(loss)
        self._passes, self._ranks, self._objective, self._starts_known = passes, ranks, objective, starts_known

    def plan(self, step: Step, samples: np.ndarray, at_start: bool) -> Columns:
        """Put the plan of a minibatch into `step`; returns the columns that need a gradient."""
        assert self._marks.plan
        current = torch.full_like(step.behaviour, torch.nan)
        places = step.on_device(step.columns.tokens_of(samples))
        if self._marks.plan.needs_current:
            if at_start and self._starts_known:
                current.copy_(step.proximal)
            else:
                for part, logprobs in self._passes.logprobs(step.columns, [samples]):
                    current[part.trained] = logprobs
            current = self._ranks.sum_disjoint(current, step.own)
            if at_start:
                step.proximal[places] = current[places]
        around = self._marks.wants_proximal
        if around:
            step.proximal = self._ranks.sum_disjoint(step.proximal, step.own)
        minibatch = step.loss_batch(places, current[places], step.sample[places], with_proximal=around)
        minibatch, observed = planned_for(self._loss, minibatch)
        step.plan(places, minibatch.weights, minibatch.factors, observed)
        if self._marks.drops:
            step.leave_out(self._objective.shares)
        columns = step.columns.only(step.has_weight()) if self._marks.plan.skips else step.counted
        skipped = places[step.own[places] & ~torch.isin(places, step.on_device(columns.tokens_of(samples)))]
        step.observe(step.foreseen(skipped), skipped, "loss/")  # of the others when the loss is known
        return columns
