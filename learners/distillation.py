"""Distillation: a frozen teacher beside the learner's model scores the student's own tokens.

KL(student ‖ teacher) on the student's own prefixes is what on-policy distillation lowers (GKD, arXiv 2306.13649;
"On-Policy Distillation", Thinking Machines, 2025). `learners.advantages.distill` estimates it from the sampled token.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.models.causal_lm import deferred_weights, folder
from learners.attention import use_packed_attention
from learners.collectives import Ranks
from learners.logprobs import forward_logprobs
from learners.passes import Passes
from learners.step import Step


class Teacher:
    """The model of the folder `path`, frozen and rounded to `dtype`, beside a `student` on the same device and ranks.
    Raises ValueError if it has fewer tokens than the student."""

    def __init__(self, student: PreTrainedModel, ranks: Ranks, dtype: torch.dtype, *, path: str):
        with deferred_weights(maker=ranks.rank == 0) if ranks.count > 1 else nullcontext():
            model = folder(0, 0, path=path)
        known, needed = int(model.config.vocab_size), int(student.config.vocab_size)
        if known < needed:
            raise ValueError(
                f"learner.teacher.path: got a model of {known} token ids, expected at least {needed}, as the "
                "student has: both must use the same tokens"
            )
        self.model, self._ranks = model.to(student.dtype).eval().requires_grad_(False), ranks
        if model.device.type != "meta":
            for p in model.parameters():
                p.copy_(p.to(dtype))
        use_packed_attention(model)
        if ranks.count == 1:
            model.to(student.device)

    @torch.no_grad()
    def score(self, step: Step, passes: Passes) -> None:
        """Set `step.teacher` (logprobs of the trained tokens)."""
        step.teacher = torch.zeros_like(step.behaviour)
        for part in passes.microbatches(step.columns, np.flatnonzero(step.columns.lengths)):
            own = replace(part, experts=None)
            with passes.precision():
                step.teacher[part.trained] = forward_logprobs(self.model, own, passes.temperature)[0]
        step.teacher = self._ranks.sum_disjoint(step.teacher, step.own)
