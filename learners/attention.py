"""Causal attention over packed sequences: one row of tokens, many sequences, no padding outside attention itself.

Linear layers, norms and the output head see `[1, S]` rows without padding. Attention alone is computed per sequence:
sequences of similar length (within a factor of two) form a block `[n, heads, longest, dim]`, padded on the right.
Causality makes padded keys invisible to real queries, so no mask is needed; outputs of padded queries are dropped.
When all sequences have one length the block is a view of the row and nothing is copied. On a GPU and in half precision
a kernel for sequences of any lengths pads nothing at all (`learners.varlen`).

`use_packed_attention(model)` switches a transformers model over; its forward then takes `layout=Layout.of(lengths)`.
transformers builds no mask for an attention function that it does not know by name. The learner drives this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from learners import varlen

NAME = "packed_causal"


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences attended to together: `places` int64 [n · longest] are the row's tokens, 0 where padded;
    `real` int64 [tokens] the entries of `places` that are no padding."""

    longest: int
    places: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where sequences lie in a row of `S` tokens.

    `ends` int32 [n + 1]: where they begin and end, from 0 to S; `longest` of them. `blocks` is empty when all have the
    `equal` length; else `back` int64 [S] puts the tokens of the blocks, one block after the other, into the order of
    the row.
    """

    ends: Tensor
    longest: int
    equal: int
    blocks: tuple[Block, ...]
    back: Tensor | None

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> Layout:
        """The layout of sequences of the given positive lengths (int [n]) that lie one after the other."""
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
        if (lengths == lengths[0]).all():
            return cls(ends, int(lengths[0]), int(lengths[0]), (), None)
        starts = np.cumsum(lengths) - lengths
        blocks, order = [], []
        for members in _similar(lengths):
            longest = int(lengths[members].max())
            inside = np.arange(longest) < lengths[members, None]
            grid = np.where(inside, starts[members, None] + np.arange(longest), 0)
            places, real = grid.reshape(-1), np.flatnonzero(inside)
            order.append(places[real])
            to_device = (torch.from_numpy(a).to(device) for a in (places, real))
            blocks.append(Block(longest, *to_device))
        back = np.argsort(np.concatenate(order))
        return cls(ends, int(lengths.max()), 0, tuple(blocks), torch.from_numpy(back).to(device))


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices, longest first, cut wherever a length falls below half of the longest of its block."""
    order = np.argsort(-lengths, kind="stable")
    blocks, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or 2 * lengths[order[i]] < lengths[order[start]]:
            blocks.append(np.sort(order[start:i]))
            start = i
    return blocks


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, S, D], key and value [1, K, S, D] → [1, S, H, D].

    Raises ValueError for what it does not compute: a mask of the caller's, dropout, soft-capped scores.
    """
    if attention_mask is not None or kwargs.get("dropout") or kwargs.get("softcap") is not None:
        raise ValueError("packed attention knows no attention mask, no dropout and no softcap")
    inputs, window = (query[0], key[0], value[0]), kwargs.get("sliding_window")
    by_blocks = partial(_attend_blocks, inputs, layout, scaling, window)
    if varlen.takes(*inputs):
        output = varlen.attend(inputs, layout.ends, layout.longest, scaling, window)
        if varlen.is_right(output, by_blocks):
            return output[None], None
    return by_blocks()[None], None


def _attend_blocks(inputs: tuple[Tensor, ...], layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    """[H, S, D] over [K, S, D] (twice) → [S, H, D]."""
    if not layout.blocks:
        return _attend(inputs, layout.equal, scaling, window)
    pieces = []
    for block in layout.blocks:
        padded = tuple(x[:, block.places] for x in inputs)
        pieces.append(_attend(padded, block.longest, scaling, window)[block.real])
    return torch.cat(pieces)[layout.back]


def _attend(inputs: tuple[Tensor, ...], length: int, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Causal attention within stretches of `length` tokens: [H, S, D] over [K, S, D] (twice) → [S, H, D]."""
    q, k, v = (x.unflatten(1, (-1, length)).transpose(0, 1) for x in inputs)
    output = _attend_each(q, k, v, scaling, sliding_window)
    return output.transpose(1, 2).flatten(0, 1)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Causal attention of [n, H, L, D] over [n, K, L, D] with H a multiple of K."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if sliding_window is None or sliding_window >= length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    window = (distance >= 0) & (distance < sliding_window)
    return scaled_dot_product_attention(q, k, v, attn_mask=window, scale=scaling, enable_gqa=grouped)


AttentionInterface.register(NAME, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model attend with `packed_attention`; every later forward needs `layout=`."""
    model.set_attn_implementation(NAME)
