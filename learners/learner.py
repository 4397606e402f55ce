"""The learner's compute: a batch in, changed weights out. No sockets, no files except in `save`.

One train step: (reference logprobs) → advantages → (proximal logprobs under the weights at its start) → for each
minibatch: (a plan over all of its tokens) → packing → forward → loss ÷ denominator → backward → clip → AdamW. The steps
in brackets run only if the loss, the advantage or the objective needs them.

Invariants: between optimizer steps the model's parameters are the published bits (`learners.optim`). The gradient does
not depend on the cut into micro-batches, up to summation order. The same batches from the same state give the same
bits.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models.causal_lm import specs_of
from areal_like.models.compiling import Compiling
from areal_like.types import Batch
from areal_like.wire.messages import Model
from learners.adapters import Adapters
from learners.advantages import Advantage, needs_current
from learners.attention import use_packed_attention
from learners.batch_metrics import batch_metrics
from learners.collectives import Ranks
from learners.distillation import Teacher
from learners.logprobs import forward_logprobs
from learners.losses.contract import LossFunction, marks_of, merged
from learners.objective import Objective, effective_share, frozen, kl_estimate, without_cut_answers
from learners.optim import MasterAdamW
from learners.packing import MicroBatch, cut_groups
from learners.passes import Passes, Planner
from learners.router_replay import RouterReplay
from learners.saving import Saving
from learners.schedules import Schedule
from learners.sharding import Computing, hold_in, prepare, reshard
from learners.sizing import Sizes, Sizing
from learners.step import Step
from learners.untrainable import OutOfMemory, Untrainable, is_of_the_data, unknown_tokens

log = logging.getLogger(__name__)


class TorchLearner:
    """Trains a transformers model with a policy loss.

    `loss` and `advantage` come with their knobs bound. `temperature` > 0 is the actors' sampling temperature. A batch
    is cut into `num_minibatches` by whole groups (each one optimizer step), shuffled by (`seed`, batch index, epoch),
    and gone through `num_minibatch_epochs` times. `micro_batch_tokens` bounds the input tokens of a micro-batch
    (`packing`: `learners.packing`). `lr`, `schedule`, `warmup_steps` (optimizer steps) and `schedule_steps` (train
    steps): see `learners.schedules`. `clip_grad` 0: off. `publish_dtype` is the dtype of the published weights.

    `lora` {rank, alpha, targets} trains adapters, not the model (`learners.adapters`; {}: defaults). `teacher` {path}
    is the model to distil from (`learners.distillation`). `ranks` processes share the work, each with its part
    of the weights (`learners.sharding`). Within a step none waits more than `collective_timeout` seconds for another.

    On `device`, matrices are multiplied in `compute_dtype`; master weights, states between layers, norms, logits and
    sums over tokens stay in float32. With `param_dtype` bfloat16, weights have that dtype while layers compute, which
    rounds none of them; with `lora` the frozen ones alone. None: if the other two are bfloat16, on CUDA or with `lora`.
    `checkpoint_activations` saves memory but computes a third more; `compile` has torch compile the layers and, on
    CUDA, the logprob head. With `router_replay` the model uses the experts that the engine's model chose; not with
    `compile`. At most `max_logits` logits are made at once. None: on CUDA layers are compiled, and the memory that is
    free at the first batch chooses the other sizes (`learners.sizing`); on a CPU 16,384 tokens, 2^26 logits, and
    nothing is compiled or recomputed.
    `threads`: CPU threads of each rank (None: as torch has them); another number may change last bits. Other knobs are
    those of `learners.objective`. A float64 model computes in float64.
    """

    needs_model = True
    distrust: Callable[[Batch], str] | None = None
    """Gives the reason not to train a batch, or "". Set where no earlier check was made."""
    _step: Step | None = None  # the last one

    def __init__(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
        self,
        model: PreTrainedModel,
        loss: LossFunction,
        advantage: Advantage,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        lr: Annotated[float, "[0, inf)"] | None = None,
        schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup_steps: Annotated[int, "[0, inf)"] | None = None,
        schedule_steps: Annotated[int, "[0, inf)"] | None = None,
        weight_decay: Annotated[float, "[0, inf)"] = 0.0,
        betas: tuple[Annotated[float, "[0, 1)"], Annotated[float, "[0, 1)"]] = (0.9, 0.95),
        eps: Annotated[float, "(0, inf)"] = 1e-8,
        clip_grad: Annotated[float, "[0, inf)"] = 1.0,
        num_minibatches: Annotated[int, "[1, inf)"] = 2,
        num_minibatch_epochs: Annotated[int, "[1, inf)"] = 1,
        micro_batch_tokens: Annotated[int, "[1, inf)"] | None = None,
        packing: Literal["first_fit", "balanced"] = "first_fit",
        publish_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        lora: Mapping[str, Any] | None = None,
        teacher: Mapping[str, Any] | None = None,
        ranks: Annotated[int, "[1, inf)"] = 1,
        collective_timeout: Annotated[float, "(0, inf)"] = 900.0,
        compute_dtype: Literal["float32", "bfloat16"] | None = None,
        param_dtype: Literal["float32", "bfloat16"] | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
        checkpoint_activations: bool | None = None,
        compile: bool | None = None,
        router_replay: bool = False,
        max_logits: Annotated[int, "[1, inf)"] | None = None,
        threads: Annotated[int, "[1, inf)"] | None = None,
        **objective: Any,
    ):
        self.objective, self.ranks = Objective(**objective), Ranks(ranks)
        torch.set_num_threads(threads or torch.get_num_threads())
        self._num_minibatches, self._num_epochs = num_minibatches, num_minibatch_epochs
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        self.model = (model.double() if model.dtype == torch.float64 else model.float()).eval()
        self._device, dtype, specs = torch.device(device), getattr(torch, publish_dtype), specs_of(model, publish_dtype)
        half = hold_in(param_dtype, compute_dtype, publish_dtype, self.model, device, lora is not None)
        use_packed_attention(self.model)
        self._adapters = None if lora is None else Adapters(self.model, seed, dtype, half, **lora)
        half = None if self._adapters else half  # adapters stay float32
        if ranks == 1:  # FSDP moves layers when it divides them
            self.model.to(self._device)
        apart = self.objective.needs_reference and lora is None
        self._reference = frozen(self.model, dtype) if apart else self.model
        self._replay = RouterReplay(self.model) if router_replay else None
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.facts = Model(self.vocab_size, self._replay.routing if self._replay else None, longest)
        self._teacher = None if teacher is None else Teacher(self.model, self.ranks, dtype, **teacher)
        models = [self.model, self._reference, *([self._teacher.model] if self._teacher else [])]
        entropies = bool(self.objective.entropy_bonus)  # are differentiated
        given = Sizes(micro_batch_tokens, max_logits, compile, checkpoint_activations)
        tokens, logits, compiles, lean = given.at_first(compiles=device == "cuda" and not router_replay)
        compiling = Compiling(compiles)
        prepare(models, self.ranks, Computing(logits, entropies, compiling, lean, half, self._device, dtype))
        self.optimizer = MasterAdamW(
            self.model,
            schedule=Schedule(lr, schedule, warmup_steps, (schedule_steps or 0) * num_minibatches * self._num_epochs),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            clip_grad=clip_grad,
            publish_dtype=self.model.dtype if self._adapters else dtype,
            ranks=self.ranks,
            hold_in=half,
        )
        self.saving = Saving(self.model, specs, self.optimizer, self._adapters, self.ranks)
        self.snapshot, self.save, self.load_weights = self.saving.snapshot, self.saving.save, self.saving.load_weights
        self.save_state, self.load_state = self.saving.save_state, self.saving.load_state
        self.save_beside = self.saving.save_beside
        self._passes = Passes(
            self.model,
            self.ranks,
            self._device,
            temperature,
            micro_batch_tokens=tokens,
            half_matrices=compute_dtype == "bfloat16" and half is None,
            experts=router_replay,
            balanced=packing == "balanced",
        )
        self.sizing, self._models = Sizing(given, self._passes, self.optimizer, compiling), models
        self._rounds = compute_dtype == "bfloat16" or self._adapters is not None  # see `logprobs_of`
        self.shall_stop: Callable[[], bool] = lambda: False
        self._loss, self._marks, self._advantage, self._seed = loss, marks_of(loss), advantage, seed
        self._starts_known = needs_current(advantage)  # proximal logprobs come before advantages
        self._planner = Planner(loss, self._passes, self.ranks, self._starts_known) if self._marks.plan else None

    def train(self, batch: Batch) -> dict[str, Any]:
        """One train step on a batch, or this rank's share of it. Returns the whole batch's metrics: those of
        `batch_metrics` and `Step.metrics`, and the learner's `skipped_steps` (non-finite gradients). Raises
        Untrainable for a fault of the batch's data, on all ranks alike."""
        before = self.optimizer.steps
        self._passes.interrupted = lambda: self.optimizer.steps == before and self.shall_stop()
        try:
            fault = unknown_tokens(batch, self.vocab_size) or (self.distrust(batch) if self.distrust else "")
            if fault := next(filter(None, self.ranks.gathered(fault)), ""):
                raise Untrainable(f"batch {batch.index} can't be trained: {fault}")
            try:
                return self._train(batch)
            except torch.OutOfMemoryError as error:
                if self.optimizer.steps > before or self.ranks.count > 1:
                    raise
                return self._train_in_halves(batch, str(error))
        except Exception as error:
            self.optimizer.zero_grad()
            # An error on one rank in the middle of a step passes unchanged: others may wait for that rank.
            if isinstance(error, Untrainable) or self.ranks.count > 1 or not is_of_the_data(error):
                raise
            text = f"batch {batch.index} can't be trained: {type(error).__name__}: {error}"
            raise Untrainable(text, self.optimizer.steps > before) from error
        finally:
            self._passes.interrupted = lambda: False

    def _train_in_halves(self, batch: Batch, why: str) -> dict[str, Any]:
        """Like `_train`, in micro-batches of half the tokens, from now on. Raises OutOfMemory."""
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        half = self.sizing.found["micro_batch_tokens"] = self._passes.halve()
        log.warning("out of memory: trying again with learner.micro_batch_tokens=%d (%s)", half, why)
        try:
            return self._train(batch)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"learner.micro_batch_tokens: got {2 * half} and then {half}, expected fewer for this device: {error}"
            ) from None

    def _train(self, batch: Batch) -> dict[str, Any]:
        lr = self.optimizer.current_lr
        if self.sizing.open:
            self.sizing.measure(batch, self._models)
        batch = without_cut_answers(batch) if self.objective.overlong_filter else batch
        step = self._step = self._in_minibatches(batch)
        more = {"lr": lr, "skipped_steps": self.optimizer.skipped_steps}
        more |= self._replay.metrics(self.ranks) if self._replay else {}
        return batch_metrics(step.batch) | step.metrics(self.ranks) | more

    def logprobs_of(self, sequences: list[list[int]]) -> tuple[list[list[float]], str]:
        """Logprobs, at temperature 1, of all tokens after the first of some sequences, and the dtype to whose precision
        they match the published weights (merged and rounded adapters). All ranks must call this, with the same
        sequences."""
        rows = self._passes.logprobs_of(sequences)
        reshard(self.model)  # the next thing is a snapshot of this rank's part
        return rows, "bfloat16" if self._rounds else "float32"

    def numbers(self, group_id: int) -> list[dict[str, np.ndarray]]:
        """What the last step computed per token of one of its groups (`Step.numbers`)."""
        return self._step.numbers(group_id) if self._step else []

    def staleness(self) -> list[int]:
        """`Batch.staleness` of the last batch, with the shares of all ranks."""
        return self._step.batch.staleness() if self._step else []

    def _in_minibatches(self, batch: Batch) -> Step:
        step = self._begin(batch)
        batch = step.batch
        for epoch in range(self._num_epochs):
            order = np.random.default_rng((self._seed, batch.index, epoch)).permutation(len(batch.groups))
            minibatches = cut_groups(batch, step.columns, order, self._num_minibatches)
            if epoch == 0 and self._marks.wants_proximal and not self._starts_known:
                # The first minibatch is left out: its logprobs at the start come with its own forward pass.
                for part, logprobs in self._passes.logprobs(step.columns, minibatches[1:]):
                    step.proximal[part.trained] = logprobs
            for number, samples in enumerate(minibatches):
                step.losses.append(self._accumulate(step, samples, at_start=epoch == number == 0))
                step.norms.append(self.optimizer.step(*step.scales[-1:]))
        step.proximal = self.ranks.sum_disjoint(step.proximal, step.own)
        return step

    def _begin(self, batch: Batch) -> Step:
        """The batch on the device, with everything that must be known before the weights move."""
        whole, own = self.ranks.gather_batch(batch)
        step = Step(whole, own, self._device, self.optimizer.gradient.dtype, self.objective.shares)
        trained = [np.flatnonzero(step.columns.lengths)]
        if self.objective.needs_reference:
            step.reference = torch.zeros_like(step.behaviour)
            with self._adapters.off() if self._adapters else nullcontext():
                for part, logprobs in self._passes.logprobs(step.columns, trained, self._reference):
                    step.reference[part.trained] = logprobs
            step.reference = self.ranks.sum_disjoint(step.reference, step.own)
        if self._starts_known:
            for part, logprobs in self._passes.logprobs(step.columns, trained):
                step.proximal[part.trained] = logprobs
        if self._teacher:
            self._teacher.score(step, self._passes)
        if self._starts_known and step.teacher is not None:
            step.proximal = self.ranks.sum_disjoint(step.proximal, step.own)
        student = step.proximal if self._starts_known else step.behaviour
        advantages = self.objective.advantages(step, self._advantage, student)
        step.advantages = step.on_device(advantages).to(step.behaviour.dtype)
        return step

    def _accumulate(self, step: Step, samples: np.ndarray, *, at_start: bool) -> float:
        """Put the gradient of one minibatch into the optimizer's buffer; returns its loss."""
        columns = self._planner.plan(step, samples, at_start) if self._planner else step.columns
        denominator = self.objective.denominator(step.columns, samples) or 1.0  # 0: no token of it is trained
        self.optimizer.zero_grad()
        step.input_tokens += int(step.columns.lengths[samples].sum())
        losses, parts = list[Tensor](), 0
        for part in self._passes.microbatches(columns, samples):
            loss = self._forward(step, part, denominator, at_start)
            step.backward_tokens += part.tokens
            step.computed_tokens += part.input_ids.numel() if part.tokens else 0
            loss.backward()
            losses.append(loss.detach())
            parts += len(part.trained) > 0
        self.optimizer.collect()
        if self.objective.ess_scale:
            step.scales.append(math.sqrt(effective_share(step.log_weights(samples, parts, self.ranks))))
        return self.ranks.sum(sum(torch.stack(losses).tolist()) if losses else 0.0)  # the only wait for the device

    def _forward(self, step: Step, part: MicroBatch, denominator: float, at_start: bool) -> Tensor:
        """The loss of one micro-batch."""
        with self._passes.precision():
            current, entropy = forward_logprobs(self.model, part, self._passes.temperature)
        if not len(part.trained):
            return current.sum() + entropy.sum()
        if at_start:
            step.proximal[part.trained] = current.detach()
        batch = step.loss_batch(part.trained, current, part.sequence, self._marks.wants_proximal)
        loss, observed = self._loss(batch, denominator)
        step.observe(merged(step.foreseen(part.trained), observed), part.trained, "loss/")
        step.note({"current": current}, part.trained)
        reference = None if step.reference is None else step.reference[part.trained]
        loss, observed = self.objective.with_terms(loss, current, entropy, reference, batch, denominator)
        step.observe(observed, part.trained)
        if step.teacher is not None:
            gap = kl_estimate(current.detach(), step.teacher[part.trained], "k3")
            step.observe({"teacher_kl": gap}, part.trained)
        return loss
