"""Runs inside an SGLang server: applies patches of weights (`sglang_patch`) to its parameters, and reports the true
result. Needs torch, NumPy, and only the objects that SGLang passes to it.

`sglang_boxes` finds where each of our elements lies in the parameters, and a patch is scattered there. After every
patch the digest of all parameters (`sglang_digest`) is compared. SGLang ignores what a custom loader returns, and ends
when it raises. So `install`, a plugin of SGLang (`sglang.srt.plugins`), wraps the call around it: a failure becomes an
answer with `success` false, an applied patch one with `APPLIED` and the digest. An answer without these comes from a
server without the plugin: `load`, the custom loader itself, can only log errors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from actors.engines.sglang_boxes import Box, LoaderRefused, boxes_of
from actors.engines.sglang_digest import DigestTally, LoaderError, gathered, summed
from actors.engines.sglang_patch import Patch, TensorChange, read

log = logging.getLogger(__name__)
LOAD_FORMAT = "actors.engines.sglang_loader.load"
"""Names `load` for `--custom-weight-loader` and as `load_format`."""
APPLIED = "areal_like: weights have the digest "
HOOKED = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
PINNING = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
PLACES = 1 << 18
"""Changed elements that are written at once: bounds the temporaries (a few hundred bytes each)."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Width in bytes → a type that NumPy and torch share."""


class ParameterMap:
    """Where each of our tensors lies in `model`, and the digest of what is there. With a `group`, in all of its
    processes alike. Raises as `boxes_of` and `DigestTally` do, and LoaderRefused for a model that computes weights
    of its own from these."""

    def __init__(self, model: torch.nn.Module, patch: Patch, group: Any = None):
        specs = patch.specs
        self.known, self.layout = (specs, patch.stored), layout_of(model)
        problem, boxes = None, {spec.name: list[Box]() for spec in specs}
        try:
            boxes = boxes_of(model, specs, patch.stored)
        except Exception as error:
            problem = error
        problems = [each for each in gathered(problem and f"{type(problem).__name__}: {problem}", group) if each]
        if problems:  # none may wait for one that has given up
            raise problem or LoaderError(problems[0])
        self.tally = DigestTally(specs, boxes, group)

    @torch.no_grad()
    def apply(self, change: TensorChange) -> None:
        spec, values = change.spec, _as_values(change.bits, change.spec.dtype)
        for box in (copy.box for copy in self.tally.copies[spec.name]):
            if change.places is None:
                box.target.copy_(values.view(spec.shape)[box.slices])
                continue
            for first in range(0, len(change.places), PLACES):
                places = torch.from_numpy(change.places[first : first + PLACES]).to(box.target.device)
                inside, local = box.inside(places)
                new = values[first : first + PLACES].to(box.target.device)[inside]
                box.target.index_put_(local, new.to(box.target.dtype))


def layout_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Which memory each parameter is, and how it is cut. SGLang may bind a parameter to other memory after an update
    (packing, shuffling for a kernel); places that were found before are then nobody's weights any more."""
    return [
        (name, each.data_ptr(), each.untyped_storage().data_ptr(), each.dtype, tuple(each.shape), each.stride())
        for name, each in model.named_parameters()
    ]


def derive(model: torch.nn.Module) -> None:
    """Have a model compute again what it keeps besides the weights that it is given (`post_load_weights`; of latent
    attention, parts of `kv_b_proj` that its decode steps multiply by). SGLang's own loaders do so after each load."""
    again = getattr(model, "post_load_weights", None)
    if again is not None:
        again()


def _as_values(bits: np.ndarray, dtype: str) -> Tensor:
    shared = _BITS[bits.itemsize]
    plain = np.ascontiguousarray(bits).view({1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize])
    return torch.from_numpy(plain).view(shared).view(getattr(torch, dtype))


_KNOWN: WeakKeyDictionary[torch.nn.Module, ParameterMap] = WeakKeyDictionary()


def apply(model: torch.nn.Module, patch: Patch, group: Any = None) -> str:
    """Apply a patch and return the digest of what is there then. Raises LoaderError unless it is the patch's; with a
    `group`, in all of its processes if in one."""
    places, problem = _map_of(model, patch, group), ""
    try:
        for change in patch.changes:
            places.apply(change)
        if patch.changes:
            with torch.no_grad():
                derive(model)
    except Exception as error:
        if group is None:
            raise
        log.exception("weights were not applied")
        problem = f"{type(error).__name__}: {error}"
    digest = places.tally.digest(problem)
    if digest != patch.digest:
        raise LoaderError(f"the weights have the digest {digest} where it should be {patch.digest}")
    return digest


def _map_of(model: torch.nn.Module, patch: Patch, group: Any) -> ParameterMap:
    """The one of the last patch, unless something has moved since, in any process."""
    known = _KNOWN.get(model)
    wanted = (patch.specs, patch.stored)
    moved = torch.tensor([int(known is None or known.known != wanted or known.layout != layout_of(model))])
    summed(moved, group)
    if moved or known is None:
        _KNOWN.pop(model, None)
        known = _KNOWN[model] = ParameterMap(model, patch, group)
    return known


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
    return group.cpu_group if group.world_size > 1 else None


def answered(original: Callable, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """In place of the updater's own method: (success, message), also after any error. That a server does not hold the
    weights which it is asked for is no failure, and the answer does not confirm them."""
    asked = False
    try:
        if kwargs.get("load_format") != LOAD_FORMAT:
            _KNOWN.clear()
            return original(updater, *args, **kwargs)
        group = _group()
        patch = read(kwargs["named_tensors"][0][1].cpu().numpy())
        _refuse_with_sglang(updater)
        asked = not patch.changes
        return True, APPLIED + apply(updater.get_model(), patch, group)
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


def unpinned(original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """In place of SGLang's own allocation of memory that CUDA can copy from, in which it keeps the experts it returns:
    a server without CUDA would end there."""
    return original(*args, **kwargs | ({} if torch.cuda.is_available() else {"pin_memory": False}))


def install() -> None:
    """The plugin: called once in each process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, answered, HookType.AROUND)
    HookRegistry.register(PINNING, unpinned, HookType.AROUND)
