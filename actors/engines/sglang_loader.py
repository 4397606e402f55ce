"""Runs inside an SGLang server: applies patches of weights (`sglang_patch`) to its parameters, and reports the true
result. Needs torch, NumPy, and only the objects that SGLang passes to it.

SGLang fuses our tensors (qkv, gate_up), pads them (vocabulary) and cuts them up (tensor parallelism). No table here
says where their parts lie. Instead the model's own `load_weights` runs once with tensors without data (torch's meta
device), and each copy that it would make is only recorded (`ParameterMap`). So the positions of each of our elements
are certain, and a patch is scattered there.

After every patch the digest of *all* weights is computed from the parameters, on their device, and compared. SGLang
ignores what a custom loader returns, and ends when it raises. So `install`, a plugin of SGLang (`sglang.srt.plugins`),
wraps the call around it: a failure becomes an answer with `success` false, an applied patch one with `APPLIED` and the
digest. An answer without these comes from a server without the plugin: `load`, the custom loader itself, can only log
errors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engines.sglang_patch import Change, Patch, read
from areal_like.weights import digest as words_digest
from areal_like.weights.state import TensorSpec

log = logging.getLogger(__name__)
LOAD_FORMAT = "actors.engines.sglang_loader.load"
"""Names `load` for `--custom-weight-loader` and as `load_format`."""
APPLIED = "areal_like: weights have the digest "
HOOKED = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Width in bytes → a type that NumPy and torch share."""
_STRIDE = 1 << 22
"""Words of which the digest is computed at once: bounds its temporaries."""


class LoaderError(RuntimeError):
    """The weights are wrong after a patch was applied."""


class LoaderUnable(RuntimeError):
    """This server stores the weights in a way that patches cannot follow."""


class LoaderRefused(RuntimeError):
    """A model or server that can never follow the published weights: another try would not help."""


