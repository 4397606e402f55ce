"""A decode step with fixed shapes and no host synchronisation: from tokens, lengths and keys of random streams to the
next tokens and their logprobs. On a GPU it is captured as a CUDA graph and replayed.

The step behind it can begin before the host has these tokens: they stay on the device, and the host has the rest. A
sequence that turns out to have ended is computed once more, and its result dropped. The host's changes to keys, values
and weights come behind that step in the device's stream.

There is one graph per shape (sequences, rounded up, and room for the longest one), captured when it is first needed.
Graphs hold addresses: weights are written in place, and keys and values stay in one pool (`slot_cache.PooledCache`).
Rows beyond the running sequences compute on free slots.
"""

import logging

import numpy as np
import torch

from actors.engines import decoders, slot_kernel
from actors.engines.chosen_experts import ChosenExperts
from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.sampler import keyed_uniforms, read_blocks, refuse_nan, sample_static
from actors.engines.slot_cache import SlotCache
from actors.engines.slot_table import SlotTable
from areal_like.models.compiling import Compiling

log = logging.getLogger(__name__)
LEAST_TIME = 256
"""Shortest room of a step that reads all of it."""
INPUTS = 5
"""Rows of what a step reads: last tokens, lengths, keys and positions of the random streams, temperatures."""
Shape = tuple[int, int, int]
"""Sequences of a step, positions that it reads, positions per slot of the cache."""


def rounded_up(n: int) -> int:
    """The sequences of the step that computes n: a power of two up to 16, then a multiple of 16, above 128 of 32."""
    if n <= 16:
        return max(2, 1 << (n - 1).bit_length())
    of = 16 if n <= 128 else 32
    return -(-n // of) * of


class StaticStep:
    """The decode step over up to `slots` sequences on the cache's device; `chosen` also brings routers' experts.
    The host's memory is there twice, for the newest step and the one before it."""

    def __init__(
        self, decoder: FusedDecoder | ModelDecoder, cache: SlotCache, slots: int, chosen: ChosenExperts | None = None
    ):
        device = cache.keys.device
        self._decoder, self._cache, self._chosen = decoder, cache, chosen
        self._captures = cuda = device.type == "cuda"
        self._input = torch.zeros(INPUTS, slots, dtype=torch.int64, device=device)
        self._output = torch.zeros(2, slots, dtype=torch.int32, device=device)
        routed = (slots, *(chosen.routing[:2] if chosen else (0,)))
        self._experts = torch.zeros(routed, dtype=torch.int32, device=device)
        self._sent = torch.zeros(2, INPUTS, slots, dtype=torch.int64, pin_memory=cuda)
        self._got, self._got_experts = (
            torch.zeros(2, *shape, dtype=torch.int32, pin_memory=cuda) for shape in ((2, slots), routed)
        )
        self._done = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._newest = 0
        self._read = Compiling(True).wrap(read_blocks, "sampling") if device.type in decoders.COMPILED else None
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def __call__(self, table: SlotTable, begun: bool, ahead: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next token of each running sequence → ids int64 [n], logprobs float32 [n], experts int32 [n, layers, k].
        `ahead`: the step behind it begins too, and the next call has `begun`; sequences may leave the table in between,
        but none may join. Raises RuntimeError if a logprob is not a number."""
        if not begun:
            for done in self._done:  # the device may be at a step whose sequences have all left
                done.synchronize()
            self._begin(table, 0)
        which, rows = self._newest, table.rows[: len(table)].copy()
        if ahead:
            self._begin(table, 1)
        if self._done:
            self._done[which].synchronize()
        got = self._got[which].numpy()[:, rows]
        logprobs = got[1].view(np.float32)
        refuse_nan(logprobs)
        return got[0].astype(np.int64), logprobs, self._got_experts[which].numpy()[rows]

    def _begin(self, table: SlotTable, behind: int) -> None:
        """`behind`: 1 for the step behind the newest one, whose tokens are on the device only; else 0."""
        n, which = len(table), 1 - self._newest
        self._fill(self._sent[which].numpy(), table, n, behind)
        with torch.inference_mode():
            self._input.copy_(self._sent[which], non_blocking=True)
            if behind:
                self._input[0].copy_(self._output[0].index_select(0, self._input[0]))
            self._run(self._shape(n, table.longest + behind))
            self._got[which].copy_(self._output, non_blocking=True)
            self._got_experts[which].copy_(self._experts, non_blocking=True)
        if self._done:
            self._done[which].record(torch.cuda.current_stream(self._input.device))
        self._newest, table.rows[:n] = which, np.arange(n)

    def step(self, rows: int, time: int) -> None:
        """From the first `rows` columns of the input to those of the output. None is longer than `time`."""
        tokens, lengths, keys, places, temperatures = self._input[:, :rows]
        self._cache.begin_static_decode(lengths, time)
        logits = self._decoder.logits(tokens[:, None], (lengths - 1)[:, None], self._cache)[:, -1]
        draws = keyed_uniforms(keys, places)
        ids, logprobs = sample_static(logits, temperatures.view(torch.float64).float(), draws, self._read)
        self._output[0, :rows].copy_(ids)
        self._output[1, :rows].copy_(logprobs.view(torch.int32))
        if self._chosen:
            self._experts[:rows].copy_(self._chosen.newest())

    def _fill(self, sent: np.ndarray, table: SlotTable, n: int, behind: int) -> None:
        """Behind another step the first row is of places in its output."""
        sent[0, :n] = table.rows[:n] if behind else table.last_tokens()
        sent[1, :n] = table.lengths[:n] + behind
        keys, places = table.stream()
        sent[2, :n] = keys.view(np.int64)
        sent[3, :n] = places + behind
        sent[4, :n] = table.temperatures[:n].astype(np.float64).view(np.int64)
        sent[:, n:] = 0
        sent[1, n:] = 1

    def _shape(self, n: int, longest: int) -> Shape:
        """Not one row alone: CUDA's running sum over a single row depends on its threads' order."""
        rows = min(rounded_up(n), self._cache.rows, self._input.shape[1])
        time = capacity = self._cache.capacity
        if not slot_kernel.takes(self._cache.keys):
            time = min(capacity, max(LEAST_TIME, 1 << (longest - 1).bit_length()))
        return rows, time, capacity

    def _run(self, shape: Shape) -> None:
        if self._captures and shape not in self._graphs:
            self._graphs = {known: graph for known, graph in self._graphs.items() if known[2] == shape[2]}
            try:
                self._graphs[shape] = self._captured(shape)
            except RuntimeError as error:  # e.g. a model whose forward asks the host
                log.warning("this model's decode step cannot be a CUDA graph, and is slower without one: %s", error)
                self._captures = False
                self._graphs.clear()
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self.step(*shape[:2])

    def _captured(self, shape: Shape) -> torch.cuda.CUDAGraph:
        """Run the step twice, for libraries that set themselves up, then capture it."""
        device = self._input.device
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for _ in range(2):
                self.step(*shape[:2])
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        memory = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            self.step(*shape[:2])
        return graph
