"""The learner's compute: a batch in, changed weights out. No sockets, no files but `save`.

One train step: advantages → (proximal logprobs under the weights at its start) → for each minibatch: packing →
forward → loss ÷ trained tokens of the minibatch → backward → clip → AdamW. The learner's main calls `train`, then
`snapshot`, and publishes what that returns.

Invariants: the model's parameters are the published bits at every moment between optimizer steps (`learners.optim`);
the gradient does not depend on how minibatches are cut into micro-batches (up to floating-point summation order); the
same batches from the same state give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models import read_state, specs_of
from areal_like.types import Batch
from areal_like.weights.state import State
from learners.attention import use_packed_attention
from learners.batch_metrics import batch_metrics
from learners.logprobs import forward_logprobs
from learners.losses import LossBatch, LossFunction, needs_proximal, ratio
from learners.optim import MasterAdamW
from learners.packing import Columns, MicroBatch, pack

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""An advantage function whose knobs are bound: (rewards [n], groups [n]) → advantages [n]."""


class TorchLearner:
    """Trains a transformers model with a policy loss.

    `loss` and `advantage` come with their knobs bound. `temperature` > 0 is the one that actors sample with. A batch
    is cut into `num_minibatches` by whole groups (each one optimizer step), shuffled by (`seed`, batch index, epoch),
    and gone through `num_minibatch_epochs` times. `max_tokens` bounds the input tokens of a micro-batch.
    `entropy_bonus` × the mean entropy (nats) of the trained tokens is added to the objective. `warmup_steps` counts
    optimizer steps; see `learners.optim` for it and for `clip_grad` (0 = off). `publish_dtype` is the dtype of the
    published weights, and of the values (held in float32) that are differentiated.
    """

    needs_model = True

    def __init__(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
        self,
        model: PreTrainedModel,
        loss: LossFunction,
        advantage: Advantage,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        lr: float = 2e-3,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        clip_grad: float = 1.0,
        num_minibatches: int = 2,
        num_minibatch_epochs: int = 1,
        max_tokens: int = 16384,
        min_microbatches: int = 1,
        entropy_bonus: float = 0.0,
        publish_dtype: str = "bfloat16",
    ):
        if temperature <= 0:
            raise ValueError(f"temperature must be positive for training, got {temperature}")
        if num_minibatches < 1 or num_minibatch_epochs < 1:
            raise ValueError("num_minibatches and num_minibatch_epochs must be positive")
        self.model = model.float().eval()
        use_packed_attention(self.model)
        self.optimizer = MasterAdamW(
            self.model,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            clip_grad=clip_grad,
            publish_dtype=getattr(torch, publish_dtype),
        )
        self._specs = specs_of(self.model, publish_dtype)
        self._loss, self._advantage = loss, advantage
        self._needs_proximal = needs_proximal(loss)
        self._temperature, self._seed = temperature, seed
        self._num_minibatches, self._num_epochs = num_minibatches, num_minibatch_epochs
        self._max_tokens, self._min_microbatches = max_tokens, min_microbatches
        self._entropy_bonus = entropy_bonus

    def train(self, batch: Batch) -> dict[str, Any]:
        """One train step. Returns metrics: those of `batch_metrics`, and what the step did to the model.

        Token means are over trained tokens of all minibatches. `kl/k1` and `kl/k3` estimate KL(behaviour || policy at
        the start of the step) per token and `ess` is the effective sample size of its importance weights as a share;
        losses that want no proximal logprobs estimate them from the first minibatch. `skipped_steps` counts, over
        the learner's life, optimizer steps skipped because of a gradient that was not finite.
        """
        metrics = batch_metrics(batch)
        step = _Step(batch, self._advantages(batch), self.model.device)
        lr = self.optimizer.current_lr
        losses, norms, sums = [], [], MetricSums()
        for epoch in range(self._num_epochs):
            minibatches = self._minibatches(batch, step.columns, epoch)
            if epoch == 0 and self._needs_proximal:
                self._recompute_start_logprobs(step, minibatches[1:])
            for number, samples in enumerate(minibatches):
                loss = self._accumulate(step, samples, at_start=epoch == number == 0, sums=sums)
                losses.append(loss)
                norms.append(self.optimizer.step())
        metrics.update(sums.means())
        metrics.update(step.drift())
        metrics.update(
            loss=float(np.mean(losses)) if losses else 0.0,
            grad_norm=float(np.mean(norms)) if norms else 0.0,
            lr=lr,
            skipped_steps=self.optimizer.skipped_steps,
        )
        return metrics

    def snapshot(self) -> State:
        """The published bits of the current weights: a fresh buffer, the caller's to keep."""
        state = State(self._specs)
        read_state(dict(self.model.named_parameters()), state)
        return state

    def save(self, folder: str) -> None:
        """Write the current weights as a Hugging Face model folder."""
        self.model.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Write what the next train step depends on besides its batch: master weights and optimizer state."""
        torch.save(self.optimizer.state_dict(), folder / "learner.pt")

    def load_state(self, folder: Path) -> None:
        """Go on from what `save_state` wrote; the same next batch then gives the same bits."""
        self.optimizer.load_state_dict(torch.load(folder / "learner.pt", weights_only=True))

    def _advantages(self, batch: Batch) -> np.ndarray:
        groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
        return self._advantage(np.array([s.reward for s in batch.samples]), groups)

    def _minibatches(self, batch: Batch, columns: Columns, epoch: int) -> list[np.ndarray]:
        """Sample indices per minibatch: shuffled groups cut evenly, without samples that have nothing to train."""
        sizes = np.array([len(g.samples) for g in batch.groups])
        firsts = np.cumsum(sizes) - sizes
        order = np.random.default_rng((self._seed, batch.index, epoch)).permutation(len(sizes))
        minibatches = []
        for groups in np.array_split(order, min(self._num_minibatches, len(order))):
            samples = np.concatenate([np.arange(firsts[g], firsts[g] + sizes[g]) for g in groups])
            samples = samples[columns.lengths[samples] > 0]
            if len(samples):
                minibatches.append(samples)
        return minibatches

    def _microbatches(self, step: _Step, samples: np.ndarray) -> list[MicroBatch]:
        lengths = step.columns.lengths[samples].tolist()
        cuts = pack(lengths, max_tokens=self._max_tokens, min_microbatches=self._min_microbatches)
        return [step.columns.microbatch(samples[cut], step.device) for cut in cuts]

    @torch.no_grad()
    def _recompute_start_logprobs(self, step: _Step, minibatches: list[np.ndarray]) -> None:
        """The first minibatch is left out: its current logprobs are those at the start, and come with its forward."""
        if minibatches:
            for microbatch in self._microbatches(step, np.concatenate(minibatches)):
                logprobs, _ = forward_logprobs(self.model, microbatch, self._temperature)
                step.start[microbatch.trained] = logprobs

    def _accumulate(self, step: _Step, samples: np.ndarray, *, at_start: bool, sums: MetricSums) -> float:
        """Put the gradient of one minibatch into the optimizer's buffer; returns its loss."""
        denominator = float(step.columns.trained_tokens(samples))
        total = 0.0
        self.optimizer.zero_grad()
        for microbatch in self._microbatches(step, samples):
            current, entropy = forward_logprobs(self.model, microbatch, self._temperature)
            if at_start:
                step.start[microbatch.trained] = current.detach()
            loss, metrics = self._loss(step.loss_batch(microbatch, current, self._needs_proximal), denominator)
            entropy_sum = entropy.sum()
            if self._entropy_bonus:
                loss = loss - self._entropy_bonus / denominator * entropy_sum
            loss.backward()
            total += loss.item()
            sums.add(metrics | {"entropy": entropy_sum.detach()}, len(current))
        return total


