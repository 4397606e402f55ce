"""Published bits on a device: what `codec` and `digest` compute on the host, in torch operations, bit for bit.

    learner: weights ─cast─► new bits ≠ held bits ─► gaps, steps, lanes ─► pinned memory ─► `Coded`, for `planes.pack`
    actor:   `planes.unpack` ─► gaps, steps ─► pinned memory ─► places ─► one scatter into the held bits, lanes

Only changes leave the device or reach it. torch has few operations on unsigned numbers: bits are held as signed ones,
and widened to int64 for arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_like.weights import codec
from areal_like.weights.delta import Delta
from areal_like.weights.digest import HALF, A, B, K, Lanes, kernels_for, text_of
from areal_like.weights.layout import Block, Layout, Segment
from areal_like.weights.plain import ESCAPE_CODE, ESCAPE_GAP
from areal_like.weights.planes import DENSE, GAPS, MASK, SKIP, Coded, Part
from areal_like.weights.replica import SINGLY_BELOW, Changes, Replica
from areal_like.weights.state import ALIGN, State, TensorSpec
from areal_like.weights.transfer import to_device, to_host

ON_DEVICE = {"cuda"}
"""Types of devices that hold published bits themselves. A CPU may be among them: tests compare both ways."""
RUN_BYTES = 128 << 20
"""Bytes that are compared at once."""
MANY = 1 << 24
"""Changes that are coded at once, if they are not of one block: about 100 bytes of memory are needed for each."""
BATCH = 1 << 23
"""Changes after which an update is applied before more of it is looked at."""
PIECE = 64 << 20
"""Bytes that are copied in or out at once."""
FEW = 1 << 16
"""Up to so many changes of a segment, an engine writes them one by one: beside many others these cost least."""
_STRIDE = 1 << 24
"""Words that are digested at once."""
_KINDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_K, _A, _B = (int(each.astype(np.int64)) for each in (K, A, B))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _sums(words: Tensor, positions: Tensor, counted: Tensor | None = None) -> Tensor:
    """The lanes (int64 [..., 2]) of words (int64 [..., n]) at these positions [n] in the whole weights; of those that
    are `counted` (bool [n])."""
    x = words + positions * _K
    x = (x ^ _shifted(x, 30)) * _A
    x = (x ^ _shifted(x, 27)) * _B
    x = x ^ _shifted(x, 31)
    x = x if counted is None else x * counted
    high = _shifted(x, int(HALF))
    return torch.stack([x.sum(-1), ((x ^ high << int(HALF)) * high).sum(-1)], -1)


def _ordered(wide: Tensor, top: int) -> Tensor:
    return torch.where(wide >= top, wide ^ (top - 1), wide)


def _lifted(bits: Tensor, top: int) -> Tensor:
    return _ordered(bits.long() & (2 * top - 1), top)


def _steps(before: Tensor, after: Tensor, width: int) -> Tensor:
    """As `plain.steps`: codes, int64."""
    top = 1 << (width - 1)
    d = ((_lifted(after, top) - _lifted(before, top) + top) & (2 * top - 1)) - top
    return ((d << 1) ^ (d >> 63)) - 1


def _stepped(before: Tensor, codes: Tensor, width: int) -> Tensor:
    top, z = 1 << (width - 1), codes + 1
    return _ordered((_lifted(before, top) + ((z >> 1) ^ -(z & 1))) & (2 * top - 1), top).to(before.dtype)


def _spread(numbers: Tensor, counts: np.ndarray) -> Tensor:
    """Each number as often as its count (int64)."""
    return torch.repeat_interleave(numbers, to_device(counts, numbers.device), output_size=int(counts.sum()))


def _stretches(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """Places (int64) of stretches, one behind another."""
    places = _spread(to_device(starts - (lengths.cumsum() - lengths), device), lengths)
    return places + torch.arange(len(places), device=device)


def _words_of(places: Tensor, itemsize: int) -> tuple[Tensor, Tensor]:
    """Of ascending places of elements: the words that these lie in, and whether a place is the first in its word."""
    at = places * itemsize >> 3
    return at, at.diff(prepend=at.new_full((1,), -1)) > 0


class DeviceLanes:
    """The lanes of a part of the weights, int64 [2] on their device."""

    def __init__(self, of: Tensor):
        self.of = of

    def total(self) -> Lanes:
        total: Lanes = self.of.cpu().numpy().view(np.uint64).copy()
        return total


class DeviceState(State):
    """As `State`, with the buffer on `device`. A learner that has begun to `follow` a layout overwrites the bits by
    those of the next version (`write`), and has the coded blocks that lead there."""

    in_place = True

    def __init__(self, specs: list[TensorSpec], buffer: np.ndarray | None = None, *, device: torch.device, **part: int):
        self.device = device
        super().__init__(specs, buffer, **part)
        self._lanes, self._runs = DeviceLanes(torch.zeros(2)), list[_Run]()

    def _hold(self, buffer: np.ndarray | None) -> None:
        self.buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self._words, self.device = self.buffer.view(torch.int64), self.buffer.device  # with its number
        if buffer is not None:
            self.copy_in(0, buffer)

    def tensors(self) -> Iterator[tuple[TensorSpec, Any]]:
        """(spec, flat tensor of its elements that are here, in its dtype and in the memory of the bits)."""
        for spec, start, stop in self.places():
            yield spec, self.buffer[start:stop].view(getattr(torch, spec.dtype))

    def copy_out(self, start: int, stop: int, into: np.ndarray) -> None:
        for first in range(start, stop, PIECE):
            (array,), arrived = to_host([self.buffer[first : min(stop, first + PIECE)]])
            if arrived:
                arrived.synchronize()
            into[first - start :][: array.size] = array

    def copy_in(self, start: int, chunk: np.ndarray) -> None:
        for first in range(0, chunk.size, PIECE):
            piece = chunk[first : first + PIECE]
            held = torch.empty(piece.size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            held.numpy()[:] = piece
            self.buffer[start + first :][: piece.size].copy_(held, non_blocking=True)

    def swept(self, start: int, stop: int, first_word: int) -> Lanes:
        lanes = torch.zeros(2, dtype=torch.int64, device=self.device)
        for at in range(start // ALIGN, stop // ALIGN, _STRIDE):
            words = self._words[at : min(stop // ALIGN, at + _STRIDE)]
            lanes += _sums(words, torch.arange(len(words), device=self.device) + (first_word + at - start // ALIGN))
        return DeviceLanes(lanes).total()

    # ---- a learner's

    def follow(self, layout: Layout) -> DeviceLanes:
        """Code the versions to come by this layout of the part that is here; returns its lanes, which will follow.
        All tensors must have one width."""
        self._lanes = DeviceLanes(to_device(self.lanes().view(np.int64), self.device))
        compiled, blocks = kernels_for(layout.nbytes) is not None, list[Block]()
        for block in layout.blocks:
            if blocks and block.end - blocks[0].segments[0].start > RUN_BYTES:
                self._runs.append(_Run(blocks, self, compiled))
                blocks = []
            blocks.append(block)
        self._runs += [_Run(blocks, self, compiled)] if blocks else []
        return self._lanes

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], done: Callable[[int], None] | None = None) -> None:
        """Overwrite the bits by weights, rounded as `causal_lm.read_state` does, each looked up in order; `done` as
        there. From `follow` on, find what changes."""
        if not self._runs:
            for spec, held in self.tensors():
                held.copy_(weights[spec.name].detach().reshape(-1))
            return
        new = torch.zeros(max(run.nbytes for run in self._runs), dtype=torch.uint8, device=self.device)
        known: tuple[str, Tensor] = ("", new)
        for run in list(self._runs):
            sources, targets = list[Tensor](), list[Tensor]()
            for spec, first, last, at in run.pieces:
                if spec.name != known[0]:
                    known = spec.name, weights[spec.name].detach().reshape(-1)
                sources.append(known[1][first:last])
                targets.append(new.view(getattr(torch, spec.dtype))[at : at + last - first])
            torch._foreach_copy_(targets, sources)
            self._compare(run, new[: run.nbytes])
            new.zero_()
            if done:
                done(run.stop)

    def _compare(self, run: _Run, new: Tensor) -> None:
        moved = run.compare(self.buffer[run.start : run.stop], new)
        if moved is not None:
            self._lanes.of += moved
            return
        halves, place = run.halves(self), self._runs.index(run)
        self._runs[place : place + 1] = halves
        for half in halves:
            self._compare(half, new[half.start - run.start :][: half.nbytes])

    def coded(self, block: Block) -> Coded:
        """The block that leads to the newest version, as `codec.Encoder` codes it. Any thread may call this."""
        return next(run for run in self._runs if block.end <= run.stop).coded(block)

    # ---- an actor's

    @torch.no_grad()
    def apply(self, parts: Sequence[Part], lanes: DeviceLanes, changes: Changes) -> None:
        """As `codec.apply`, for whole weights. Adds to `changes`, by places on the device."""
        waiting, size = list[Part](), 0
        for part in parts:
            waiting.append(part)
            size += part[0].nbytes // ALIGN if part[1] == DENSE else part[2][-2].size
            if size >= BATCH:
                self._apply(waiting, lanes, changes)
                waiting, size = [], 0
        self._apply(waiting, lanes, changes)

    def _apply(self, parts: Sequence[Part], lanes: DeviceLanes, changes: Changes) -> None:
        """Find words and new values first: lanes need the words before and after."""
        touched, moves = list[tuple[Tensor, ...]](), list[tuple[Tensor, Tensor, Tensor]]()  # target, places, values
        for width, kind in _KINDS.items():
            sparse = [part for part in parts if part[1] != DENSE and part[0].width == width]
            if sparse:
                held = self.buffer.view(kind)
                places, codes = self._places(sparse, changes)
                touched.append(_words_of(places, width // 8))
                moves.append((held, places, _stepped(held[places], codes, width)))
        dense = [(segment, planes[0]) for segment, coding, planes in parts if coding == DENSE]
        if dense:
            starts = np.array([segment.start // ALIGN for segment, _ in dense])
            lengths = np.array([(segment.stop - segment.start) // ALIGN for segment, _ in dense])
            padded = [np.pad(bits, (0, segment.stop - segment.start - bits.size)) for segment, bits in dense]
            touched.append((_stretches(starts, lengths, self.device),))
            moves.append((self._words, *touched[-1], to_device(np.concatenate(padded).view(np.int64), self.device)))
            self._note_dense([segment for segment, _ in dense], changes)
        for at, *counted in touched:
            lanes.of -= _sums(self._words[at], at, *counted)
        for target, places, bits in moves:
            target.index_copy_(0, places, bits)
        for at, *counted in touched:
            lanes.of += _sums(self._words[at], at, *counted)

    def _places(self, parts: Sequence[Part], changes: Changes) -> tuple[Tensor, Tensor]:
        """Places, of segments of one width that are coded by gaps or masks, and codes of the steps there."""
        width = parts[0][0].width
        planes = [_as_gaps(coding, planes) for _, coding, planes in parts]
        gaps, far, short, big = (to_device(np.concatenate(each), self.device) for each in zip(*planes, strict=True))
        counts = np.array([each[0].size for each in planes])
        reach, codes = gaps.long() + 1, short.long()
        reach[gaps == ESCAPE_GAP] += far
        codes[short == ESCAPE_CODE] = big
        reach = reach.cumsum(0)
        ends = counts.cumsum()
        before = F.pad(reach[to_device(ends[:-1] - 1, self.device)], (1, 0))
        starts = np.array([segment.start * 8 // width for segment, *_ in parts])
        places = reach + _spread(to_device(starts - 1, self.device) - before, counts)
        singly = counts <= np.array([max(FEW, segment.count * SINGLY_BELOW) for segment, *_ in parts])
        for number in np.flatnonzero(~singly).tolist():
            changes.note(parts[number][0], None)
        few = places if singly.all() else places[_spread(to_device(singly, self.device), counts)]
        changes.places.append((width // 8, few))
        return places, codes

    def _note_dense(self, segments: Sequence[Segment], changes: Changes) -> None:
        for width in _KINDS:
            few = [segment for segment in segments if segment.width == width and segment.count <= FEW]
            if few:
                starts, counts = np.array([(segment.start * 8 // width, segment.count) for segment in few]).T
                changes.places.append((width // 8, _stretches(starts, counts, self.device)))
        for segment in segments:
            if segment.count > FEW:
                changes.note(segment, None)


def _as_gaps(coding: int, planes: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """gaps uint8, far int64, short uint8, big int64; a mask as the gaps that it stands for."""
    *where, short, big = planes
    if coding == MASK:
        found = np.diff(np.flatnonzero(np.unpackbits(where[0].view(np.uint8), bitorder="little")), prepend=-1) - 1
        where = [np.minimum(found, ESCAPE_GAP).astype(np.uint8), found[found >= ESCAPE_GAP] - ESCAPE_GAP]
    return where[0], where[1].astype(np.int64), short, big.astype(np.int64)


class _Run:
    """Neighbouring blocks of one width, compared at once. `compiled`: code as the compiled kernels would."""

    def __init__(self, blocks: list[Block], state: State, compiled: bool):
        self.segments: list[Segment] = [segment for block in blocks for segment in block.segments]
        first = self.segments[0]
        self.start, self.stop, self.width, self._compiled = first.start, blocks[-1].end, first.width, compiled
        self.nbytes, device = self.stop - self.start, state.buffer.device
        self.pieces: list[tuple[TensorSpec, int, int, int]] = []
        """Tensors with the elements [first, last) that are in the run, and where they begin there, in elements."""
        for spec, start, stop in state.places():
            begin, end = max(start, self.start), min(stop, self.stop)
            if begin < end:
                head, tail, at = (n // spec.itemsize for n in (begin - start, end - start, begin - self.start))
                self.pieces.append((spec, head, tail, at))
        ends = accumulate((len(block.segments) for block in blocks), initial=0)
        self._bounds = {block.end: bounds for block, bounds in zip(blocks, pairwise(ends), strict=True)}
        self._blocks = blocks
        rows = [(s.start - self.start) * 8 // self.width for s in self.segments]
        strides = [codec.stride(s.count) for s in self.segments]
        positions = [s.first_word - (s.start - self.start) // ALIGN for s in self.segments]
        self._starts, self._strides, self._positions = to_device(np.array([rows, strides, positions]), device)
        self._numbers = torch.arange(len(rows), device=device)
        self._codings, self._changes = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.uint32)
        self._ends, self._planes, self._arrived = np.zeros((0, 6), np.int64), list[np.ndarray](), None

    def halves(self, state: State) -> list[_Run]:
        middle = len(self._blocks) // 2
        return [_Run(blocks, state, self._compiled) for blocks in (self._blocks[:middle], self._blocks[middle:])]

    def compare(self, held: Tensor, new: Tensor) -> Tensor | None:
        """Bytes of the run; `held` become `new`. Returns the change of their lanes. None, and nothing done, where there
        are too many changes."""
        before, after = (bits.view(_KINDS[self.width]) for bits in (held, new))
        changed = before != after
        places = changed.nonzero().view(-1)
        if len(places) > MANY and len(self._blocks) > 1:
            return None
        edges = F.pad(torch.searchsorted(places, self._starts), (0, 1), value=len(places))
        segment = torch.repeat_interleave(self._numbers, edges.diff(), output_size=len(places))
        within = places - self._starts[segment]
        gaps = torch.minimum(places.diff(prepend=places.new_full((1,), -1)) - 1, within)
        codes = _steps(before[places], after[places], self.width)
        at, first = _words_of(places, self.width // 8)
        words = torch.stack([bits.view(torch.int64)[at] for bits in (new, held)])
        moved = _sums(words, at + self._positions[segment], first)
        self._choose(edges, gaps >= ESCAPE_GAP, codes >= ESCAPE_CODE, within % self._strides[segment] < codec.SAMPLE)
        gaps, codes = self._of(self._codings == GAPS, gaps), self._of(self._codings > DENSE, codes)
        far, big = (plane[-1] for plane in (self._ends[1], self._ends[4]))
        masks = [_mask(changed[at:], s) for at, s in self._coded(MASK, self.width)]
        body = [new[at:][: s.nbytes] for at, s in self._coded(DENSE, 8)]
        arrays, self._arrived = to_host([
            gaps.clamp(max=ESCAPE_GAP).byte(),
            (gaps[gaps >= ESCAPE_GAP] - ESCAPE_GAP if far else gaps[:0]).int(),
            torch.cat(masks) if masks else new[:0],
            codes.clamp(max=ESCAPE_CODE).byte(),
            (codes[codes >= ESCAPE_CODE] if big else codes[:0]).int(),
            torch.cat(body) if body else new[:0],
        ])  # fmt: skip
        self._planes = [each.view(np.uint32) if each.dtype == np.int32 else each for each in arrays]
        held.copy_(new)
        return moved[0] - moved[1]

    def _of(self, wanted: np.ndarray, numbers: Tensor) -> Tensor:
        """Of numbers of changes, those of the segments that are wanted (bool)."""
        turns = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).reshape(-1, 2)
        return torch.cat([numbers[self._edges[first] : self._edges[last]] for first, last in turns] or [numbers[:0]])

    def _coded(self, coding: int, width: int) -> Iterator[tuple[int, Segment]]:
        """Segments of this coding, with where they begin in the run, in elements of a width."""
        for number in np.flatnonzero(self._codings == coding).tolist():
            yield (self.segments[number].start - self.start) * 8 // width, self.segments[number]

    def _choose(self, edges: Tensor, far: Tensor, big: Tensor, sampled: Tensor) -> None:
        """Choose codings, from each segment's number of changes, far gaps, large steps, and of both in a sample; note
        where its part of each plane ends."""
        flags = torch.stack([torch.ones_like(far), far, big, sampled, sampled & big])
        sums = F.pad(flags.cumsum(1, dtype=torch.int32), (1, 0))[:, edges]
        table = sums.diff(dim=1).T.cpu().numpy().astype(np.int64)
        for number, (segment, row) in enumerate(zip(self.segments, table.tolist(), strict=True)):
            size, changes = codec.sample_size(segment.count), row[0]
            sample = (row[3] / size, row[4] / size) if self._compiled else (0.0, 0.0)
            chosen = codec.chosen(segment, changes, row[2], sample)
            self._codings[number] = (DENSE if changes else SKIP) if segment.plain else chosen
        gaps, masks, dense = (self._codings == coding for coding in (GAPS, MASK, DENSE))
        changes, far_gaps, escapes, *_ = table.T
        self._changes, self._edges = (changes * ~dense).astype(np.uint32), np.append(0, changes.cumsum())
        mask_bytes, nbytes = np.array([(8 * s.mask_words, s.nbytes) for s in self.segments]).T
        rows = [changes * gaps, far_gaps * gaps, mask_bytes * masks, changes * ~dense, escapes * ~dense, nbytes * dense]
        self._ends = np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))

    def coded(self, block: Block) -> Coded:
        if self._arrived:
            self._arrived.synchronize()
        first, last = self._bounds[block.end]
        ends = zip(self._planes, self._ends[:, first], self._ends[:, last], strict=True)
        gaps, far, masks, short, big, body = (plane[start:stop] for plane, start, stop in ends)
        codings, changes = self._codings[first:last].copy(), self._changes[first:last]
        return Coded(codings, changes, gaps, far, masks.view(np.uint64), short, big, [body])


def _mask(changed: Tensor, segment: Segment) -> Tensor:
    """uint8: a bit per element, from the lowest on."""
    bits = F.pad(changed[: segment.count].byte(), (0, 64 * segment.mask_words - segment.count)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


class DeviceReplica(Replica):
    """A replica whose state lies on a device."""

    def __init__(self, device: torch.device, state: State | None = None):
        self._device = device
        super().__init__(None if state is None else DeviceState(state.specs, state.buffer, device=device))

    def _empty(self, specs: list[TensorSpec]) -> State:
        return DeviceState(specs, device=self._device)

    def _lanes(self, layout: Layout) -> Any:
        swept = [self.state.swept(start, stop, start // ALIGN) for start, stop in layout.spans]
        total = np.array([[0, 0], *swept], np.uint64).sum(axis=0, dtype=np.uint64)
        return DeviceLanes(to_device(total.view(np.int64), self.state.buffer.device))

    def _apply(self, delta: Delta, layout: Layout, lanes: Any) -> str:
        assert isinstance(self.state, DeviceState)
        self.state.apply([part for parts in delta.blocks for part in parts], lanes, self._changes or Changes(""))
        return text_of(lanes.total(), layout.nbytes // ALIGN)


def state_on(device: torch.device, specs: list[TensorSpec], part: int, parts: int) -> State:
    """A state for weights on `device`."""
    if device.type in ON_DEVICE:
        return DeviceState(specs, device=device, part=part, parts=parts)
    return State(specs, part=part, parts=parts)


def replica_on(device: torch.device, state: State | None = None) -> Replica:
    """A replica for an engine on `device`."""
    return DeviceReplica(device, state) if device.type in ON_DEVICE else Replica(state)
