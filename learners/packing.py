"""Packing: chooses the sequences of each micro-batch (`pack`, `balanced`), and joins their tokens into one row without
padding.

`Columns` flattens a whole batch once per train step; `Columns.microbatch` then cuts micro-batches out of it by index
arithmetic. Sequences share the tokens of their common prefix (`learners.prefixes`). A sample whose context forks
(`areal_like.types.Sample.forks`) is several sequences, in one micro-batch, since the loss sees one sample. Left out is
what can't affect the loss: the last trained token as an input, and everything after it. Only trained tokens get logits.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_like.types import Batch
from areal_like.weights.transfer import to_device
from learners.prefixes import Forest, cut, is_worth, paths
from learners.router_replay import EngineExperts
from learners.row_layout import RowLayout


def pack(lengths: Sequence[int] | np.ndarray, micro_batch_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `micro_batch_tokens` tokens: lists of indices into `lengths`.

    AReaL (arXiv 2505.24298), Algorithm 1: longest first; a sequence joins the fitting micro-batch that holds the fewest
    sequences, or opens one if it fits into none. A sequence longer than `micro_batch_tokens` gets a micro-batch of its
    own. Ties go to the earlier one, so the result depends on the lengths alone.
    """
    microbatches: list[list[int]] = []
    totals: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = int(lengths[index])
        fitting = [m for m, total in enumerate(totals) if total + length <= micro_batch_tokens]
        if not fitting:
            microbatches.append([index])
            totals.append(length)
        else:
            chosen = min(fitting, key=lambda m: len(microbatches[m]))
            microbatches[chosen].append(index)
            totals[chosen] += length
    return microbatches


