"""The update of an SGLang server's weights, and where each published tensor lies in its parameters: in boxes.

The engine encodes a `Patch`, the loader inside the server (`sglang_loader`) decodes it. It holds no values: it names a
file with all of the new weights, memory that the engine shares with the servers of its host. Applying it twice does no
harm, and one that names all elements fits unknown weights.

SGLang fuses our tensors (qkv, gate_up, experts), pads (vocabulary) and cuts them (tensor parallelism). The model's own
`load_weights` runs once with tensors without data (torch's meta device), and its copies are only recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engines.sampler import GOLDEN, mixed, shifted
from areal_like.weights.state import ALIGN, State, TensorSpec

STRIDE = 1 << 21
"""Most elements that are computed at once: bounds the temporaries (tens of bytes per element)."""
NAME = "areal_like.patch"
"""Name of the one tensor that the server receives: the bytes of the path to the patch."""
Stored = dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...], int]]]
"""Name of one of our tensors → its parts that SGLang's loaders know by names of their own: name, shape, strides and
offset (in elements of the whole). Others go by our names. See `sglang_weights.stored_names`."""
Key = tuple[tuple[int, ...], tuple[int, ...]]


class LoaderRefused(RuntimeError):
    """A model or server that can never follow the published weights: another try would not help."""


class Box:
    """Elements [start, start + size) of the tensor `spec`, in every dimension: `target`, a view of a parameter."""

    def __init__(self, spec: TensorSpec, start: tuple[int, ...], size: tuple[int, ...], target: Tensor):
        self.spec, self.start, self.size, self.target = spec, start, size, target
        self.count = math.prod(size)
        self._per = ALIGN // spec.itemsize  # elements of a word
        self._strides = strides_of(spec.shape)
        lead, run = len(size), 1
        while lead:
            lead -= 1
            run *= size[lead]
            if size[lead] != spec.shape[lead]:
                break
        self._lead, self._run = lead, run  # dimensions that separate its runs; elements of a run, without a gap
        self._first = sum(a * stride for a, stride in zip(start, self._strides, strict=True))

    @classmethod
    def of_copy(cls, spec: TensorSpec, source: Tensor, target: Tensor) -> Box:
        """`source` is a view of the whole tensor. Raises LoaderRefused where it is not a box of it, in its order."""
        strides, size, dim = strides_of(spec.shape), [1] * len(spec.shape), 0
        for count, stride in zip(source.shape, source.stride(), strict=True):
            if count == 1:
                continue
            while dim < len(size) and (strides[dim] != stride or spec.shape[dim] == 1):
                dim += 1
            if dim == len(size) or count > spec.shape[dim]:
                raise LoaderRefused(f"{spec.name}: a tensor is stored in another order")
            size[dim] = count
            dim += 1
        start, left = [], source.storage_offset()
        for stride in strides:
            start.append(left // stride)
            left %= stride
        inside = all(a + n <= whole for a, n, whole in zip(start, size, spec.shape, strict=True))
        if source.shape != target.shape or not inside:
            raise LoaderRefused(f"{spec.name}: a tensor is stored under another shape")
        return cls(spec, tuple(start), tuple(size), target.view(size))

    @property
    def key(self) -> Key:
        return self.start, self.size

    def take(self, values: Tensor) -> None:
        slices = tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))
        self.target.copy_(values.view(self.spec.shape)[slices])

    def take_at(self, places: Tensor, values: Tensor) -> None:
        """Write new values [n] of the flat places int64 [n], those that are in this box."""
        inside, local, left = torch.ones_like(places, dtype=torch.bool), [], places
        for stride, start, size in zip(self._strides, self.start, self.size, strict=True):
            where = left // stride - start
            left = left % stride
            inside &= (where >= 0) & (where < size)
            local.append(where)
        self.target.index_put_(tuple(each[inside] for each in local), values[inside].to(self.target.dtype))

    @property
    def is_of_words(self) -> bool:
        """Whether every word of the flat tensor is inside or outside."""
        steps = [self._strides[dim] for dim in range(self._lead) if self.size[dim] > 1]
        ends = self._run % self._per == 0 or (not steps and self._first + self._run == self.spec.count)
        return ends and not any(each % self._per for each in (self._first, *steps))

    def lanes(self, first: int) -> Tensor:
        """The lanes of its words, where word `first` of the weights begins the tensor, and the number of its elements
        that no published bits stand for: int64 [3] on its device. For whole words."""
        device, dtype = self.target.device, getattr(torch, self.spec.dtype)
        total = torch.zeros(3, dtype=torch.int64, device=device)
        runs = self.target.reshape(-1, self._run)
        starts = torch.full((1,), self._first, dtype=torch.int64, device=device)
        for dim in range(self._lead):
            starts = (starts[:, None] + torch.arange(self.size[dim], device=device) * self._strides[dim]).flatten()
        at = starts[:, None] // self._per + first
        for row in range(0, len(runs), step := max(1, STRIDE // self._run)):
            for column in range(0, self._run, STRIDE):
                held = runs[row : row + step, column : column + STRIDE]
                values = held.to(dtype)
                if dtype != held.dtype:
                    total[2] += (values.to(held.dtype) != held).sum()
                if gap := -values.shape[1] % self._per:
                    values = F.pad(values, (0, gap))
                words = values.contiguous().view(torch.int64)
                within = torch.arange(words.shape[1], device=device) + column // self._per
                total[:2] += lanes_of(words, at[row : row + step] + within)
        return total


def lanes_of(words: Tensor, positions: Tensor) -> Tensor:
    """`areal_like.weights.digest.lanes_of` of words (int64) at these positions, on their device: int64 [2]."""
    x = mixed((positions * GOLDEN).add_(words))
    return torch.stack([x.sum(), ((x & 0xFFFFFFFF) * shifted(x, 32)).sum()])


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


def boxes_of(model: torch.nn.Module, specs: Sequence[TensorSpec], stored: Stored) -> list[Box]:
    """The boxes of all tensors. Raises LoaderRefused where that can't be found out."""
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
    boxes: dict[tuple[Any, ...], Box] = {}
    for source, target in copies.noted:
        spec = spec_of.get(source.untyped_storage()._cdata)
        if spec is None:
            raise LoaderRefused(f"a tensor {list(source.shape)}: the model's loader changes it on its way")
        if target.untyped_storage().data_ptr() not in storages:
            raise LoaderRefused(f"{spec.name}: the model's loader puts it elsewhere than into a parameter")
        box = Box.of_copy(spec, source, target)
        boxes[spec.name, box.key, box.target.data_ptr(), box.target.stride()] = box
    return list(boxes.values())


class Patch(msgspec.Struct, frozen=True):
    """`weights`: path of a file with the buffer of a `State` of `specs`, of this `digest`. `changes`: index of a tensor
    → changed elements, uint32 in flat order; None: all of it. Without changes: compare digests."""

    weights: str
    digest: str
    specs: list[TensorSpec]
    stored: Stored
    changes: dict[int, bytes | None]

    def state(self) -> State:
        """The new weights, read where they are used. Raises OSError, ValueError."""
        return State(self.specs, np.asarray(np.memmap(self.weights, np.uint8, "c")))


def places_of(found: np.ndarray, spec: TensorSpec) -> bytes | None:
    """A tensor's entry in `Patch.changes` for changed elements `found`, int64 [n]; all of it where that is shorter."""
    shorter = 8 * len(found) < spec.nbytes and spec.count <= 1 << 32
    return found.astype(np.uint32).tobytes() if shorter else None


def read(path: str) -> Patch:
    """Raises OSError, and ValueError for a file that holds no patch."""
    return msgspec.msgpack.decode(np.memmap(path, np.uint8, "r").data, type=Patch)
