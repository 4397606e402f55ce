"""AdamW on float32 master weights, with a model that always holds the published values.

Invariant: model parameters == round(master) to the published dtype, bit for bit, from construction on and after every
step. Gradients are taken at the rounded values, but steps change the masters, so small steps add up. Parameters and
gradients are views of one flat buffer each. For a model in float64, masters and gradients are float64. With `hold_in`,
the parameters have half precision; complete gradients are then added to the flat buffer, many at once, and freed, so
micro-batches add up in float32. With several ranks each holds masters and gradients of its part of every parameter
(`learners.sharding`), and copies to and from the parts that FSDP owns.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from learners.collectives import Ranks
from learners.schedules import Schedule
from learners.sharding import joined, own_part

ROUNDED = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Weights that are rounded at once: on a CPU as many as stay in its cache."""
ADDED = 1 << 26
"""Numbers of gradients in half precision that are added at once: they take 6 bytes each meanwhile."""


class MasterAdamW:
    """torch's AdamW (decoupled weight decay, arXiv 1711.05101) with a schedule, clipping and a finite-gradient guard.
    Weight decay spares vectors. `clip_grad` is the largest global L2 norm; 0: off."""

    def __init__(  # noqa: PLR0913 - settings of one optimizer
        self,
        model: nn.Module,
        *,
        schedule: Schedule,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        clip_grad: float,
        publish_dtype: torch.dtype,
        ranks: Ranks,
        hold_in: torch.dtype | None = None,
    ):
        self.schedule, self.clip_grad = schedule, clip_grad
        self.steps = 0
        self.skipped_steps = 0
        self._may_change = threading.Event()
        self._may_change.set()
        self._model, self._dtype, self._ranks = model, publish_dtype, ranks
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        vectors = [p for p in trained if p.ndim < 2]
        self._parameters = matrices + vectors
        own = [own_part(p.detach()) for p in self._parameters]
        self._master = torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)).flatten() for part in own])
        self._weights = torch.empty_like(self._master, dtype=None if self._ranks.count > 1 else hold_in)
        self.gradient = torch.zeros_like(self._master)
        sizes, sharded = [part.numel() for part in own], self._ranks.count > 1
        weights = [flat.view_as(part) for flat, part in zip(self._weights.split(sizes), own, strict=True)]
        gradients = [flat.view_as(part) for flat, part in zip(self.gradient.split(sizes), own, strict=True)]
        self._copied = (own, weights, gradients) if sharded else None
        if not sharded:
            for p, weight, gradient in zip(self._parameters, weights, gradients, strict=True):
                p.data, p.grad = weight, gradient if hold_in is None else None
                if hold_in is not None:
                    p.register_post_accumulate_grad_hook(self._take)
        self._sums = dict(zip(self._parameters, gradients, strict=True))
        self._taken: dict[nn.Parameter, Tensor] = {}  # parameter → its gradient that is not added yet
        self._numbers = 0  # of these gradients
        self._round()
        cut, offset = sum(sizes[: len(matrices)]), sum(sizes)
        groups = []
        for place, decay in ((slice(0, cut), weight_decay), (slice(cut, offset), 0.0)):
            part = nn.Parameter(self._master[place])
            part.grad = self.gradient[place]
            if part.numel():
                groups.append({"params": [part], "weight_decay": decay})
        self._adamw = torch.optim.AdamW(groups, lr=schedule.lr, betas=(betas[0], betas[1]), eps=eps, fused=True)

    @property
    def current_lr(self) -> float:
        return self.schedule.rate(self.steps)

    def zero_grad(self) -> None:
        self.gradient.zero_()
        self._taken, self._numbers = {}, 0
        if self._copied:
            for p in self._parameters:
                p.grad = None

    @torch.no_grad()
    def collect(self) -> Tensor:
        """The gradient of this rank's part, flat, with all backward passes since `zero_grad` in it."""
        if self._copied:
            for p, gradient in zip(self._parameters, self._copied[2], strict=True):
                if p.grad is not None:
                    gradient.copy_(own_part(p.grad))
        self._add_taken()
        return self.gradient

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Move a parameter's complete gradient to those that are added next."""
        assert parameter.grad is not None
        if parameter in self._taken:  # of the micro-batch before
            self._add_taken()
        self._taken[parameter], parameter.grad = parameter.grad, None
        self._numbers += parameter.numel()
        if self._numbers >= ADDED:
            self._add_taken()

    def _add_taken(self) -> None:
        """Two kernels for all of them: torch adds tensors of two dtypes one by one."""
        if self._taken:
            sums = [self._sums[parameter] for parameter in self._taken]
            wide = [torch.empty_like(each) for each in sums]
            torch._foreach_copy_(wide, list(self._taken.values()))
            torch._foreach_add_(sums, wide)
        self._taken, self._numbers = {}, 0

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> float:
        """Clip, step with `scale` times the learning rate, and round; returns the gradient's norm, over all ranks,
        before clipping. Call `collect` before. A norm that is not finite leaves weights and moments untouched and
        counts in `skipped_steps`."""
        norm = self._ranks.norm(self.gradient)
        if not math.isfinite(norm):
            self.skipped_steps += 1
            return norm
        if self.clip_grad and norm > self.clip_grad:
            self.gradient.mul_(self.clip_grad / norm)
        for group in self._adamw.param_groups:
            group["lr"] = scale * self.current_lr
        self._may_change.wait()
        self._adamw.step()
        self.steps += 1
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        step = ROUNDED[self._master.device.type]
        for start in range(0, len(self._master), step):
            some = slice(start, start + step)
            self._weights[some] = self._master[some].to(self._dtype)
        for part, weight in zip(*self._copied[:2], strict=True) if self._copied else ():
            part.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; tensors are its own."""
        return {
            "master": self._master,
            "adamw": list(self._adamw.state_dict()["state"].values()),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    def hold(self) -> threading.Event:
        """The next step will wait until the caller sets this event."""
        self._may_change = threading.Event()
        return self._may_change

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of an optimizer over a model of the same shapes, on any device."""
        self._master.copy_(state["master"])
        own, there = self._adamw.state_dict(), self._master.device
        own["state"] = {i: {k: v.to(there, copy=True) for k, v in s.items()} for i, s in enumerate(state["adamw"])}
        self._adamw.load_state_dict(own)
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        self._round()

    @torch.no_grad()
    def load_master(self, parts: Sequence[Tensor]) -> None:
        """Load the masters of any number of ranks, without moments, into one rank. Raises ValueError for other
        sizes."""
        self._master.copy_(joined(parts, self._parameters))
        self._round()
