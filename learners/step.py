"""One train step in progress: a batch on the device, the numbers of its tokens, and its metrics. The learner makes one
per batch and fills it in. It gives losses their `LossBatch` for any of the batch's trained tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_like.types import Batch
from areal_like.weights.transfer import to_device
from learners.collectives import Ranks
from learners.diagnostics import TokenTally, drift, mismatch
from learners.losses.contract import LossBatch, Observed, log_ratio
from learners.packing import Columns


class Step:
    """A batch of n samples with N trained tokens, whole on every rank; `own` bool [N] are those of the samples that
    this rank computes. `proximal` [N] is each trained token's logprob before the first update (NaN where it is not
    needed); `reference`, `teacher` (logprobs), `share` and `weights`, [N], are None where the step has no
    use for them. `penalties`, by name, were subtracted from the reward at each trained token. `losses` and `norms` have
    one entry per optimizer step, and so has `scales`, of the learning rate, where it is scaled."""

    def __init__(self, batch: Batch, own: np.ndarray, device: torch.device, dtype: torch.dtype, share: Any):
        self.batch, self.device = batch, device
        self.columns = columns = Columns(batch, own)
        self.groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
        self.behaviour = self.on_device(columns.behaviour).to(dtype)
        self.staleness = self.on_device(batch.version - columns.version)
        self.in_flight = self.on_device(columns.in_flight)
        self.sample = self.on_device(columns.sample)
        self.own = self.on_device(own[columns.sample])
        self.group = self.on_device(self.groups[columns.sample])
        known = share(columns)
        self.share = None if known is None else self.on_device(known).to(self.behaviour.dtype)
        self.proximal = torch.full_like(self.behaviour, torch.nan)
        self.advantages = torch.zeros_like(self.behaviour)
        self.reference: Tensor | None = None
        self.teacher: Tensor | None = None
        self.weights: Tensor | None = None
        self._foreseen: Observed = {}
        self.tally = TokenTally()
        self._observed: dict[str, list[tuple[Tensor, Tensor]]] = {}  # name → (places, values) of this rank's tokens
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.input_tokens = self.backward_tokens = self.computed_tokens = 0
        self.penalties: dict[str, np.ndarray] = {}

    def on_device(self, array: np.ndarray | None) -> Any:
        return None if array is None else to_device(array, self.device)

    def note_penalties(self, less: np.ndarray, by_token: np.ndarray) -> None:
        """For `numbers`: `less` [n] is subtracted from the samples' rewards, `by_token` [N] from the tokens' rewards. A
        whole sample's part stands at its last trained token."""
        if less.any():
            last = np.flatnonzero(np.diff(self.columns.sample, append=-1))
            taken = self.penalties["penalty/length"] = np.full(len(by_token), np.nan)
            taken[last] = less[self.columns.sample[last]]
        if by_token.any():
            self.penalties["penalty/kl"] = by_token

    def plan(self, places: Tensor, weights: Tensor, observed: Observed) -> None:
        """Store a plan's weights and observations for the tokens at `places` int64 [M]: [M] each."""
        self._foreseen = {
            name: values.new_zeros(len(self.behaviour)).index_copy(0, places, values)
            for name, values in observed.items()
        }
        self.weights = torch.zeros_like(self.behaviour).index_copy(0, places, weights)

    def foreseen(self, places: Tensor) -> Observed:
        """The observations of the minibatch's plan for the tokens at `places` int64 [M]."""
        return {name: values[places] for name, values in self._foreseen.items()}

    def loss_batch(self, places: Tensor, current: Tensor, sequence: Tensor, with_proximal: bool) -> LossBatch:
        def at(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[places]

        return LossBatch(
            current=current,
            behaviour=self.behaviour[places],
            proximal=self.proximal[places] if with_proximal else None,
            advantages=self.advantages[places],
            mask=torch.ones_like(current, dtype=torch.bool),
            sequence=sequence,
            staleness=self.staleness[places],
            share=at(self.share),
            group=self.group[places],
            weights=at(self.weights),
            sequences=len(self.columns.lengths),
        )

    def observe(self, observed: dict[str, Tensor], places: Tensor, prefix: str = "") -> None:
        """Keep one number per token at `places` for the metrics, and for `numbers`."""
        self.tally.add(observed, self.staleness[places], prefix)
        self.note(observed, places, prefix)

    def note(self, known: Mapping[str, Tensor], places: Tensor, prefix: str = "") -> None:
        """Keep one number per token at `places` for `numbers` alone."""
        for name, values in known.items():
            self._observed.setdefault(prefix + name, []).append((places, values.detach()))

    def log_weights(self, samples: np.ndarray, parts: int, ranks: Ranks) -> np.ndarray:
        """log current/behaviour of the trained ones of these samples, from their `parts` newest micro-batches here."""
        sums = np.zeros(len(self.columns.lengths))
        for places, current in self._observed["current"][-parts:] if parts else ():
            moved = (current - self.behaviour[places]).double().cpu().numpy()
            sums += np.bincount(self.columns.sample[places.cpu().numpy()], moved, len(sums))
        ranks.sum_tensor(torch.from_numpy(sums))
        return sums[samples[self.columns.lengths[samples] > 0]]

    def numbers(self, group_id: int) -> list[dict[str, np.ndarray]]:
        """All numbers of a group's tokens: for each sample, name → float32 [R]; NaN where a number was not computed."""
        asked = {"reference": self.reference, "teacher": self.teacher}
        known = {"proximal": self.proximal, "advantage": self.advantages}
        known |= {name: values for name, values in asked.items() if values is not None}
        known |= {name: self.on_device(values) for name, values in self.penalties.items()}
        for name, pieces in self._observed.items():
            known[name] = torch.full(self.behaviour.shape, torch.nan, device=self.device)
            for places, values in pieces:
                known[name][places] = values.to(torch.float32)
        samples = np.flatnonzero(self.groups == [group.id for group in self.batch.groups].index(group_id))
        ends = np.cumsum([self.batch.samples[sample].response_length for sample in samples])
        tokens = np.flatnonzero(np.isin(self.columns.sample, samples))
        start = np.concatenate([[0], ends[:-1]])[self.columns.sample[tokens] - samples[0]]
        table = np.full((len(known), ends[-1]), np.nan, np.float32)
        found = torch.stack([values.float() for values in known.values()])[:, self.on_device(tokens)]
        table[:, start + self.columns.place[tokens]] = found.cpu().numpy()
        return [dict(zip(known, rows, strict=True)) for rows in np.split(table, ends[:-1], axis=1)]

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Of all ranks: the loss's own observations under `loss/`, and those of `learners.diagnostics`. Losses that
        need neither proximal logprobs nor a plan estimate `kl/`, `ess` and `ratio/` from the first minibatch.
        `backward_tokens` input tokens, a share of `backward_share`, took part in a backward pass; for them the model
        computed `computed_tokens`, since sequences share common prefixes."""
        self.backward_tokens = sum(ranks.gathered(self.backward_tokens))
        self.computed_tokens = sum(ranks.gathered(self.computed_tokens))
        known = ~self.proximal.isnan()
        moved, own, fresh = log_ratio(self.proximal, self.behaviour, known), known & self.own, self.staleness == 0
        self.tally.add(drift(moved[own]), self.staleness[own])
        fresh &= known
        found = self.tally.metrics(ranks)
        found |= mismatch(moved[fresh].cpu().numpy(), self.in_flight[fresh].cpu().numpy())
        found |= {"lr_scale": float(np.mean(self.scales))} if self.scales else {}
        return found | {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "backward_tokens": self.backward_tokens,
            "computed_tokens": self.computed_tokens,
            "backward_share": self.backward_tokens / max(1, self.input_tokens),
        }
