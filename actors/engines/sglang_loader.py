"""Runs inside an SGLang server: applies patches of weights (`sglang_boxes`) to its parameters, and reports the true
result. Needs torch, NumPy, and only the objects that SGLang passes to it.

`sglang_boxes` finds where each of our elements lies in the parameters, and a patch is scattered there. After every
patch the digest of all parameters is compared. `install`, a plugin of SGLang, wraps SGLang's own method (`answered`).
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from actors.engines.sglang_boxes import Box, LoaderRefused, Patch, boxes_of, read
from areal_like.weights.digest import text_of
from areal_like.weights.state import ALIGN, TensorSpec

log = logging.getLogger(__name__)
LOAD_FORMAT = "areal_like"
"""Of a patch. A server without the plugin raises for it, and ends."""
APPLIED = "areal_like: weights have the digest "
HOOKED = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
PINNING = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
PLACES = 1 << 18
"""Changed elements that are written at once: bounds the temporaries (a few hundred bytes each)."""


class LoaderError(RuntimeError):
    """The weights are wrong after a patch was applied."""


class ParameterMap:
    """Where each of our tensors lies in `model`, and the digest of what is there, over all processes of a `group`.
    Raises LoaderRefused where there is no place for a tensor, or it is stored in a way that can't be followed.

    A box that several places hold (a tied weight, what tensor parallelism replicates) counts once in the digest, and
    all of its copies must have the same lanes: processes exchange 16 bytes per box for an update.
    """

    def __init__(self, model: torch.nn.Module, patch: Patch, group: Any = None):
        self.known, self.layout, self._group = (patch.specs, patch.stored), layout_of(model), group
        self._boxes, problem = list[Box](), None
        try:
            self._boxes = boxes_of(model, patch.specs, patch.stored)
        except Exception as error:
            problem = error
        mine = problem and f"{type(problem).__name__}: {problem}", [(box.spec.name, box.key) for box in self._boxes]
        everywhere = gathered(mine, group)
        problems = [each for each, _ in everywhere if each]
        if problems:  # none may wait for one that has given up
            raise problem or LoaderError(problems[0])
        copies = [each for _, keys in everywhere for each in keys]
        owners = {each: index for index, each in reversed([*enumerate(copies)])}
        self._names, self._owners = [name for name, _ in copies], np.array([owners[each] for each in copies], np.int64)
        self._first, words = dict[str, int](), 0
        for spec in patch.specs:
            self._first[spec.name] = words
            words += spec.space // ALIGN
        self._words = words
        _check(patch.specs, owners)

    @torch.no_grad()
    def apply(self, patch: Patch) -> None:
        held: dict[str, list[Box]] = {}
        for box in self._boxes:
            held.setdefault(box.spec.name, []).append(box)
        for index, (spec, bits) in enumerate(patch.state().tensors() if patch.changes else ()):
            if index not in patch.changes or spec.name not in held:  # another process may have all of its boxes
                continue
            values = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, spec.dtype))
            boxes, packed = held[spec.name], patch.changes[index]
            if packed is None:
                for box in boxes:
                    box.take(values)
                continue
            places = np.frombuffer(packed, np.uint32).astype(np.int64)
            for first in range(0, len(places), PLACES):
                part, device = torch.from_numpy(places[first : first + PLACES]), boxes[0].target.device
                at, new = part.to(device), values[part].to(device)
                for box in boxes:
                    box.take_at(at, new)

    @torch.no_grad()
    def digest(self, problem: str = "") -> str:
        """Of the weights of all processes. Raises LoaderError where copies differ, or one process has a `problem`."""
        lanes = np.zeros((0, 2), np.uint64)
        try:
            if not problem and self._boxes:
                found = torch.stack([box.lanes(self._first[box.spec.name]) for box in self._boxes]).cpu().numpy()
                lanes = np.ascontiguousarray(found[:, :2]).view(np.uint64)
                if odd := [f"{box.spec.name} ({n})" for box, n in zip(self._boxes, found[:, 2], strict=True) if n]:
                    problem = f"LoaderError: no published bits stand for elements of {', '.join(odd[:5])}"
        except Exception as error:  # the others wait for this one
            problem = f"{type(error).__name__}: {error}"
        everywhere = gathered((problem, lanes), self._group)
        if problems := [each for each, _ in everywhere if each]:
            raise LoaderError(problem or problems[0])
        lanes = np.concatenate([each for _, each in everywhere])
        unlike = np.flatnonzero((lanes != lanes[self._owners]).any(axis=1))
        if len(unlike):
            raise LoaderError(f"copies of the weights differ: {', '.join(self._names[i] for i in unlike[:5])}")
        return text_of(lanes[np.unique(self._owners)].sum(axis=0, dtype=np.uint64), self._words)


def _check(specs: Sequence[TensorSpec], held: Any) -> None:
    """Whether boxes `held` (name, key) tile the tensors, each of whole words. Raises LoaderRefused."""
    boxes: dict[str, list[Box]] = {spec.name: [] for spec in specs}
    spec_of = {spec.name: spec for spec in specs}
    for name, (start, size) in held:
        boxes[name].append(Box(spec_of[name], start, size, torch.empty(size, device="meta")))
    for spec in specs:
        found = sum(box.count for box in boxes[spec.name])
        if spec.count and not found:
            raise LoaderRefused(f"{spec.name}: SGLang's model has no place for it; use engine=torch, or another model")
        if found != spec.count:
            what = "overlap" if found > spec.count else f"are not all of it ({found} of {spec.count} elements)"
            raise LoaderRefused(f"{spec.name}: the places that hold parts of it {what}")
        if not all(box.is_of_words for box in boxes[spec.name]):
            raise LoaderRefused(f"{spec.name}: it is cut up in the middle of words of {ALIGN} bytes")


def layout_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """The memory of each parameter. SGLang may bind one to other memory after an update (packing, shuffling for a
    kernel); places that were found before are then nobody's weights any more."""
    return [(each.data_ptr(), each.dtype, tuple(each.shape), each.stride()) for each in model.parameters()]


