"""Where each published tensor lies in the parameters of an SGLang model: in boxes, found by the model's own loader.

SGLang fuses our tensors (qkv, gate_up, experts), pads them (vocabulary) and cuts them up (tensor parallelism). The
places of their parts are not tabulated here. Instead the model's own `load_weights` runs once with tensors without
data (torch's meta device), and each copy that it would make is only recorded. So the positions of each of our
elements are certain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engines.sglang_patch import Stored
from areal_like.weights.state import ALIGN, TensorSpec

STRIDE = 1 << 21
"""Most elements that are computed at once: bounds the temporaries (tens of bytes per element)."""


class LoaderRefused(RuntimeError):
    """A model or server that can never follow the published weights: another try would not help."""


class Box:
    """Elements [start, start + size) of a tensor of `shape`, in every dimension: `target`, a view of a parameter."""

    def __init__(self, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], target: Tensor):
        self.shape, self.start, self.size, self.target = shape, start, size, target
        self.count = math.prod(size)
        self._strides = strides_of(shape)
        lead, run = len(shape), 1
        while lead:
            lead -= 1
            run *= size[lead]
            if size[lead] != shape[lead]:
                break
        self._lead, self._run = lead, run  # dimensions that separate its runs; elements of a run, without a gap

    @classmethod
    def of_copy(cls, shape: tuple[int, ...], source: Tensor, target: Tensor) -> Box:
        """`source` is a view of the whole tensor. Raises LoaderRefused where it is not a box of it, in its order."""
        if source.shape != target.shape:
            raise LoaderRefused("a tensor is stored under another shape")
        strides, size, dim = strides_of(shape), [1] * len(shape), 0
        for count, stride in zip(source.shape, source.stride(), strict=True):
            if count == 1:
                continue
            while dim < len(shape) and (strides[dim] != stride or shape[dim] == 1):
                dim += 1
            if dim == len(shape) or count > shape[dim]:
                raise LoaderRefused("a tensor is stored in another order")
            size[dim] = count
            dim += 1
        start, left = [], source.storage_offset()
        for stride in strides:
            start.append(left // stride)
            left %= stride
        if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            raise LoaderRefused("a tensor is stored under another shape")
        return cls(shape, tuple(start), tuple(size), target.view(size))

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.start, self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def pieces(self) -> Iterator[Box]:
        """Boxes of at most `STRIDE` elements that tile this one."""
        if self.count <= STRIDE:
            yield self
            return
        dim = next(dim for dim, count in enumerate(self.size) if count > 1)
        step = max(1, STRIDE // (self.count // self.size[dim]))
        step -= step % ALIGN if step > ALIGN else 0  # so that each begins with a whole word
        for first in range(0, self.size[dim], step):
            count = min(step, self.size[dim] - first)
            start = (*self.start[:dim], self.start[dim] + first, *self.start[dim + 1 :])
            size = (*self.size[:dim], count, *self.size[dim + 1 :])
            yield from Box(self.shape, start, size, self.target.narrow(dim, first, count)).pieces()

    def is_of_words(self, per: int) -> bool:
        """Is every word (`per` elements of the flat tensor) inside or outside of each piece?"""
        return all(piece._is_of_words(per) for piece in self.pieces())

    def _is_of_words(self, per: int) -> bool:
        first = sum(a * stride for a, stride in zip(self.start, self._strides, strict=True))
        steps = [self._strides[dim] for dim in range(self._lead) if self.size[dim] > 1]
        ends = self._run % per == 0 or (not steps and first + self._run == math.prod(self.shape))
        return ends and not any(each % per for each in (first, *steps))

    def bits(self, dtype: str) -> tuple[Tensor, Tensor]:
        """Its values as they are published, and how many of them no published bits stand for (int64 [])."""
        values = self.target.to(getattr(torch, dtype))
        if values.dtype == self.target.dtype:
            return values, torch.zeros((), dtype=torch.int64, device=values.device)
        return values, (values.to(self.target.dtype) != self.target).sum()

    def words(self, values: Tensor, per: int) -> tuple[Tensor, Tensor]:
        """`values` as words int64 [runs, words of a run], and which words of the tensor they are. For whole words."""
        flat = values.reshape(-1, self._run).contiguous()
        if gap := -self._run % per:
            flat = torch.nn.functional.pad(flat, (0, gap))
        starts = torch.zeros(1, dtype=torch.int64, device=values.device)
        starts += sum(a * stride for a, stride in zip(self.start, self._strides, strict=True))
        for dim in range(self._lead):
            along = torch.arange(self.size[dim], device=values.device) * self._strides[dim]
            starts = (starts[:, None] + along).flatten()
        words = flat.view(torch.int64)
        return words, starts[:, None] // per + torch.arange(words.shape[1], device=values.device)

    def inside(self, at: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of flat places `at`, int64 [n]: which are in this box, bool [n], and those places in `target`."""
        inside, local, left = torch.ones_like(at, dtype=torch.bool), [], at
        for stride, start, size in zip(self._strides, self.start, self.size, strict=True):
            where = left // stride - start
            left = left % stride
            inside &= (where >= 0) & (where < size)
            local.append(where)
        return inside, tuple(each[inside] for each in local)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one to the next along each dimension of a tensor without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _Copies(TorchDispatchMode):
    """Notes copies out of data-less tensors, in place of making them: (source, target)."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.noted.append((args[1], args[0]))
            return args[0]
        return func(*args, **(kwargs or {}))


def under_stored_names(tensors: Mapping[str, Tensor], stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """The tensors, or their parts, under the names that the model's loader knows; all are views."""
    for name, tensor in tensors.items():
        for part, shape, strides, offset in stored.get(name, ()):
            yield part, tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
        if name not in stored:
            yield name, tensor


def boxes_of(model: torch.nn.Module, specs: Sequence[TensorSpec], stored: Stored) -> dict[str, list[Box]]:
    """Name → boxes of each tensor. Raises LoaderRefused where that can't be found out."""
    storages = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    metas = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs}
    spec_of = {metas[spec.name].untyped_storage()._cdata: spec for spec in specs}
    given = ""

    def give() -> Iterator[tuple[str, Tensor]]:
        nonlocal given
        for name, meta in under_stored_names(metas, stored):
            given = name
            yield name, meta

    try:
        with torch.no_grad(), _Copies() as copies:
            model.load_weights(give())  # type: ignore[operator]
    except Exception as error:
        raise LoaderRefused(f"{given}: the model's loader needs its values ({error})") from None
    boxes: dict[str, list[Box]] = {spec.name: [] for spec in specs}
    for source, target in copies.noted:
        spec = spec_of.get(source.untyped_storage()._cdata)
        if spec is None:
            raise LoaderRefused(f"a tensor {list(source.shape)}: the model's loader changes it on its way")
        if target.untyped_storage().data_ptr() not in storages:
            raise LoaderRefused(f"{spec.name}: the model's loader puts it elsewhere than into a parameter")
        try:
            box = Box.of_copy(spec.shape, source, target)
        except LoaderRefused as error:
            raise LoaderRefused(f"{spec.name}: {error}") from None
        if not any(box.key == other.key and _is_same(box.target, other.target) for other in boxes[spec.name]):
            boxes[spec.name].append(box)
    return boxes


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Do two views of one size see the same memory?"""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
