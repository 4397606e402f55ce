"""The names under which SGLang's loaders know tensors that transformers holds otherwise: those of checkpoints.

transformers keeps the experts of a layer in one tensor, and turns checkpoints into that while it loads them. Its
reverse conversion runs here on tensors without data (torch's meta device), whose parts tell where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.engines.sglang_patch import Stored
from areal_like.weights.state import TensorSpec


class _Views(TorchDispatchMode):
    """Copies of data-less tensors stay views of what they are made from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def stored_names(model: PreTrainedModel, specs: Sequence[TensorSpec]) -> Stored:
    """Of each tensor that a checkpoint has under other names, or in parts: those. Raises ValueError where what a
    checkpoint has is no part of the model's tensors."""
    unfit = f"engine=sglang can't serve {type(model).__name__}: of its checkpoints,"
    metas = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
    owner = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
    with torch.no_grad(), _Views():
        found = revert_weight_conversion(model, dict(metas))
    stored: Stored = {}
    for name, view in found.items():
        if name in metas and owner.get(view.untyped_storage()._cdata) == name and view.shape == metas[name].shape:
            continue
        if (whole := owner.get(view.untyped_storage()._cdata)) is None:
            raise ValueError(f"{unfit} {name} is no part of a parameter")
        stored.setdefault(whole, []).append((name, tuple(view.shape), view.stride(), view.storage_offset()))
    for whole, parts in stored.items():
        shape = metas[whole].shape
        if sum(torch.Size(part[1]).numel() for part in parts) != shape.numel():
            raise ValueError(f"{unfit} the parts of {whole} are not all of it")
    return stored
