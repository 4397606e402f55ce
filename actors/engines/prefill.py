"""Fills the KV cache of sequences so that each prompt goes through the model once, however many share it: samples of a
group when they join, in any later step, and again when a weight update recomputes all. Its last token is not shared."""

import asyncio
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.chosen_experts import ChosenExperts
from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.slot_cache import SlotCache
from actors.engines.slot_table import PositionSpan, SlotTable

PREFILL_TOKENS = 8192
"""Most tokens, padding included, of one prefill forward: bounds its memory."""
PREFILL_OPERATIONS = 5e11
"""And most operations on a CPU: seconds of one core. Between two forwards messages are handled, heartbeats sent."""
LEAST_PREFILL_TOKENS = 256

Plan = tuple[list[tuple[int, int, int]], list[PositionSpan], list[PositionSpan]]
"""In this order: copies (source slot, target slot, positions from 0 on), spans that start at 0, and spans of what comes
behind a shared prompt, both the shortest first."""


def plan(table: SlotTable, slots: Iterable[int], sources: Iterable[int]) -> Plan:
    """How to fill the KV cache of `slots` for all but their last token; that of `sources` may be copied from."""
    copies, whole, rests = list[tuple[int, int, int]](), list[PositionSpan](), list[PositionSpan]()
    held = {_prompt(table, slot): slot for slot in sources}
    sharers: dict[bytes, list[int]] = {}
    for slot in slots:
        sharers.setdefault(_prompt(table, slot), []).append(slot)
    for prompt, same in sharers.items():
        bare = len(table.requests[same[0]].prompt) - 1
        if (source := held.get(prompt)) is not None:
            copies += [(source, slot, bare) for slot in same]
        else:
            if len(same) == 1:  # nothing to share: all in one forward
                bare = int(table.lengths[same[0]]) - 1
            whole.append(PositionSpan(same, 0, bare))
        rests += [PositionSpan([slot], bare, int(table.lengths[slot]) - 1) for slot in same]
    return copies, _rising(whole), _rising(rests)


def _rising(spans: list[PositionSpan]) -> list[PositionSpan]:
    return sorted((span for span in spans if span.stop > span.start), key=lambda span: span.stop - span.start)


def _prompt(table: SlotTable, slot: int) -> bytes:
    return table.tokens[slot, : len(table.requests[slot].prompt) - 1].tobytes()


class Prefill:
    """`alike`: only equal spans share a forward, so that none is padded (`engine.batch_invariant`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: ModelDecoder | FusedDecoder,
        cache: SlotCache,
        chosen: ChosenExperts | None,
        alike: bool,
    ):
        self._decoder, self._cache, self._chosen, self._alike = decoder, cache, chosen, alike
        self._config = model.config
        self._device, self._most = cache.keys.device, PREFILL_TOKENS
        if self._device.type == "cpu":
            operations = 2 * sum(parameter.numel() for parameter in model.parameters())
            self._most = max(LEAST_PREFILL_TOKENS, min(PREFILL_TOKENS, int(PREFILL_OPERATIONS / operations)))

    async def __call__(self, table: SlotTable, slots: list[int], now: int, again: bool) -> tuple[int, int]:
        """Fill slots for all but their last token; `now`: the weight updates so far. `again`: known experts stay.
        Yields to the event loop between forwards. Returns the tokens computed and shared."""
        joining, chosen = set(slots), None if again else self._chosen
        sources = (i for i, r in enumerate(table.requests) if r.prefilled == now and i not in joining)
        copies, beginnings, rests = plan(table, slots, sources)
        with torch.inference_mode():
            for source, target, time in copies:
                self._cache.move(source, target, time)
                if chosen:
                    chosen.move(source, target, time)
        chunks = [chunk for spans in (beginnings, rests) for chunk in _chunks(spans, self._most, self._alike)]
        for number, chunk in enumerate(chunks, 1):
            self._forward(table, chunk)
            if chosen:
                chosen.prefilled(chunk)
            if number < len(chunks):
                await asyncio.sleep(0)
        for slot in slots:
            table.requests[slot].prefilled = now
        shared = sum(time for *_, time in copies) + sum((len(span.slots) - 1) * span.stop for span in beginnings)
        return sum(span.stop - span.start for span in [*beginnings, *rests]), shared

    @torch.inference_mode()
    def _forward(self, table: SlotTable, chunk: list[PositionSpan]) -> None:
        """One forward over one row per span, which is for all of its slots; the last span is the longest."""
        time = chunk[-1].stop - chunk[-1].start
        starts = np.array([span.start for span in chunk])
        slots = np.array([slot for span in chunk for slot in span.slots])
        rows = np.repeat(np.arange(len(chunk)), [len(span.slots) for span in chunk])
        # Beyond a span's end lie ids of earlier sequences: valid, and hidden by causality.
        places = np.minimum(starts[:, None] + np.arange(time), self._cache.capacity - 1)
        if starts.any():
            self._cache.begin_prefill_behind(slots, places)
        else:
            self._cache.begin_prefill(slots, rows)
            places = places[:1]
        first = np.array([span.slots[0] for span in chunk])[:, None]
        tokens = torch.from_numpy(table.tokens[first, np.minimum(places, table.tokens.shape[1] - 1)]).to(self._device)
        self._decoder.prefill(tokens, torch.from_numpy(places).to(self._device))

    @torch.inference_mode()
    def logits(self, sequences: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [b, t, vocab] after each token of sequences that are padded to t, and these tokens [b, t]."""
        rows, time = np.arange(len(sequences)), max(map(len, sequences))
        tokens = np.zeros((len(rows), time), np.int64)
        for place, known in zip(tokens, sequences, strict=True):
            place[: len(known)] = known
        cache = SlotCache(self._config, len(rows), self._device, self._cache.dtype)
        cache.reserve(len(rows), time)
        cache.begin_prefill(rows, rows)
        ids = torch.from_numpy(tokens).to(self._device)
        return self._decoder.logits(ids, torch.arange(time, device=self._device)[None], cache), ids


def _chunks(spans: list[PositionSpan], most: int, alike: bool) -> Iterator[list[PositionSpan]]:
    """As many spans at a time as one forward of `most` tokens may have. `alike`: only equal ones: none is padded."""
    chunk: list[PositionSpan] = []
    for span in spans:
        other = alike and chunk and (chunk[0].start, chunk[0].stop) != (span.start, span.stop)
        if chunk and (other or (len(chunk) + 1) * (span.stop - span.start) > most):
            yield chunk
            chunk = []
        chunk.append(span)
    if chunk:
        yield chunk
