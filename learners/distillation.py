"""Distillation: a frozen teacher beside the learner's model scores the student's own tokens.

KL(student ‖ teacher) on the student's own prefixes is what on-policy distillation lowers (GKD, arXiv 2306.13649;
"On-Policy Distillation", Thinking Machines, 2025). `learners.advantages.distill` estimates it from the sampled token
alone; with `top` it is summed over the teacher's k most likely tokens, as a term of the loss.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models.causal_lm import deferred_weights, folder
from learners.attention import use_packed_attention
from learners.collectives import Ranks
from learners.logprobs import forward_logprobs, forward_top
from learners.objective import kl_estimate
from learners.packing import MicroBatch
from learners.passes import Passes
from learners.step import Step

TINY = 1e-12
"""Least probability of all other tokens together."""


class Teacher:
    """The model of the folder `path`, frozen and rounded to `dtype`, beside a `student` on the same device and ranks.
    With `top` k, the KL over the teacher's k most likely tokens (`lumped_kl`) × `kl` is added to the loss of each
    trained token. Raises ValueError if it has fewer tokens than the student."""

    def __init__(
        self,
        student: PreTrainedModel,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        path: str,
        top: Annotated[int, "[0, inf)"] = 0,
        kl: Annotated[float, "[0, inf)"] = 1.0,
    ):
        with deferred_weights(maker=ranks.rank == 0) if ranks.count > 1 else nullcontext():
            model = folder(0, 0, path=path)
        known, self._vocab_size = int(model.config.vocab_size), int(student.config.vocab_size)
        if known < self._vocab_size:
            raise ValueError(
                f"learner.teacher.path: got a model of {known} token ids, expected at least {self._vocab_size}, as the "
                "student has: both must use the same tokens"
            )
        self.model, self._ranks = model.to(student.dtype).eval().requires_grad_(False), ranks
        self._top, self._kl = min(top, self._vocab_size), kl
        if model.device.type != "meta":
            for p in model.parameters():
                p.copy_(p.to(dtype))
        use_packed_attention(model)
        if ranks.count == 1:
            model.to(student.device)

    @torch.no_grad()
    def score(self, step: Step, passes: Passes) -> None:
        """Set `step.teacher` (logprobs of the trained tokens) and, with `top`, `step.top` (ids and logprobs of the
        teacher's most likely tokens in their places)."""
        step.teacher = torch.zeros_like(step.behaviour)
        if self._top:
            shape = len(step.behaviour), self._top
            step.top = step.behaviour.new_zeros(shape, dtype=torch.int64), step.behaviour.new_zeros(shape)
        for part in passes.microbatches(step.columns, np.flatnonzero(step.columns.lengths)):
            own = replace(part, experts=None)
            with passes.precision():
                if step.top is None:
                    step.teacher[part.trained] = forward_logprobs(self.model, own, passes.temperature)[0]
                    continue
                found = forward_top(self.model, own, passes.temperature, self._top, self._vocab_size)
            step.teacher[part.trained], step.top[0][part.trained], step.top[1][part.trained] = found
        step.teacher = self._ranks.sum_disjoint(step.teacher, step.own)

    def loss(self, step: Step, part: MicroBatch, current: Tensor, candidates: Tensor, by: float) -> Tensor:
        """The KL to the teacher over its most likely tokens ÷ `by`, as a term of a micro-batch's loss; 0 without `top`.
        `current` [N] and `candidates` [N, k] are the student's logprobs, with their graph."""
        assert step.teacher is not None
        step.observe({"teacher_kl": kl_estimate(current.detach(), step.teacher[part.trained], "k3")}, part.trained)
        if step.top is None:
            return current.new_zeros(())
        kl = lumped_kl(candidates, step.top[1][part.trained])
        step.observe({"teacher_kl_top": kl.detach()}, part.trained)
        return self._kl / by * (kl if step.share is None else step.share[part.trained] * kl).sum()


def lumped_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student ‖ teacher) [N] of distributions over k tokens and "any other" token, from logprobs [N, k] of the same
    tokens: never above the KL over all tokens, and equal to it if k is the whole vocabulary."""
    kl = (student.exp() * (student - teacher)).sum(-1)
    ours, theirs = (1.0 - each.exp().sum(-1) for each in (student, teacher))
    rest = ours.clamp(min=TINY) * (ours.clamp(min=TINY).log() - theirs.clamp(min=TINY).log())
    return kl + torch.where((ours > TINY) | (theirs > TINY), rest, 0.0)
