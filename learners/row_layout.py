"""Positions of packed sequences in a row of tokens, and the blocks in which `learners.attention` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_like.weights.transfer import to_device

BLOCK = 2
"""A block copies at most this many times the keys in the row. Plain sequences never need more."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Sequences attended to together, n of them: `asking` int64 [n · queries] and `asked` int64 [n · keys] are places
    in the row, 0 where padded. `depth` int64 [n, queries] is the last key that each query sees, or None for causal
    attention. `real` int64 are the entries of `asking` whose results are kept."""

    queries: int
    keys: int
    asking: Tensor
    asked: Tensor
    depth: Tensor | None
    real: Tensor

    def mask(self) -> Tensor | None:
        """Which keys each query sees: bool [n, 1, queries, keys]; None: those up to itself."""
        if self.depth is None:
            return None
        return (torch.arange(self.keys, device=self.depth.device) <= self.depth[:, :, None])[:, None]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Positions of sequences in a row of `S` tokens. `ends` int32 [n + 1]: where the tokens that each adds begin and
    end; `longest` of them. `blocks` is empty when all have the `equal` length and share nothing; else `back` int64 [S]
    puts the kept results of the blocks, one block after the other, into the order of the row. `paths` is None where
    nothing is shared; else `path_ends` int32 [n + 1] and `paths` int64 say where the tokens of each sequence lie,
    `longest_path` of them. `lean`: what attention copies is not kept for the backward pass."""

    ends: Tensor
    longest: int
    equal: int
    blocks: tuple[AttentionBlock, ...]
    back: Tensor | None
    paths: Tensor | None = None
    path_ends: Tensor | None = None
    longest_path: int = 0
    lean: bool = False

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> RowLayout:
        """The layout of sequences of the given positive lengths (int [n]) that lie one after the other."""
        ends = _ends(lengths, device)
        if (lengths == lengths[0]).all():
            return cls(ends, int(lengths[0]), int(lengths[0]), (), None)
        starts = np.cumsum(lengths) - lengths
        paths = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return cls(ends, int(lengths.max()), 0, *_blocks(paths, lengths, device))

    @classmethod
    def tree(
        cls, paths: Sequence[np.ndarray], added: np.ndarray, device: torch.device, *, lean: bool = False
    ) -> RowLayout:
        """The layout of sequences that share prefixes: `paths`, per sequence int64 [length], are the places of its
        tokens, of which the last `added` (int64 [n]) are its own and lie one after the other."""
        lengths = np.array([len(path) for path in paths])
        blocks, back = _blocks([path for path, new in zip(paths, added, strict=True) if new], added[added > 0], device)
        where = to_device(np.concatenate(paths), device)
        ends, path_ends = _ends(added, device), _ends(lengths, device)
        return cls(ends, int(added.max()), 0, blocks, back, where, path_ends, int(lengths.max()), lean)


def _ends(lengths: np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


def _blocks(
    paths: Sequence[np.ndarray], added: np.ndarray, device: torch.device
) -> tuple[tuple[AttentionBlock, ...], Tensor]:
    """Blocks of sequences with similar shapes, each with at most `BLOCK` times the row's keys; and the indices that put
    the blocks' results into the order of the row."""
    keys, most = np.array([len(path) for path in paths]), BLOCK * int(added.sum())
    asking = np.where(2 * added > keys, keys, added)
    blocks, order = [], []
    for whole in (True, False):
        numbers = np.flatnonzero((asking == keys) == whole)
        for block in _similar(keys[numbers], most):
            members = numbers[block]
            for some in _similar(asking[members], most) if not whole else [np.arange(len(members))]:
                made, places = _block([paths[i] for i in members[some]], added[members[some]], whole, device)
                blocks.append(made)
                order.append(places)
    back = np.argsort(np.concatenate(order))
    return tuple(blocks), to_device(back, device)


def _block(
    paths: Sequence[np.ndarray], added: np.ndarray, whole: bool, device: torch.device
) -> tuple[AttentionBlock, np.ndarray]:
    """One block, and the row's places of its kept results. `whole`: all tokens of a path ask, else those it adds."""
    keys = np.array([len(path) for path in paths])
    longest = int(keys.max())
    inside = np.arange(longest) < keys[:, None]
    asked = np.zeros(inside.shape, np.int64)
    asked[inside] = np.concatenate(paths)
    common = keys - added
    if whole:
        asking, seen = asked, None
        kept = inside & (np.arange(longest) >= common[:, None])
    else:
        query = np.arange(int(added.max()))
        kept = query < added[:, None]
        depth = np.minimum(common[:, None] + query, longest - 1)
        asking = np.where(kept, np.take_along_axis(asked, depth, 1), 0)
        seen = to_device(depth, device)
    flat, real = asking.reshape(-1), np.flatnonzero(kept)
    queries, keys_at, kept_at = (to_device(a, device) for a in (flat, asked.reshape(-1), real))
    return AttentionBlock(longest if whole else int(added.max()), longest, queries, keys_at, seen, kept_at), flat[real]


def _similar(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Indices, longest first, cut into blocks: wherever a length is below half of its block's longest, or the block
    would hold more than `most`, including padding."""
    order = np.argsort(-lengths, kind="stable")
    blocks, start = [], 0
    for i in range(1, len(order) + 1):
        if i < len(order):
            longest = int(lengths[order[start]])
            if 2 * lengths[order[i]] >= longest and (i - start + 1) * longest <= most:
                continue
        blocks.append(np.sort(order[start:i]))
        start = i
    return blocks