class Box:
    """Elements [start, start + size) of one of our tensors, in every dimension: `target`, a view of a parameter."""

    def __init__(self, shape: tuple[int, ...], source: Tensor, target: Tensor):
        whole = torch.empty(shape, device="meta")
        if source.dim() != len(shape) or source.shape != target.shape:
            raise LoaderUnable("a tensor is stored under another shape")
        if any(n > 1 and a != b for n, a, b in zip(source.shape, source.stride(), whole.stride(), strict=True)):
            raise LoaderUnable("a tensor is stored in another order")
        start, left = [], source.storage_offset()
        for stride in whole.stride():
            start.append(left // stride)
            left %= stride
        self.start, self.size, self.target = tuple(start), tuple(source.shape), target

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def scatter(self, at: Sequence[Tensor], values: Tensor) -> None:
        """Write values [n] at coordinates `at` of the whole tensor, int64 [n] per dimension; others' stay out."""
        inside = torch.ones(len(values), dtype=torch.bool, device=values.device)
        local = []
        for where, start, size in zip(at, self.start, self.size, strict=True):
            local.append(where - start)
            inside &= (where >= start) & (where < start + size)
        self.target.index_put_(tuple(each[inside] for each in local), values[inside].to(self.target.dtype))


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


class ParameterMap:
    """Where each of our tensors lies in `model`: name → boxes. Raises LoaderUnable where that can't be found out,
    LoaderRefused for a model that computes weights of its own from these."""

    def __init__(self, model: torch.nn.Module, specs: list[TensorSpec]):
        _refuse_derived(model)
        self.specs, self.layout = specs, layout_of(model)
        storages = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self.boxes: dict[str, list[Box]] = {}
        for spec in specs:
            meta = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            storage = meta.untyped_storage()._cdata
            try:
                with torch.no_grad(), _Copies() as copies:
                    model.load_weights([(spec.name, meta)])  # type: ignore[operator]
            except Exception as error:
                raise LoaderUnable(f"{spec.name}: the model's loader needs its values ({error})") from None
            if any(source.untyped_storage()._cdata != storage for source, _ in copies.noted):
                raise LoaderUnable(f"{spec.name}: the model's loader changes it on its way")
            if any(target.untyped_storage().data_ptr() not in storages for _, target in copies.noted):
                raise LoaderUnable(f"{spec.name}: the model's loader puts it elsewhere than into a parameter")
            self.boxes[spec.name] = [Box(spec.shape, source, target) for source, target in copies.noted]

    @torch.no_grad()
    def apply(self, change: Change) -> None:
        spec, boxes = change.spec, self.boxes[change.spec.name]
        if not boxes:
            return
        device = boxes[0].target.device
        values = _as_values(change.bits, spec.dtype).to(device)
        if change.places is None:
            whole = values.view(spec.shape)
            for box in boxes:
                box.target.copy_(whole[box.slices])
            return
        at = torch.unravel_index(torch.from_numpy(change.places).to(device), spec.shape)
        for box in boxes:
            box.scatter(at, values)

    @torch.no_grad()
    def digest(self, group: Any = None) -> str:
        """Of all weights, read back from the parameters; with a `group` of processes, from those of all of them. Raises
        LoaderError where a place is missing, or two that should hold the same do not; LoaderRefused where the model has
        no place for a tensor."""
        lanes, first, words = torch.zeros(2, dtype=torch.int64), 0, 0
        for spec in self.specs:
            bits = self._bits(spec, group)
            lanes += lanes_of(bits, first).cpu()
            first += spec.space // 8
            words += spec.space // 8
        return words_digest.text_of(lanes.numpy().view(np.uint64), words)

    def _bits(self, spec: TensorSpec, group: Any) -> Tensor:
        """A tensor as words, int64 [space / 8]. Each element is found by its largest and its smallest value over all of
        its places: they are equal where all agree, and there is a place at all."""
        boxes, shared = self.boxes[spec.name], _BITS[spec.itemsize]
        device = boxes[0].target.device if boxes else torch.device("cpu")
        low = torch.full(spec.shape, torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)
        high = torch.full(spec.shape, torch.iinfo(torch.int32).min, dtype=torch.int32, device=device)
        for box in boxes:
            values = box.target.to(getattr(torch, spec.dtype)).contiguous()
            if values.dtype != box.target.dtype and not torch.equal(values.to(box.target.dtype), box.target):
                low[box.slices], high[box.slices] = 0, 1  # no published bits stand for these
                continue
            bits = values.view(shared).to(torch.int32)
            low[box.slices] = torch.minimum(low[box.slices], bits)
            high[box.slices] = torch.maximum(high[box.slices], bits)
        if group is not None:
            torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group=group)
            torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX, group=group)
        if low.numel() and bool((low > high).all()):
            raise LoaderRefused(
                f"{spec.name}: SGLang's model has no place for a tensor of that name (mixtures of experts go by other "
                "names there, and are not supported yet): use engine=torch, or another model"
            )
        if not torch.equal(low, high):
            wrong = int((low != high).sum())
            kinds = ", ".join(f"{tuple(box.size)} {box.target.dtype} from {box.start}" for box in boxes)
            raise LoaderError(
                f"{spec.name}: not all of it is stored, or its copies differ ({wrong} elements of {list(spec.shape)} "
                f"{spec.dtype}; it is in {len(boxes)} places: {kinds})"
            )
        words = torch.zeros(spec.space, dtype=torch.uint8, device=device)
        words[: spec.nbytes] = low.to(shared).flatten().view(torch.uint8)
        return words.view(torch.int64)


def layout_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Which memory each parameter is, and how it is cut. SGLang may bind a parameter to other memory after an update
    (packing, shuffling for a kernel); places that were found before are then nobody's weights any more."""
    return [
        (name, each.data_ptr(), each.untyped_storage().data_ptr(), each.dtype, tuple(each.shape), each.stride())
        for name, each in model.named_parameters()
    ]


def _refuse_derived(model: torch.nn.Module) -> None:
    """Raises LoaderRefused for a model that keeps weights derived from those it is given: a patch does not reach them,
    and no digest of what was given tells that they are old."""
    if hasattr(model, "post_load_weights"):
        raise LoaderRefused(
            f"{type(model).__name__} computes further weights from those it is given (post_load_weights), which would "
            "stay old: engine=sglang does not support it yet; use engine=torch, or another model"
        )