class _Step:
    """One batch on the device: its columns, and `start` [N], each trained token's logprob before the first update
    (NaN where nobody asked for it)."""

    def __init__(self, batch: Batch, advantages: np.ndarray, device: torch.device):
        self.device = device
        self.columns = columns = Columns(batch)
        self._behaviour = torch.from_numpy(columns.behaviour).to(device)
        self._advantages = torch.from_numpy(advantages[columns.sample].astype(np.float32)).to(device)
        self._staleness = torch.from_numpy(batch.version - columns.version).to(device)
        self.start = torch.full_like(self._behaviour, torch.nan)

    def loss_batch(self, microbatch: MicroBatch, current: Tensor, with_proximal: bool) -> LossBatch:
        places = microbatch.trained
        return LossBatch(
            current=current,
            behaviour=self._behaviour[places],
            proximal=self.start[places] if with_proximal else None,
            advantages=self._advantages[places],
            mask=torch.ones_like(current, dtype=torch.bool),
            sequence=microbatch.sequence,
            staleness=self._staleness[places],
        )

    def drift(self) -> dict[str, float]:
        """How far the policy at the start of the step is from the behaviour policy, over the tokens known."""
        known = ~self.start.isnan()
        count = int(known.sum())
        if not count:
            return {}
        weight = ratio(self.start, self._behaviour, known)[known]
        log_weight = weight.log()
        return {
            "kl/k1": -log_weight.mean().item(),
            "kl/k3": (weight - 1 - log_weight).mean().item(),
            "ess": (weight.sum() ** 2 / (count * (weight**2).sum())).item(),
        }


class MetricSums:
    """Metrics of micro-batches on their way to one number: sums over tokens, or maxima for names in `/max`."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._tokens = 0

    def add(self, metrics: dict[str, Tensor], tokens: int) -> None:
        self._tokens += tokens
        for name, value in metrics.items():
            number, before = value.item(), self._totals.get(name, 0.0)
            self._totals[name] = max(before, number) if name.endswith("/max") else before + number

    def means(self) -> dict[str, float]:
        count = max(self._tokens, 1)
        return {name: v if name.endswith("/max") else v / count for name, v in self._totals.items()}
