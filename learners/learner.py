"""The learner's compute: a batch in, changed weights out. No sockets, no files except in `save`.

One train step: (reference logprobs, values) → advantages → (proximal logprobs under the weights at its start) → for
each minibatch: (a plan over all of its tokens) → packing → forward → loss ÷ denominator → backward → clip → AdamW. The
steps in brackets run only if the loss, the advantage or the objective asks for them. `learners.main` calls `train`,
then publishes what `snapshot` returns.

Invariants: between optimizer steps the model's parameters are the published bits (`learners.optim`). The gradient does
not depend on how minibatches are cut into micro-batches, up to floating-point summation order. The same batches from
the same state give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models.causal_lm import specs_of
from areal_like.models.experts import Routing
from areal_like.types import Batch, Group, Sample
from areal_like.weights.state import State
from learners.adapters import Adapters
from learners.advantages import Episodes, bootstraps, marked, needs_current, turns_of
from learners.attention import use_packed_attention
from learners.batch_metrics import batch_metrics, of_demonstrations
from learners.collectives import Ranks
from learners.critic import Critic, one_token_further
from learners.diagnostics import zero_variance_by_staleness
from learners.distillation import Teacher, TeacherScorer
from learners.logprobs import forward_candidates, forward_logprobs, forward_with_states
from learners.losses.contract import LossFunction, marks_of, merged, planned_for
from learners.objective import Objective, frozen, without_cut_answers
from learners.optim import MasterAdamW, Schedule
from learners.packing import Columns, MicroBatch, cut_groups
from learners.passes import Passes
from learners.router_replay import RouterReplay
from learners.saving import Saving
from learners.sharding import Computing, hold_in, prepare, reshard
from learners.step import Step
from learners.untrainable import or_untrainable, unknown_tokens

Advantage = Callable[..., np.ndarray]
"""An advantage function whose knobs are bound; `learners.advantages` has the two forms."""


class TorchLearner:
    """Trains a transformers model with a policy loss.

    `loss` and `advantage` come with their knobs bound. `temperature` > 0 is the actors' sampling temperature. A batch
    is cut into `num_minibatches` by whole groups (each one optimizer step), shuffled by (`seed`, batch index, epoch),
    and gone through `num_minibatch_epochs` times. `micro_batch_tokens` bounds the input tokens of a micro-batch. `lr`,
    `schedule`, `warmup_steps` (optimizer steps) and `schedule_steps` (train steps) see `learners.optim`; configs
    fill in what is None by the kind of model (`config.defaults`). `clip_grad` 0: off. `publish_dtype` is the dtype
    of the published weights; gradients are taken at these values, held in float32. `critic_lr` > 0 trains a critic
    (`learners.critic`), which the advantage `gae` needs; `critic_trunk` scales its gradient into the policy, and
    `critic_clip` bounds how far a value moves in a train step (None: not at all).

    `lora` {rank, alpha, targets, path} trains adapters, not the model (`learners.adapters`; {}: defaults). `teacher`
    {path, top, kl} is the model to distil from (`learners.distillation`; for the advantage `distill`, or `top`).
    `ranks` processes share the work, each with its part of the weights
    (`learners.sharding`). Within a step none waits more than `collective_timeout` seconds for another
    (`learners.follower`).

    On `device`, matrices are multiplied in `compute_dtype`; master weights and sums over tokens stay in float32. With
    `param_dtype` bfloat16, weights have that dtype while layers compute, and so have the states between layers. This
    rounds no weight, since published weights have no more digits. None: on CUDA where `compute_dtype` and
    `publish_dtype` are bfloat16, without `lora`. With `fp32_head` the output head always multiplies in float32.
    `checkpoint_activations` saves memory but computes a third more; `compile` has torch compile the layers. With
    `router_replay` the model uses the experts that the engine's model chose, which then come with the tokens; not with
    `compile` (`learners.router_replay`). At most `max_logits` logits are made at once (`learners.logprobs`). `threads`:
    CPU threads of each rank (None: as torch has them); another number may change last bits. Other knobs are those of
    `learners.objective`. A float64 model computes in float64, to distinguish rounding from real differences.
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
        micro_batch_tokens: Annotated[int, "[1, inf)"] = 16384,
        min_microbatches: Annotated[int, "[1, inf)"] = 1,
        publish_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        critic_lr: Annotated[float, "[0, inf)"] = 0.0,
        critic_trunk: Annotated[float, "[0, inf)"] = 0.0,
        critic_clip: Annotated[float, "(0, inf)"] | None = None,
        lora: Mapping[str, Any] | None = None,
        teacher: Mapping[str, Any] | None = None,
        ranks: Annotated[int, "[1, inf)"] = 1,
        collective_timeout: Annotated[float, "(0, inf)"] = 900.0,
        compute_dtype: Literal["float32", "bfloat16"] | None = None,
        param_dtype: Literal["float32", "bfloat16"] | None = None,
        fp32_head: bool = True,
        device: Literal["cpu", "cuda"] = "cpu",
        checkpoint_activations: bool = False,
        compile: bool = False,
        router_replay: bool = False,
        max_logits: Annotated[int, "[1, inf)"] = 67_108_864,
        threads: Annotated[int, "[1, inf)"] | None = None,
        **objective: Any,
    ):
        self.objective, self.ranks = Objective(**objective), Ranks(ranks)
        torch.set_num_threads(threads or torch.get_num_threads())
        _check(loss, advantage, temperature, num_minibatches, num_minibatch_epochs, critic_lr, critic_clip)
        taught = None if teacher is None else Teacher(**teacher)
        self._num_minibatches, self._num_epochs = num_minibatches, num_minibatch_epochs
        if router_replay and compile:
            raise ValueError("learner.router_replay does not go with learner.compile: leave one of them out")
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        self.model = (model.double() if model.dtype == torch.float64 else model.float()).eval()
        self._device, dtype, specs = torch.device(device), getattr(torch, publish_dtype), specs_of(model, publish_dtype)
        half = hold_in(param_dtype, compute_dtype, publish_dtype, self.model, device, lora is not None)
        how = Computing(max_logits, fp32_head, self.objective.needs_entropy, compile, checkpoint_activations, half)
        self._adapters, self._reference = self._arranged(how, seed, dtype, lora, router_replay, taught)
        rates = Schedule(lr, schedule, warmup_steps, (schedule_steps or 0) * num_minibatches * num_minibatch_epochs)
        dtype = self.model.dtype if self._adapters else dtype
        adamw = partial(MasterAdamW, betas=betas, eps=eps, weight_decay=weight_decay)
        adamw = partial(adamw, schedule=rates, clip_grad=clip_grad, publish_dtype=dtype, hold_in=half)
        self.optimizer = adamw(self.model, ranks=self.ranks)
        head = partial(Critic, lr=critic_lr, trunk=critic_trunk, clip=critic_clip)
        self._critic = head(self.model, self.ranks) if critic_lr else None
        self.saving = Saving(self.model, specs, self.optimizer, self._adapters, self._critic, self.ranks)
        passes_of = partial(
            Passes, micro_batch_tokens=micro_batch_tokens, min_microbatches=min_microbatches, experts=router_replay
        )
        autocast = compute_dtype == "bfloat16" and half is None
        self._passes = passes_of(self.model, self.ranks, self._device, temperature, half_matrices=autocast)
        self._rounds = compute_dtype == "bfloat16" or self._adapters is not None  # see `logprobs_of`
        self._loss, self._marks, self._advantage = loss, marks_of(loss), advantage
        self._starts_known = bool(critic_lr) or needs_current(advantage)  # proximal logprobs come before advantages
        self._temperature, self._seed = temperature, seed

    def _arranged(
        self,
        how: Computing,
        seed: int,
        dtype: torch.dtype,
        lora: Mapping[str, Any] | None,
        replay: bool,
        teacher: Teacher | None,
    ) -> tuple[Adapters | None, PreTrainedModel]:
        """Prepare the model for training; returns its adapters and the reference model, which may be itself."""
        if self.ranks.count == 1:  # FSDP moves layers when it divides them
            self.model.to(self._device)
        use_packed_attention(self.model)
        adapters = None
        if lora is not None:
            adapters = Adapters(self.model, seed, dtype, self.objective.needs_reference, **lora)
        apart = self.objective.needs_reference and lora is None
        reference = frozen(self.model, dtype) if apart else self.model
        self._replay = RouterReplay(self.model) if replay else None
        models, self._teacher = [self.model, reference], None
        if teacher:
            models.append(teacher.load(self.model, self.ranks, dtype))
            use_packed_attention(models[-1])
            if self.ranks.count == 1:
                models[-1].to(self._device)
            self._teacher = TeacherScorer(teacher, models[-1], self.ranks, self.vocab_size)
        prepare(models, self.ranks, replace(how, device=self._device, published=dtype))
        return adapters, reference

    @property
    def routing(self) -> Routing | None:
        """What the model's routers choose, where it replays the engine's choice."""
        return self._replay.routing if self._replay else None

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        return self.saving.snapshot(into, done)

    def save(self, folder: str) -> None:
        self.saving.save(folder)

    def save_state(self, folder: Path) -> None:
        self.saving.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self.saving.load_state(folder)

    def load_weights(self, folder: Path) -> None:
        """Load only the weights (and critic) of a checkpoint that any number of ranks wrote."""
        self.saving.load_weights(folder)

    def train(self, batch: Batch) -> dict[str, Any]:
        """One train step on a batch, or this rank's share of it. Returns the whole batch's metrics: those of
        `batch_metrics`, and the step's effect on the model.

        Means are over trained tokens of all minibatches. The loss's own observations are under `loss/`. `kl/k1`,
        `kl/k3`, `ess` and `ratio/` compare the policy at the start of the step with the behaviour policy; losses that
        ask for neither proximal logprobs nor a plan estimate them from the first minibatch (unless there is a critic,
        whose pass over the batch gives them). `mismatch_kl` and `mismatch_max` compare engine and learner at equal
        weights (`learners.mismatch`). Token metrics also come by staleness (`learners.diagnostics`). `backward_tokens`
        input tokens, a share of `backward_share`, took part in a backward pass. For them the model computed
        `computed_tokens`, since sequences share the tokens of common prefixes (`learners.prefixes`). `skipped_steps`
        counts, over the learner's life, optimizer steps skipped because of a non-finite gradient.
        """
        with self._or_untrainable(batch):
            return self._train(batch)

    def _train(self, batch: Batch) -> dict[str, Any]:
        lr = self.optimizer.current_lr
        batch = without_cut_answers(batch) if self.objective.overlong_filter else batch
        step = self._step = self._in_minibatches(batch)
        more = {"lr": lr, "skipped_steps": self.optimizer.skipped_steps}
        more |= self._replay.metrics(self.ranks) if self._replay else {}
        found = batch_metrics(step.batch) | zero_variance_by_staleness(step.batch) | step.metrics(self.ranks) | more
        return of_demonstrations(found) if self._marks.supervised else found

    def logprobs_of(self, sequences: list[list[int]]) -> tuple[list[list[float]], str]:
        """Logprobs, at temperature 1, of all tokens after the first of some sequences. Also the dtype to whose
        precision they match the published weights (adapters are published merged and rounded). All ranks must call
        this, with the same sequences."""
        columns = Columns(Batch(0, 0, [Group(i, [_whole(tokens)]) for i, tokens in enumerate(sequences)]))
        found = np.zeros(len(columns.sample), np.float32)
        for part, logprobs in self._passes.logprobs(columns, [np.arange(len(sequences))], temperature=1.0):
            found[part.trained.cpu().numpy()] = logprobs.float().cpu().numpy()
        reshard(self.model)  # the next thing is a snapshot of this rank's part
        ends = np.cumsum([len(tokens) - 1 for tokens in sequences])[:-1]
        return [row.tolist() for row in np.split(found, ends)], "bfloat16" if self._rounds else "float32"

    def numbers(self, group_id: int) -> list[dict[str, np.ndarray]]:
        """What the last step computed per token of one of its groups (`Step.numbers`)."""
        return self._step.numbers(group_id) if self._step else []

    def staleness(self) -> list[int]:
        """`Batch.staleness` of the last batch, with the shares of all ranks."""
        return self._step.batch.staleness() if self._step else []

    def _or_untrainable(self, batch: Batch) -> AbstractContextManager[None]:
        self._moved = False
        return or_untrainable(batch, self._fault_of, self.ranks, self._zero_grad, lambda: self._moved)

    def _fault_of(self, batch: Batch) -> str:
        return unknown_tokens(batch, self.vocab_size) or (self.distrust(batch) if self.distrust else "")

    def _apply(self, step: Step) -> None:
        self._moved = True
        step.norms.append(self.optimizer.step())
        if self._critic:
            self._critic.step()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self._critic:
            self._critic.zero_grad()

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
                self._apply(step)
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
        if self._critic:
            self._set_values(step, self._critic)
        elif self._starts_known:
            for part, logprobs in self._passes.logprobs(step.columns, trained):
                step.proximal[part.trained] = logprobs
        if self._teacher:
            self._teacher.score(step, self._passes)
        if self._marks.wants_uniform:
            step.draw(self._seed)
        self._advantages(step)
        return step

    def _advantages(self, step: Step) -> None:
        penalties = self.objective.token_penalties(step.behaviour, step.reference)
        values = None if step.values is None else step.values.double().cpu().numpy()
        behind = None if step.behind is None else step.behind.double().cpu().numpy()
        columns, less = step.columns, self.objective.length_penalties(step.batch)
        turns = turns_of(self.objective.turn_rewards(step.batch), columns.sample, columns.place)
        step.note_penalties(less, penalties)
        rewards = self.objective.rewards(step.batch, less)
        known = penalties, values, turns, behind, *self._teaching(step)
        episodes = Episodes(rewards, step.groups, columns.sample, *known)
        if marked(self._advantage, "per_token"):
            advantages = self._advantage(episodes)
        else:
            advantages = self._advantage(episodes.per_sample(), step.groups)[step.columns.sample]
        step.set_advantages(advantages)
        if step.values is not None:
            step.targets = step.advantages + step.values

    def _teaching(self, step: Step) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`Episodes.teacher` and `.student`."""
        if step.teacher is None:
            return None, None
        student = step.behaviour
        if needs_current(self._advantage):
            student = step.proximal = self.ranks.sum_disjoint(step.proximal, step.own)
        return step.teacher.double().cpu().numpy(), student.double().cpu().numpy()

    @torch.no_grad()
    def _set_values(self, step: Step, critic: Critic) -> None:
        """Values of all tokens and, if the advantage asks for them, of the states after cut samples. The same pass
        gives logprobs of this rank's tokens, which become the step's proximal ones."""
        columns, behind = step.columns, np.zeros(len(step.columns.sample), bool)
        if bootstraps(self._advantage):
            further, behind = one_token_further(step.batch)
            columns = Columns(further, columns.own)
        values, logprobs = step.behaviour.new_zeros(len(behind)), step.behaviour.new_full((len(behind),), torch.nan)
        for part in self._passes.microbatches(columns, np.flatnonzero(columns.lengths)):
            with self._passes.precision():
                logprobs[part.trained], _, hidden = forward_with_states(self.model, part, self._temperature)
            values[part.trained] = critic.values(hidden).to(values.dtype)
        values = self.ranks.sum_disjoint(values, step.on_device(columns.own[columns.sample]))
        of_tokens = step.on_device(~behind)
        step.proximal, step.values = logprobs[of_tokens], values[of_tokens]
        if bootstraps(self._advantage):
            step.behind = values.new_zeros(len(columns.own))
            step.behind[step.on_device(columns.sample[behind])] = values[~of_tokens]

    def _planned(self, step: Step, samples: np.ndarray, at_start: bool) -> Columns:
        """Let the loss weigh all tokens of a minibatch; returns the columns that need a gradient."""
        assert self._marks.plan
        current = torch.full_like(step.behaviour, torch.nan)
        places = step.on_device(step.columns.tokens_of(samples))
        if self._marks.plan.needs_current:
            if at_start and self._starts_known:
                current.copy_(step.proximal)
            else:
                for part, logprobs in self._passes.logprobs(step.columns, [samples]):
                    current[part.trained] = logprobs
            current = self.ranks.sum_disjoint(current, step.own)
            if at_start:
                step.proximal[places] = current[places]
        around = self._marks.wants_proximal
        if around:
            step.proximal = self.ranks.sum_disjoint(step.proximal, step.own)
        minibatch = step.loss_batch(places, current[places], step.sample[places], with_proximal=around)
        minibatch, observed = planned_for(self._loss, minibatch)
        step.plan(places, minibatch.weights, minibatch.factors, observed)
        if self._marks.drops:
            step.leave_out(self.objective.shares)
        columns = step.columns.only(step.has_weight()) if self._marks.plan.skips else step.counted
        skipped = places[step.own[places] & ~torch.isin(places, step.on_device(columns.tokens_of(samples)))]
        step.observe(step.foreseen(skipped), skipped, "loss/")  # of the others when the loss is known
        return columns

    def _accumulate(self, step: Step, samples: np.ndarray, *, at_start: bool) -> float:
        """Put the gradient of one minibatch into the optimizer's buffer; returns its loss."""
        columns = self._planned(step, samples, at_start) if self._marks.plan else step.columns
        denominator = self.objective.denominator(step.counted, samples) or 1.0  # 0: a correction has left nothing
        self._zero_grad()
        loss = self._backward(step, columns, samples, denominator, at_start=at_start)
        return loss

    def _backward(
        self,
        step: Step,
        columns: Columns,
        samples: np.ndarray,
        denominator: float,
        *,
        at_start: bool,
    ) -> float:
        """Add the gradient of some samples to the buffer; returns their loss."""
        step.input_tokens += int(step.columns.lengths[samples].sum())
        losses = list[Tensor]()
        for part in self._passes.microbatches(columns, samples):
            loss = self._forward(step, part, denominator, at_start)
            step.backward_tokens += part.tokens
            step.computed_tokens += part.input_ids.numel() if part.tokens else 0
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.collect()
        total = 0.0
        for value in torch.stack(losses).tolist() if losses else ():  # the only wait for the device
            total += value
        return self.ranks.sum(total)

    def _forward(self, step: Step, part: MicroBatch, denominator: float, at_start: bool) -> Tensor:
        """The loss of one micro-batch."""
        current, entropy, values, candidates = self._outputs(part, step)
        if not len(part.trained):
            return torch.stack([t.sum() for t in (current, entropy, values, candidates) if t is not None]).sum()
        if at_start:
            step.proximal[part.trained] = current.detach()
        batch = step.loss_batch(part.trained, current, part.sequence, self._marks.wants_proximal)
        loss, observed = self._loss(batch, denominator)
        step.observe(merged(step.foreseen(part.trained), observed), part.trained, "loss/")
        step.note({"current": current}, part.trained)
        reference = None if step.reference is None else step.reference[part.trained]
        loss, observed = self.objective.with_terms(loss, current, entropy, reference, batch.share, denominator)
        step.observe(observed, part.trained)
        if self._teacher:
            loss = loss + self._teacher.loss(step, part, current, candidates, denominator)
        if self._critic and values is not None and step.values is not None and step.targets is not None:
            before, targets = step.values[part.trained], step.targets[part.trained]
            error, observed = self._critic.loss(values, before, targets, batch.share, denominator)
            loss = loss + error
            step.observe(observed, part.trained)
        return loss

    def _outputs(self, part: MicroBatch, step: Step) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Logprobs, entropies and values (with a critic) [N] of a micro-batch's trained tokens, and logprobs [N, k] of
        the teacher's most likely tokens (with `top`), with their graph."""
        candidates = None
        with self._passes.precision():
            if step.top is not None and len(part.trained):
                ids = step.top[0][part.trained]
                current, entropy, hidden, candidates = forward_candidates(self.model, part, self._temperature, ids)
            elif not self._critic:
                return *forward_logprobs(self.model, part, self._temperature), None, None
            else:
                current, entropy, hidden = forward_with_states(self.model, part, self._temperature)
        return current, entropy, self._critic.values(hidden) if self._critic else None, candidates


def _whole(tokens: list[int]) -> Sample:
    """A sample in which all tokens but the first are trained."""
    n = len(tokens) - 1
    return Sample(np.array(tokens, np.int32), 1, np.zeros(n, np.float32), np.ones(n, bool), [(0, n)], 0.0, "length")


def _check(
    loss: LossFunction,
    advantage: Advantage,
    temperature: float,
    minibatches: int,
    epochs: int,
    critic_lr: float,
    critic_clip: float | None,
) -> None:
    """Raise ValueError for knobs that make no sense, alone or together."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive for training, got {temperature}")
    if minibatches < 1 or epochs < 1:
        raise ValueError("num_minibatches and num_minibatch_epochs must be positive")
    if marks_of(loss).single_pass and epochs > 1:
        raise ValueError("this loss diverges when a batch is gone through again: num_minibatch_epochs must be 1")
    if marked(advantage, "needs_values") and not critic_lr:
        raise ValueError("this advantage needs a critic: set learner.critic_lr above 0")
    if critic_clip is not None and not critic_lr:
        raise ValueError("critic_clip needs a critic: set learner.critic_lr above 0")