def balanced(lengths: Sequence[int] | np.ndarray, micro_batch_tokens: int) -> list[list[int]]:
    """As `pack`, with nearly as many tokens in each micro-batch: `differenced` into as few as keep the limit; the
    result of `pack` where that would take more, as for a sequence above the limit."""
    packed, sizes = pack(lengths, micro_batch_tokens), [int(length) for length in lengths]
    for count in range(max(1, -(-sum(sizes) // micro_batch_tokens)), len(packed) + 1):
        parts = differenced(sizes, count)
        if max(sum(sizes[index] for index in part) for part in parts) <= micro_batch_tokens:
            return parts
    return packed


def differenced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices into `sizes` in `count` parts of nearly equal sums, by the largest differencing method (Karmarkar and
    Karp, 1982; for several parts Korf, IJCAI 2009), as in AReaL's `kk_allocate`: of all partial solutions the two whose
    parts differ most are joined, the largest part of one with the smallest of the other."""
    empty: list[tuple[int, list[int]]] = [(0, [])] * (count - 1)
    heap = [(-size, index, [*empty, (size, [index])]) for index, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted((size + more, part + others) for (size, part), (more, others) in pairs)
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], first, joined))
    return [part for _, part in heap[0][2] if part]


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`[starts[0], …, starts[0] + counts[0] − 1, starts[1], …]`: int64 [Σ counts]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


@dataclass(slots=True)
class MicroBatch:
    """One row of packed sequences: `S` input tokens of `n` sequences, shared ones once, `N` trained tokens.

    `input_ids`, `position_ids` int64 [1, S], positions counted within each sequence; `outputs` int64 [N]: places in the
    row whose logits predict the tokens `targets` int64 [N]; `trained` int64 [N] are the places of those tokens in the
    batch's columns; `sequence` int64 [N]. `tokens` counts shared input tokens once per sequence. `experts` int16 [S,
    layers, k] are the engine's (`learners.router_replay`); None: none is known.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: RowLayout
    outputs: Tensor
    targets: Tensor
    trained: Tensor
    sequence: Tensor
    tokens: int = 0
    experts: Tensor | None = None


def empty_microbatch(device: torch.device) -> MicroBatch:
    """One input token, none trained: for a rank that has fewer micro-batches than others."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    none = token[0, :0]
    return MicroBatch(token, token, RowLayout.of(np.ones(1, np.int64), device), none, none, none, none)


class Columns:
    """A batch of n samples, which are m sequences (n where none forks), as flat arrays. Per sample [n]: `lengths` input
    tokens (0 where no token is trained), `trained_counts`, and `own` bool: is it this rank's to compute. Per trained
    token [N]: `sample`, `place` in the response, `behaviour` float32, `version`, and `in_flight` bool: another version
    sampled the first token of its response."""

    def __init__(self, batch: Batch, own: np.ndarray | None = None):
        samples = batch.samples
        self.own = np.ones(len(samples), bool) if own is None else own
        prompts = np.array([s.prompt_length for s in samples], np.int64)
        responses = np.array([s.response_length for s in samples], np.int64)
        self._tokens = np.concatenate([s.tokens for s in samples]).astype(np.int64)
        first = np.cumsum(prompts + responses) - (prompts + responses)
        self._counts = np.array([1 + len(s.forks) for s in samples], np.int64)  # sequences of each sample
        self._firsts = np.cumsum(self._counts) - self._counts
        begins = np.array([begin for s in samples for begin, _ in s.contexts], np.int64)
        self._starts = np.repeat(first, self._counts) + begins  # of each sequence
        self._experts = EngineExperts.of(samples)
        trained = np.concatenate([s.loss_mask for s in samples]).astype(bool)
        place = ranges(prompts, responses)[trained]
        owner = np.repeat(np.arange(len(samples)), responses)
        self.sample = owner[trained]
        self.place = place - prompts[self.sample]
        self.behaviour = np.concatenate([s.logprobs for s in samples]).astype(np.float32)[trained]
        runs = np.array([run for s in samples for run in s.runs], np.int64).reshape(-1, 2)
        self.version = np.repeat(runs[:, 0], runs[:, 1])[trained]
        self.in_flight = self.version != np.array([s.runs[0][0] for s in samples])[self.sample]
        at = first[self.sample] + place
        self._sequence = np.searchsorted(self._starts, at, side="right") - 1
        self._outputs = at - self._starts[self._sequence] - 1  # places in their sequences
        if len(at) and self._outputs.min() < 0:
            raise ValueError("the first token of a new context is trained: nothing predicts it")
        self._targets = self._tokens[at]
        self._places = np.arange(len(place))
        self._group = np.repeat(np.arange(len(batch.groups)), [len(group.samples) for group in batch.groups])
        self._count()

    def only(self, kept: np.ndarray) -> Columns:
        """The same samples with a part of their trained tokens (bool [N]). The other tokens get no logits, and tokens
        after a sample's last kept token are not inputs either. `MicroBatch.trained` still counts from the whole
        batch."""
        part = copy.copy(self)
        part.sample, part.place = self.sample[kept], self.place[kept]
        part.behaviour, part.version = self.behaviour[kept], self.version[kept]
        part.in_flight = self.in_flight[kept]
        part._outputs, part._targets, part._places = self._outputs[kept], self._targets[kept], self._places[kept]
        part._sequence = self._sequence[kept]
        part._count()
        return part

    def _count(self) -> None:
        samples = len(self._counts)
        self._lengths = np.zeros(len(self._starts), np.int64)  # of the sequences
        np.maximum.at(self._lengths, self._sequence, self._outputs + 1)
        self.lengths = np.add.reduceat(self._lengths, self._firsts)
        self._trained_each = np.bincount(self._sequence, minlength=len(self._starts))  # tokens of each sequence
        self.trained_counts = np.bincount(self.sample, minlength=samples)
        self._trained_starts = np.cumsum(self.trained_counts) - self.trained_counts
        self._forest: Forest | None = None

    def tokens_of(self, samples: np.ndarray) -> np.ndarray:
        """Places of the trained tokens of the given samples (int64), sample by sample."""
        return self._places[ranges(self._trained_starts[samples], self.trained_counts[samples])]

    def trained_tokens(self, samples: np.ndarray) -> int:
        return int(self.trained_counts[samples].sum())

    @property
    def forest(self) -> Forest:
        """The sequences' input tokens as a tree. Equal tokens with other experts of the engine are not shared."""
        if self._forest is None:
            labels = self._experts.labels(self._tokens) if self._experts else self._tokens
            self._forest = Forest.of(labels, self._starts, self._lengths)
        return self._forest

    def cuts(self, samples: np.ndarray, micro_batch_tokens: int, even: bool = False) -> list[np.ndarray]:
        """The given samples (int [n], each with a trained token) in micro-batches of at most `micro_batch_tokens`
        tokens (`pack`; if `even`, `balanced`): groups, whose shared tokens count once, or parts of a larger one."""
        choose = balanced if even else pack
        families: list[np.ndarray] = []
        costs: list[int] = []
        for group in np.unique(self._group[samples]):
            members = samples[self._group[samples] == group]
            first = self._sequence[self._trained_starts[members]]  # with a trained token: they share most there
            order, shared = self.forest.among(first)
            members = members[order]
            lengths = self._unshared(members)
            for run in cut(lengths.tolist(), shared.tolist(), micro_batch_tokens):
                families.append(members[run])
                costs.append(int(lengths[run].sum() - shared[run[1:]].sum()))
        return [np.concatenate([families[i] for i in part]) for part in choose(costs, micro_batch_tokens)]

    def _sequences(self, samples: np.ndarray) -> np.ndarray:
        """All those of the given samples that have a trained token, sample by sample."""
        found = ranges(self._firsts[samples], self._counts[samples])
        return found[self._lengths[found] > 0]

    def _unshared(self, samples: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64 [n]. Tokens shared by its own sequences count once."""
        lengths = self.lengths[samples]
        for place in np.flatnonzero(self._counts[samples] > 1):
            _, shared = self.forest.among(self._sequences(samples[place : place + 1]))
            lengths[place] -= shared.sum()
        return lengths

    def microbatch(self, samples: np.ndarray, device: torch.device, micro_batch_tokens: float = math.inf) -> MicroBatch:
        """A row of the given samples (int [n], each with a trained token), of `micro_batch_tokens` if they fit.
        With shared prefixes it needs no more memory than a plain row of that many tokens."""
        sequences, counts = self._sequences(samples), self.trained_counts[samples]
        lengths, trained = self._lengths[sequences], ranges(self._trained_starts[samples], counts)
        order, shared = self.forest.among(sequences)
        total = int(lengths.sum())
        if is_worth(total, total - int(shared.sum()), micro_batch_tokens):
            ordered = lengths[order]
            added, found, first = ordered - shared, paths(ordered, shared), np.empty_like(lengths)
            first[order] = np.cumsum(ordered) - ordered
            rows, depths = ranges(self._starts[sequences[order]] + shared, added), ranges(shared, added)
            layout = RowLayout.tree(found, added, device, lean=total > micro_batch_tokens)
            places = np.concatenate(found)
        else:
            first = np.cumsum(lengths) - lengths
            rows, depths = ranges(self._starts[sequences], lengths), ranges(np.zeros_like(lengths), lengths)
            places, layout = np.arange(len(rows)), RowLayout.of(lengths, device)
        arrays = (
            self._tokens[rows][None],
            depths[None],
            places[self._outputs[trained] + np.repeat(first, self._trained_each[sequences])],
            self._targets[trained],
            self._places[trained],
            np.repeat(np.arange(len(samples)), counts),
        )
        input_ids, position_ids, outputs, targets, where, sequence = (to_device(a, device) for a in arrays)
        experts = to_device(self._experts.at(rows), device) if self._experts else None
        return MicroBatch(input_ids, position_ids, layout, outputs, targets, where, sequence, total, experts)


def cut_groups(batch: Batch, columns: Columns, order: np.ndarray, count: int) -> list[np.ndarray]:
    """Sample indices per minibatch: groups in this order, cut evenly into `count` or as many as there are groups,
    without samples that have no trained token."""
    sizes = np.array([len(group.samples) for group in batch.groups])
    firsts = np.cumsum(sizes) - sizes
    minibatches = []
    for groups in np.array_split(order, min(count, len(order))):
        samples = np.concatenate([np.arange(firsts[g], firsts[g] + sizes[g]) for g in groups])
        samples = samples[columns.lengths[samples] > 0]
        if len(samples):
            minibatches.append(samples)
    return minibatches