def _as_values(bits: np.ndarray, dtype: str) -> Tensor:
    shared = _BITS[bits.itemsize]
    plain = np.ascontiguousarray(bits).view({1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize])
    return torch.from_numpy(plain.copy()).view(shared).view(getattr(torch, dtype))


def lanes_of(words: Tensor, first: int) -> Tensor:
    """`areal_like.weights.digest.lanes_of` on the words' device: int64 [2] (the same bits as uint64)."""
    lanes = torch.zeros(2, dtype=torch.int64, device=words.device)
    k, a, b = (int(each.view(np.int64)) for each in (words_digest.K, words_digest.A, words_digest.B))
    for start in range(0, words.numel(), _STRIDE):
        part = words[start : start + _STRIDE]
        x = part + torch.arange(first + start, first + start + part.numel(), device=words.device) * k
        x = (x ^ _shifted(x, 30)) * a
        x = (x ^ _shifted(x, 27)) * b
        x = x ^ _shifted(x, 31)
        lanes += torch.stack([x.sum(), ((x & 0xFFFFFFFF) * _shifted(x, 32)).sum()])
    return lanes


def _shifted(x: Tensor, by: int) -> Tensor:
    """Right shift that fills with zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)


_KNOWN: WeakKeyDictionary[torch.nn.Module, ParameterMap] = WeakKeyDictionary()


def apply(model: torch.nn.Module, patch: Patch, group: Any = None) -> str:
    """Apply a patch and return the digest of what is there then. Raises LoaderError unless it is the patch's; with a
    `group`, in all of its processes if in one."""
    problem = ""
    try:
        places = _KNOWN.get(model)
        if places is None or places.specs != patch.specs or places.layout != layout_of(model):
            places = _KNOWN[model] = ParameterMap(model, patch.specs)
        for change in patch.changes:
            places.apply(change)
    except Exception as error:
        if group is None:
            raise
        log.exception("weights were not applied")
        problem = f"{type(error).__name__}: {error}"
    if group is not None:
        _agree(problem, group, next(model.parameters()).device)
    assert places is not None
    digest = places.digest(group)
    if digest != patch.digest:
        raise LoaderError(f"the weights have the digest {digest} where it should be {patch.digest}")
    return digest


def _agree(problem: str, group: Any, device: torch.device) -> None:
    """Raises LoaderError in all of the group if one has a problem: none may wait for one that has given up."""
    failed = torch.tensor([int(bool(problem))], device=device)
    torch.distributed.all_reduce(failed, group=group)
    if failed.item():
        raise LoaderError(problem or "another process of this server could not apply them")


def load(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """The custom loader, for a server without the plugin. It cannot report a failure to its caller, and must not
    raise."""
    try:
        apply(model, read(named_tensors[0][1].cpu().numpy()))
    except Exception:
        log.exception("weights were not applied, and the plugin that would tell of it is missing")


def _group() -> Any:
    """The processes that share a model by tensor parallelism; None where there is one."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return group.device_group if group.world_size > 1 else None


def answered(original: Callable, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """In place of the updater's own method: (success, message), whatever happens. That a server does not hold the
    weights which it is asked for is no failure, and the answer does not confirm them."""
    asked = False
    try:
        if kwargs.get("load_format") != LOAD_FORMAT:
            return original(updater, *args, **kwargs)
        _refuse_with_sglang(updater)
        patch = read(kwargs["named_tensors"][0][1].cpu().numpy())
        asked = not patch.changes
        return True, APPLIED + apply(updater.get_model(), patch, _group())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        log.log(logging.INFO if asked else logging.WARNING, "weights were not applied: %s", problem)
        return asked, problem


def _refuse_with_sglang(updater: Any) -> None:
    """Raises LoaderRefused where SGLang's own method, in whose place this runs, would refuse any new weights."""
    derived = getattr(sys.modules[type(updater).__module__], "_unsupported_derived_weight_cache_error", None)
    if derived and (problem := derived(updater.get_model())):
        raise LoaderRefused(problem)
    if hasattr(updater, "_assert_weight_cache_inactive"):
        try:
            updater._assert_weight_cache_inactive("update_weights_from_tensor")
        except RuntimeError as error:
            raise LoaderRefused(str(error)) from None


def install() -> None:
    """The plugin: called once in each process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, answered, HookType.AROUND)