_KNOWN: WeakKeyDictionary[torch.nn.Module, ParameterMap] = WeakKeyDictionary()


def apply(model: torch.nn.Module, patch: Patch, group: Any = None) -> str:
    """Apply a patch; returns the digest. Raises LoaderError unless it is the patch's, in all of a `group` alike."""
    places, problem = _map_of(model, patch, group), ""
    try:
        places.apply(patch)
        # What a model computes from its weights (latent attention: parts of `kv_b_proj`), as SGLang's own loaders do.
        if patch.changes and hasattr(model, "post_load_weights"):
            with torch.no_grad():
                model.post_load_weights()  # type: ignore[operator]
    except Exception as error:
        log.exception("weights were not applied")
        problem = f"{type(error).__name__}: {error}"
    digest = places.digest(problem)
    if digest != patch.digest:
        raise LoaderError(f"the weights have the digest {digest} where it should be {patch.digest}")
    return digest


def _map_of(model: torch.nn.Module, patch: Patch, group: Any) -> ParameterMap:
    """The one of the last patch, unless something has moved since, in any process."""
    known = _KNOWN.get(model)
    fits = known is not None and known.known == (patch.specs, patch.stored) and known.layout == layout_of(model)
    if known is None or not all(gathered(fits, group)):
        _KNOWN.pop(model, None)
        known = _KNOWN[model] = ParameterMap(model, patch, group)
    return known


def gathered(mine: Any, group: Any) -> list[Any]:
    """What each process of the group has."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def _group() -> Any:
    """The processes that share a model by tensor parallelism; None where there is one."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return group.cpu_group if group.world_size > 1 else None


def answered(original: Callable, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """In place of the updater's own method: (success, message), also after any error."""
    try:
        if kwargs.get("load_format") != LOAD_FORMAT:
            _KNOWN.clear()
            return original(updater, *args, **kwargs)
        group = _group()
        patch = read(kwargs["named_tensors"][0][1].cpu().numpy().tobytes().decode())
        # SGLang's own method, in whose place this runs, refuses new weights for some models.
        refusal = getattr(sys.modules[type(updater).__module__], "_unsupported_derived_weight_cache_error", None)
        if refusal and (problem := refusal(updater.get_model())):
            raise LoaderRefused(problem)
        return True, APPLIED + apply(updater.get_model(), patch, group)
    except Exception as error:
        log.warning("weights were not applied: %s: %s", type(error).__name__, error)
        return False, f"{type(error).__name__}: {error}"


def unpinned(original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """In place of SGLang's own allocation of memory that CUDA can copy from, in which it keeps the experts it returns:
    a server without CUDA would end there."""
    return original(*args, **kwargs | ({} if torch.cuda.is_available() else {"pin_memory": False}))


def install() -> None:
    """The plugin: called once in each process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, answered, HookType.AROUND)
    HookRegistry.register(PINNING, unpinned, HookType.AROUND)
