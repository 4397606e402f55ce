"""Causal attention over packed sequences: one row of tokens, many sequences, no padding outside attention itself.

Attention alone is computed per sequence: sequences of similar length (within a factor of two) form a block `[n, heads,
longest, dim]`, padded on the right. Causality makes padded keys invisible to real queries, so no mask is needed;
outputs of padded queries are dropped. When all sequences have one length the block is a view of the row. On a GPU in
half precision, a kernel for sequences of any lengths needs no padding at all (`learners.varlen`).

Where prefixes are shared (`RowLayout.tree`), the queries of a sequence are the tokens that it adds to the row, its keys
all tokens of its path, shared prefix included. A block then has a mask for its short queries over long keys. If a
sequence adds more than half of its path, the whole path becomes queries, and repeated outputs are dropped. A block
copies the keys and values of its paths. Where all paths have more tokens than a micro-batch may (`RowLayout.lean`),
such copies live for one block of one layer only, and the backward pass makes them again.

`use_packed_attention(model)` sets this attention in a transformers model; its forward then takes `layout=`.
transformers builds no mask for an attention function with an unknown name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from learners import varlen
from learners.row_layout import AttentionBlock, RowLayout

NAME = "packed_causal"
PLAIN_UP_TO = 1 << 15
"""Up to this many queries × keys, attention in half precision on a CPU is faster without torch's fused kernel, whose
backward pass is slow there. Scores also keep all their digits."""
UNKNOWN = ("softcap", "s_aux")
LONG_MASK = 1024
"""With more queries, the backward pass makes a block's mask again: it has one number per query and key, in each layer.
"""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    layout: RowLayout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, S, D], key and value [1, K, S, D] → [1, S, H, D].

    Raises ValueError for a mask of the caller's, dropout, soft-capped scores, sinks.
    """
    if attention_mask is not None or kwargs.get("dropout") or any(kwargs.get(key) is not None for key in UNKNOWN):
        raise ValueError("packed attention knows no attention mask, no dropout, no softcap and no sinks")
    inputs, window = (query[0], key[0], value[0]), kwargs.get("sliding_window")
    half = _half(query, value)
    if varlen.takes(query.device, query.shape[-1], half):
        # Under autocast queries and keys come in float32: their rotary angles are.
        q, k, v = (x.to(half) for x in inputs)
        # A compiled layer is the same for both, and must not be compiled again where `lean` changes.
        attend = varlen.attend if torch.compiler.is_compiling() or not layout.lean else _lean(varlen.attend)
        return attend((q, k, v), layout, scaling, window)[None], None
    return _attend_blocks(inputs, layout, scaling, window)[None], None


@torch.compiler.disable  # a graph would hold for one number of blocks only
def _attend_blocks(inputs: tuple[Tensor, ...], layout: RowLayout, scaling: float | None, window: int | None) -> Tensor:
    """[H, S, D] over [K, S, D] (twice) → [S, H, D]."""
    if layout.back is None:
        q, k, v = (x.unflatten(1, (-1, layout.equal)).transpose(0, 1) for x in inputs)
        return _attend(q, k, v, None, scaling, window).transpose(1, 2).flatten(0, 1)
    pieces = []
    for block in layout.blocks:
        attend = (
            _lean(_attend_block)
            if layout.lean or (block.depth is not None and block.queries > LONG_MASK)
            else _attend_block
        )
        pieces.append(attend(inputs, block, scaling, window))
    return torch.cat(pieces).index_select(0, layout.back)


def _lean(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps only the inputs of `attend` for the backward pass; not in compiled layers, where torch can't trace it."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return attend
    return partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)


def _attend_block(
    inputs: tuple[Tensor, ...], block: AttentionBlock, scaling: float | None, window: int | None
) -> Tensor:
    """[H, S, D] over [K, S, D] (twice) → [kept results, H, D]."""
    q = inputs[0].index_select(1, block.asking).unflatten(1, (-1, block.queries)).transpose(0, 1)
    k, v = (x.index_select(1, block.asked).unflatten(1, (-1, block.keys)).transpose(0, 1) for x in inputs[1:])
    output = _attend(q, k, v, block.mask(), scaling, window).transpose(1, 2).flatten(0, 1)
    return output.index_select(0, block.real)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attention of [n, H, Q, D] over [n, K, L, D] with H a multiple of K; causal where there is no mask."""
    length = k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if sliding_window is not None and sliding_window < length:
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        depth = mask.sum(-1, keepdim=True) - 1  # of each query: it sees itself and all before
        mask = mask & (depth - torch.arange(length, device=q.device) < sliding_window)
    half = _half(q, v)
    if half and q.is_cpu and q.shape[2] * length <= PLAIN_UP_TO:
        with torch.autocast("cpu", enabled=False):
            return attend_plainly(q, k, v, mask, scaling, half)
    q, k, v = (x.to(half or x.dtype) for x in (q, k, v))  # rotary angles are float32
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _half(query: Tensor, value: Tensor) -> torch.dtype | None:
    """The half precision for attention's products; None: float32 or wider."""
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(query.device.type)
    return value.dtype if value.dtype in (torch.bfloat16, torch.float16) else None


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dtype: torch.dtype
) -> Tensor:
    """As `_attend`, with all scores in memory: scores in float32 or wider, values and their weights in `dtype`."""
    n, heads, queries, width = q.shape
    keys, length = k.shape[1:3]
    wide = torch.promote_types(dtype, torch.float32)
    q = (q.to(wide) * (width**-0.5 if scaling is None else scaling)).reshape(n * keys, -1, width)
    k, v = k.to(wide).reshape(n * keys, length, -1), v.to(dtype).reshape(n * keys, length, -1)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = torch.bmm(q, k.transpose(1, 2)).view(n, heads, queries, length)
    shares = scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(dtype)
    return torch.bmm(shares.view(n * keys, -1, length), v).view(n, heads, queries, -1)


AttentionInterface.register(NAME, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model attend with `packed_attention`; every later forward needs `layout=`."""
    model.set_attn_implementation(NAME)
