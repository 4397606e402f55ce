"""Attention of a decode step on the CPU that reads each slot only as far as its sequence goes.

torch's attention reads a rectangle, all slots to the longest one, with a mask: mostly padding where lengths lie far
apart. Steps that are large enough to pay for loading numba take compiled kernels (`ragged_kernels`), and so do all
`batch_invariant` ones: what a slot gets from a kernel does not depend on the others.
"""

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch

log = logging.getLogger(__name__)
COMPILED_FROM = 1 << 18
"""Numbers of keys in a layer's rectangle. Below, torch's attention takes 0.2 ms or less."""
SHARED_FROM = 1 << 20
"""Products of queries and keys in a layer from which on several threads share them: some 0.2 ms of one."""


class Ragged:
    """One decode step: `lengths` int64 [n] of the slots 0..n-1. Call it for each layer."""

    def __init__(self, kernels: ModuleType, lengths: np.ndarray):
        self._kernels, self._lengths = kernels, lengths

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query [n, kv_heads, group, dim] over keys and values [slots, kv_heads, time, dim] → like the query."""
        out = np.empty(query.shape, np.float32)
        given = query.float().contiguous().numpy(), _numbers(keys), _numbers(values)
        attend = partial(
            self._kernels.kernel(keys.shape[3], str(keys.dtype)), *given, self._lengths, np.float32(scale), out
        )
        parts = list(pairwise(_cuts(self._lengths, query[0].numel())))
        others = [_pool(torch.get_num_threads()).submit(attend, first, end) for first, end in parts[1:]]
        attend(*parts[0])
        for each in others:
            each.result()
        return torch.from_numpy(out).to(query.dtype)


def prepare(keys: torch.Tensor, slots: int, time: int, batch_invariant: bool = False) -> None:
    """Load and compile what steps over so many slots and positions of a cache [layer, slot, head, time, dim] need: one
    or two seconds of a process, and 150 MB; some seconds more on a new machine."""
    if batch_invariant or _pays(keys, slots, time):
        _compile(keys.shape[4], keys.dtype)


def begin(keys: torch.Tensor, lengths: np.ndarray, batch_invariant: bool = False) -> Ragged | None:
    """For a step over the slots 0..n-1 of a cache; None: torch's attention is to be used."""
    if not (batch_invariant or _pays(keys, len(lengths), int(lengths.max()))):
        return None
    return Ragged(kernels(), np.ascontiguousarray(lengths, np.int64))


def _pays(keys: torch.Tensor, slots: int, time: int) -> bool:
    if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.bfloat16):
        return False
    return slots * time * keys.shape[2] * keys.shape[4] >= COMPILED_FROM


@cache
def _compile(dim: int, dtype: torch.dtype) -> None:
    log.info("attention to keys of %d numbers: compiled now, unless an earlier run has", dim)
    one = torch.zeros(1, 1, 1, dim, dtype=dtype)
    try:
        Ragged(kernels(), np.ones(1, np.int64))(one, one, one, 1.0)
    except OSError as error:  # it works in this process all the same
        log.warning("compiled attention was not kept for later runs (%s)", error)


def _numbers(cache: torch.Tensor) -> np.ndarray:
    """As the kernels take them: float32, or the bits of bfloat16."""
    return (cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache).numpy()


def _cuts(lengths: np.ndarray, per_token: int) -> list[int]:
    """[0, ..., n]: where threads' parts of the slots begin and end, about equal in tokens."""
    threads = torch.get_num_threads()
    total = int(lengths.sum())
    if threads == 1 or total * per_token < SHARED_FROM:
        return [0, len(lengths)]
    ends = np.searchsorted(np.cumsum(lengths), np.arange(1, threads) * total / threads) + 1
    return [0, *sorted(set(ends.tolist()) - {len(lengths)}), len(lengths)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "attention")


@cache
def kernels() -> ModuleType:
    return importlib.import_module("actors.engines.ragged_kernels")
