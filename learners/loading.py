"""Fills a sharded model that was made without memory (`areal_like.models.causal_lm.deferred_weights`).

Each rank reads the rows of its own shards from the model's safetensors files, tensor by tensor. So no rank ever holds a
whole model, on its device or in main memory. If no file has a weight in its final form, rank 0 makes it in main memory
and sends it to the others, one weight at a time. The learner drives this.
"""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_like.models.causal_lm import HandedOn, handed_on, weight_files
from learners.collectives import Ranks


@torch.no_grad()
def fill(model: PreTrainedModel, ranks: Ranks, device: torch.device, rounded_to: torch.dtype | None = None) -> None:
    """Give a sharded model on `meta` memory on `device`, and the weights of its files or of rank 0, rounded to a dtype
    if one is given. Does nothing to a model that has weights. Raises RuntimeError for buffers that it can't make again.
    """
    files, made = weight_files(model), handed_on(model)
    if not files and made is None:
        return
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, and tied
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    _make_buffers(model, device)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        own = parameter.to_local()
        first = -(-parameter.shape[0] // ranks.count) * ranks.rank
        rows: Tensor
        if made is not None:
            rows = _sent(made, name, parameter.shape, ranks)[first : first + len(own)]
        elif own.numel():
            with safe_open(files[name], "pt") as tensors:
                rows = tensors.get_slice(name)[first : first + len(own)]
        if own.numel():
            own.copy_(rows if rounded_to is None else rows.to(rounded_to))
    model._handed_on = None


def _sent(made: HandedOn, name: str, shape: torch.Size, ranks: Ranks) -> Tensor:
    """A whole tensor, on every rank."""
    tensor = torch.empty(shape) if made.tensors is None else made.tensors[name].contiguous()
    ranks.send(tensor)
    return tensor


def _make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no file holds: angles of rotary embeddings, which depend on the model's config alone."""
    for path, module in model.named_modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
        if not names:
            continue
        if not type(module).__name__.endswith("RotaryEmbedding"):
            raise RuntimeError(f"learner.ranks: the buffers {names} of {path} can't be made without loading the model")
        fresh = type(module)(config=model.config)
        for name in names:
            setattr(module, name, getattr(fresh, name).to(device))
