"""The KV cache of the embedded engine, and the attention that reads and writes it.

Keys and values are in two tensors `[layer, slot, head, time, dim]`: slot i holds one running sequence from time 0 on. A
model's own forward is switched to `slot_attention` (registered with transformers' attention interface), so each
architecture that transformers can run with full attention runs here unchanged.

Driven by `torch_engine`: `reserve`, then a `begin_...` sets the slots of the next forward, which calls `attend` once
per layer. No value in the tensors is NaN (a masked position has weight 0, and 0 · NaN is NaN): zeros, not empty memory.
"""

import logging
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig

from actors.engines import ragged_attention, slot_kernel

log = logging.getLogger(__name__)
GIB = 1 << 30
SHARE = 0.25
"""Of a GPU's memory, for keys and values, where no budget is stated."""
ATTENTION = "slot_cache"
"""The name to give to `model.set_attn_implementation`."""


class SlotCache:
    """Keys and values of up to `slots` sequences, slots 0..n-1. Both dimensions double when they get too short, but
    hold no more than `most` tokens in all, room that is not used included (None: no bound), as long as what is reserved
    fits. `batch_invariant`: what a slot gets in a decode step does not depend on the others, to the last bit."""

    def __init__(
        self,
        config: PretrainedConfig,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        most: int | None = None,
        *,
        batch_invariant: bool = False,
    ):
        self._slots, self._most, self.batch_invariant = slots, most, batch_invariant
        self.heads, self.dim, self.dtype = *kv_shape(config), dtype
        self._empty = torch.zeros(config.num_hidden_layers, 0, self.heads, 0, self.dim, device=device, dtype=dtype)
        self.clear()

    def clear(self) -> None:
        """Forget every sequence and give the memory back."""
        self.keys = self.values = self._empty
        self._prefill: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._behind: tuple[torch.Tensor, torch.Tensor] | None = None
        self._mask: torch.Tensor | None = None
        self._used: slot_kernel.Used | None = None  # where the GPU's kernel attends
        self._ragged: ragged_attention.Ragged | None = None

    @property
    def rows(self) -> int:
        """Slots that there is room for now."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Longest sequence that fits now."""
        return self.keys.shape[3]

    def reserve(self, rows: int, time: int) -> None:
        """Make room for sequences of up to `time` tokens in slots 0..rows-1; what is in others may be lost."""
        if rows <= self.rows and time <= self.capacity:
            return
        new_rows = self.rows if rows <= self.rows else min(self._slots, max(rows, 2 * self.rows))
        new_time = self.capacity if time <= self.capacity else max(time, 2 * self.capacity, 16)
        if self._most is not None and new_rows * new_time > self._most:
            new_rows, new_time = rows, max(time, self._most // rows)
        shape = (self.keys.shape[0], new_rows, self.heads, new_time, self.dim)
        self.keys, self.values = (_moved(each, each.new_zeros(shape)) for each in (self.keys, self.values))

    def move(self, source: int, target: int, time: int) -> None:
        for each in (self.keys, self.values):
            each[:, target, :, :time] = each[:, source, :, :time]

    def begin_prefill(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """The next forward is over right-padded prompts [b, t]; `slots[i]` gets the keys and values of `rows[i]`, int64
        [slots], which count up from 0, with repeats where several slots share a row. Padding needs no mask:
        attention is causal, and what it leaves in the cache is masked until it is overwritten."""
        shared, device = int(rows[-1]) + 1 < len(rows), self.keys.device
        self._behind = None
        self._prefill = (torch.from_numpy(slots).to(device), torch.from_numpy(rows).to(device) if shared else None)

    def begin_prefill_behind(self, slots: np.ndarray, places: np.ndarray) -> None:
        """The next forward is over right-padded tokens [b, t] at positions `places` int64 [b, t] of `slots` int64 [b],
        behind what these have there already. Positions of padding must lie in the cache, behind the sequence."""
        device = self.keys.device
        at = torch.from_numpy(places).to(device)
        end = int(places.max()) + 1
        self._prefill = (torch.from_numpy(slots).to(device), None)
        self._behind = (at, (torch.arange(end, device=device) <= at[:, :, None])[:, None])

    def begin_decode(self, lengths: np.ndarray) -> None:
        """The next forward is over one token [n, 1] of each slot 0..n-1: the last of `lengths` int64 [n] tokens."""
        time = int(lengths.max())
        here = torch.from_numpy(lengths).to(self.keys.device)
        self._place(here, time)
        self._ragged = ragged_attention.begin(self.keys, lengths, self.batch_invariant)
        if self._ragged is None and int(lengths.min()) < time:
            self._hide(here, time)

    def begin_static_decode(self, lengths: torch.Tensor, time: int) -> None:
        """`begin_decode` for `lengths` int64 [n] that only the device knows, none of them above `time`: the shapes of
        all that follows depend on n and `time` alone."""
        self._place(lengths, time)
        if slot_kernel.takes(self.keys):
            self._used = slot_kernel.used(lengths, self.keys)
        else:
            self._hide(lengths, time)

    def _place(self, lengths: torch.Tensor, time: int) -> None:
        """Each slot's last token goes behind those before it."""
        self._prefill = self._used = self._mask = self._ragged = None
        n = len(lengths)
        heads = torch.arange(n * self.heads, device=lengths.device).view(n, self.heads) * self.capacity
        self._cells = (heads + (lengths[:, None] - 1)).view(-1)
        self._shape = (n, time)

    def _hide(self, lengths: torch.Tensor, time: int) -> None:
        hidden = torch.arange(time, device=lengths.device) >= lengths[:, None]
        mask = torch.zeros(len(lengths), time, dtype=self.dtype, device=lengths.device)
        self._mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write key and value [b, kv_heads, t, dim], attend with query [b, heads, t, dim] → the same shape, in the
        cache's dtype."""
        query, key, value = query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)
        if self._prefill is not None:
            return self._attend_prefill(layer, query, key, value, scale)
        keys, values, cells = self.cells(layer)
        keys.index_copy_(0, cells, key.reshape(-1, self.dim))
        values.index_copy_(0, cells, value.reshape(-1, self.dim))
        return self.read(layer, query, scale)

    @property
    def decoding(self) -> bool:
        return self._prefill is None

    def cells(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's keys and values, [places, dim], and where those of a decode step go, int64 [n · kv_heads]."""
        return self.keys[layer].view(-1, self.dim), self.values[layer].view(-1, self.dim), self._cells

    def read(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """`attend` in a decode step whose keys and values are written."""
        n, time = self._shape
        keys, values = self.keys[layer], self.values[layer]
        if self._used is not None:
            return slot_kernel.attend(query, keys, values, self._used, scale)
        # The query heads that share a key head become rows of one product (grouped-query attention).
        packed = query.reshape(n, self.heads, -1, self.dim)
        if self._ragged is not None:
            return self._ragged(packed, keys, values, scale).view(query.shape)
        out = F.scaled_dot_product_attention(
            packed, keys[:n, :, :time], values[:n, :, :time], attn_mask=self._mask, scale=scale
        )
        return out.reshape(query.shape)

    def _attend_prefill(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float):
        assert self._prefill is not None
        slots, rows = self._prefill
        grouped = query.shape[1] != key.shape[1]
        if self._behind is not None:
            places, mask = self._behind
            for each, new in ((self.keys, key), (self.values, value)):
                each[layer].transpose(1, 2)[slots[:, None], places] = new.transpose(1, 2)
            keys, values = (each[layer][slots, :, : mask.shape[-1]] for each in (self.keys, self.values))
            if grouped and query.is_cuda:  # the kernel for masks wants a key head per query head
                keys, values = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (keys, values))
                grouped = False
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
        time = key.shape[2]
        self.keys[layer][slots, :, :time] = key if rows is None else key[rows]
        self.values[layer][slots, :, :time] = value if rows is None else value[rows]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


class PooledCache(SlotCache):
    """The same in memory for `most` tokens that is taken once: CUDA graphs need its address. The tokens are dealt out
    anew to fewer slots for longer sequences. A slot's room has few possible sizes, since each needs graphs of its own:
    powers of two and, where memory is short, quarters between them."""

    LEAST = 256
    """Positions of a slot, at first."""

    def __init__(self, config: PretrainedConfig, slots: int, device: torch.device, dtype: torch.dtype, most: int):
        heads, dim = kv_shape(config)
        shape = (2, config.num_hidden_layers, most * heads * dim)
        self._pool = torch.zeros(shape, device=device, dtype=dtype)
        super().__init__(config, slots, device, dtype, most)

    def clear(self) -> None:
        super().clear()
        self._pool.zero_()  # broken weights may have left NaN

    def reserve(self, rows: int, time: int) -> None:
        """See `SlotCache.reserve`. Raises ValueError for more tokens than the pool has."""
        if rows <= self.rows and time <= self.capacity:
            return
        assert self._most is not None
        new_time = self.capacity if time <= self.capacity else max(self.LEAST, 1 << (time - 1).bit_length())
        if rows * new_time > self._most:
            room = self._most // rows
            step = max(1, (1 << (room.bit_length() - 1)) // 4) if room else 1
            new_time = room if room // step * step < time else room // step * step
        if new_time < time:
            raise ValueError(f"{rows} sequences of {time} tokens exceed the cache's {self._most} tokens")
        new_rows = min(self._slots, self._most // new_time)
        shape = (-1, new_rows, self.heads, new_time, self.dim)
        used = self._pool[:, :, : new_rows * self.heads * new_time * self.dim]
        self.keys, self.values = (
            _moved(held, pool.view(shape)) for held, pool in zip((self.keys, self.values), used, strict=True)
        )


def device_of(name: str, model: torch.device) -> torch.device:
    """The device that `engine.device` names: "auto" is a GPU where there is one, else where the model is. Raises
    ValueError for a name that is unknown, or a device that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if model.type == "cpu" and torch.cuda.is_available() else model
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine.device must be auto, cpu, cuda or e.g. cuda:0, not {name!r}")
    seen = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= seen:
        raise ValueError(f"engine.device={name}: torch sees {seen} GPUs here; set engine.device=cpu, or another one")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device  # `set_device` wants a number


def kv_budget(
    device: torch.device, per_token: int, longest: int, slots: int, tokens: int | None, memory: float | None
) -> int | None:
    """Most tokens whose keys and values are held: the least of `tokens` and `memory` GiB at `per_token` bytes, where
    they are given; else on a GPU what the slots need, but no more than `SHARE` of the card (never what happens to be
    free: a learner may share it); else None. Raises ValueError where the budget does not hold a single token."""
    bounds = [] if tokens is None else [tokens]
    if memory is not None:
        bounds.append(int(memory * GIB) // per_token)
    if not bounds and device.type == "cuda":
        bounds = [slots * longest, int(SHARE * torch.cuda.get_device_properties(device).total_memory) // per_token]
    if bounds and min(bounds) < 1:
        raise ValueError(f"engine.memory={memory:g} GiB holds no token: one takes {per_token} bytes; raise it")
    return min(bounds, default=None)


def pooled(config: PretrainedConfig, slots: int, device: torch.device, dtype: torch.dtype, most: int) -> PooledCache:
    """Takes the memory. Raises ValueError where the GPU has no room for it."""
    size = most * bytes_per_token(config, dtype) / GIB
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        cache = PooledCache(config, slots, device, dtype, most)
    except torch.OutOfMemoryError:
        free, total = (each / GIB for each in torch.cuda.mem_get_info(device))
        raise ValueError(
            f"{most} tokens of keys and values need {size:.1f} GiB; {device} has {free:.1f} of {total:.1f} GiB free: "
            "lower engine.memory (GiB) or engine.kv_tokens, or give the learner a GPU of its own"
        ) from None
    log.info("%s: %.2f GiB for keys and values of %d tokens", device, size, most)
    return cache


def kv_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Heads of keys and values, and the width of one."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Of keys and values, over all layers."""
    heads, dim = kv_shape(config)
    return 2 * config.num_hidden_layers * heads * dim * dtype.itemsize


def _moved(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` [layer, slot, head, time, dim] with as much of `held` as fits, zeros behind it; they may share memory."""
    kept, until = min(new.shape[1], held.shape[1]), min(new.shape[3], held.shape[3])
    for old, now in zip(held, new, strict=True):
        saved = old[:kept, :, :until].clone()
        now.zero_()
        now[:kept, :, :until] = saved
    return new


def slot_attention(  # noqa: PLR0913 (transformers sets the signature)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_cache: SlotCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [b, heads, t, dim] in, [b, t, heads, dim] out. Raises ValueError."""
    if softcap is not None or s_aux is not None or (sliding_window or math.inf) < key.shape[2]:
        raise ValueError("the embedded engine runs full attention only: nothing beyond a window, no soft cap or sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_cache.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None


AttentionInterface.register(ATTENTION, slot_attention)
