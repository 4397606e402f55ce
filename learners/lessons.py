"""A teacher's scores of a batch, and the student's loss from them. `learners.teacher` has the teacher itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learners.collectives import Ranks
from learners.distillation import lumped_kl, prefix_weights
from learners.logprobs import forward_logprobs, forward_top
from learners.packing import MicroBatch
from learners.passes import Passes
from learners.penalties import kl_estimate
from learners.step import Step
from learners.teacher import Teacher


class Lessons:
    """`model` is the teacher's, frozen, with the student's ranks and device; None: a server is asked instead."""

    def __init__(self, teacher: Teacher, model: PreTrainedModel | None, ranks: Ranks, vocab_size: int):
        self.model = model
        self._teacher, self._ranks, self._vocab_size = teacher, ranks, vocab_size
        self._top = min(teacher.top, vocab_size)

    @torch.no_grad()
    def ask(self, step: Step, passes: Passes) -> None:
        """Let the teacher score the trained tokens (`step.teacher`) and, with `top`, give its most likely tokens in
        their places (`step.top`). Raises TeacherError."""
        step.teacher = torch.zeros_like(step.behaviour)
        if self._top:
            shape = len(step.behaviour), self._top
            step.top = step.behaviour.new_zeros(shape, dtype=torch.int64), step.behaviour.new_zeros(shape)
        if self.model is None:
            self._ask_server(step, step.teacher)
        else:
            self._ask_model(self.model, step, step.teacher, passes)
        step.teacher = self._ranks.sum_disjoint(step.teacher, step.own)

    def _ask_server(self, step: Step, scores: Tensor) -> None:
        columns = step.columns
        mine = np.flatnonzero(columns.own & (columns.lengths > 0))
        tokens = np.isin(columns.sample, mine)
        said = self._teacher.asked([step.batch.samples[sample] for sample in mine])
        every = dict(zip(mine.tolist(), said, strict=True))
        pairs = zip(columns.sample[tokens].tolist(), columns.place[tokens].tolist(), strict=True)
        scores[step.on_device(tokens)] = scores.new_tensor([every[i][place] for i, place in pairs])

    def _ask_model(self, model: PreTrainedModel, step: Step, scores: Tensor, passes: Passes) -> None:
        for part in passes.microbatches(step.columns, np.flatnonzero(step.columns.lengths)):
            asked = replace(part, experts=None)
            with passes.precision():
                if step.top is None:
                    scores[part.trained] = forward_logprobs(model, asked, passes.temperature)[0]
                    continue
                found = forward_top(model, asked, passes.temperature, self._top, self._vocab_size)
            scores[part.trained], step.top[0][part.trained], step.top[1][part.trained] = found

    def loss(self, step: Step, part: MicroBatch, current: Tensor, candidates: Tensor | None, by: float) -> Tensor:
        """The KL to the teacher over its most likely tokens ÷ `by`, as a term of a micro-batch's loss; 0 without `top`.
        `current` [N] and `candidates` [N, k] are the student's logprobs, with their graph."""
        assert step.teacher is not None
        estimate = kl_estimate(current.detach(), step.teacher[part.trained], "k3")
        step.observe({"teacher_kl": estimate}, part.trained)
        if candidates is None or step.top is None:
            return current.new_zeros(())
        kl = lumped_kl(candidates, step.top[1][part.trained])
        step.observe({"teacher_kl_top": kl.detach()}, part.trained)
        weights = torch.ones_like(kl) if step.share is None else step.share[part.trained]
        if self._teacher.trace is not None:
            trace = prefix_weights(current, step.behaviour[part.trained], part.sequence, self._teacher.trace)
            step.observe({"teacher_trace": trace}, part.trained)
            weights = weights * trace
        return self._teacher.kl / by * (weights * kl).sum()
