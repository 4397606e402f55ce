"""LoRA (arXiv 2106.09685) through `peft`: trains small matrices beside the model's frozen weights.

Layers, forward pass and files are peft's. The learner publishes the merged model, base + scale · B A, rounded to the
published dtype, under the model's names without adapters. So actors need not know about LoRA. The learner itself
differentiates the sum before rounding. So on-policy ratios are 1 up to that rounding (exactly 1 in full training). B
starts at 0, so version 0 has the bits that actors start with. With an adapter from a folder (`path`), actors fetch
version 0 like any other version. The learner drives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models.adapter_folder import AdapterFolder, read_adapter

RANK, ALPHA, TARGETS = 16, 32.0, "all-linear"
START = "start"
"""Name of the frozen copy of the run's initial adapter."""


class Adapters:
    """Adds adapters to `model`, in place, with random A that depends on `seed` alone. A matrix's update is `alpha` /
    `rank` · B A. `targets`: names of layers (q_proj, ...), or "all-linear": all but the output head. `path`: a folder
    written by `peft`, whose adapter is trained further. It sets rank, alpha and targets, which may then be left out;
    otherwise their defaults are 16, 32 and all-linear. Its dropout is not applied.

    The model's own weights are rounded to `dtype` and frozen. `reference`: `off` will be used. Raises ImportError
    without peft, ValueError for knobs that make no sense, or an adapter of another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        dtype: torch.dtype,
        reference: bool = False,
        *,
        rank: Annotated[int, "[1, inf)"] | None = None,
        alpha: Annotated[float, "(0, inf)"] | None = None,
        targets: list[str] | str | None = None,
        path: str | None = None,
    ):
        peft = _peft()
        if (1 if rank is None else rank) < 1 or (1 if alpha is None else alpha) <= 0:
            raise ValueError(f"learner.lora: rank and alpha must be positive, got {rank} and {alpha}")
        known = None if path is None else read_adapter(path)
        if known:
            _check(model, known, str(path), rank, alpha, targets)
        self._names = [name for name, _ in model.named_parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if known:
                self._wrapped = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
            else:
                config = peft.LoraConfig(
                    r=rank or RANK, lora_alpha=alpha or ALPHA, target_modules=targets or TARGETS, task_type="CAUSAL_LM"
                )
                self._wrapped = peft.get_peft_model(model, config)
        self._model, self._starts_elsewhere = model, known is not None and reference
        if self._starts_elsewhere:
            self._wrapped.load_adapter(path, START)
        self._wrapped.eval()  # without the dropout of an adapter's folder: actors have none, and replays draw no dice
        held = {id(parameter) for name, parameter in model.named_parameters() if ".base_layer." in name}
        if id(model.get_input_embeddings().weight) in held:
            raise ValueError(
                "learner.lora.targets: the embedding, or a head tied to it, takes no adapter here; leave it out"
            )

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Parameter name without adapters → its value with them, in float32. With several ranks each has its shard; all
        must ask at the same time."""
        weights = {name.replace(".base_layer.", "."): p.detach() for name, p in self._model.named_parameters()}
        merged = {name: weights[name] for name in self._names}
        for name, module in self._model.named_modules():
            if hasattr(module, "get_delta_weight"):
                merged[f"{name}.weight"] = weights[f"{name}.weight"] + module.get_delta_weight("default")
        return merged

    def off(self) -> AbstractContextManager[None]:
        """In this context the model computes as before training: a reference that costs no memory (with `path`: the
        adapter's)."""
        return self._as_it_began() if self._starts_elsewhere else self._wrapped.disable_adapter()

    @contextmanager
    def _as_it_began(self) -> Iterator[None]:
        self._wrapped.set_adapter(START)
        try:
            yield
        finally:
            self._wrapped.set_adapter("default")

    def trained(self) -> dict[str, Tensor]:
        """The adapters' own weights, or this rank's shards of them, by peft's names."""
        return {name: p for name, p in self._wrapped.named_parameters() if p.requires_grad}

    def save(self, folder: str, weights: dict[str, Tensor]) -> None:
        """Write `weights`, whole ones of all names in `trained`, as peft's folder
        (`PeftModel.from_pretrained(base, folder)`)."""
        self._wrapped.save_pretrained(folder, state_dict=weights, selected_adapters=["default"])


def _check(
    model: PreTrainedModel,
    known: AdapterFolder,
    path: str,
    rank: int | None,
    alpha: float | None,
    targets: list[str] | str | None,
) -> None:
    """Raise ValueError for an adapter of another model, or one that contradicts the knobs."""
    told: dict[str, tuple[object, object]] = {"rank": (rank, known.rank), "alpha": (alpha, known.alpha)}
    told["targets"] = (sorted(targets) if isinstance(targets, list) else targets, known.targets)
    for knob, (wanted, found) in told.items():
        if wanted is not None and wanted != found:
            raise ValueError(f"learner.lora.{knob}={wanted}: the adapter in {path!r} has {found}; leave it out")
    layers = dict(model.named_modules())
    for name, shape in known.shapes.items():
        weight = getattr(layers.get(name), "weight", None)
        if weight is None:
            raise ValueError(
                f"learner.lora.path: the adapter in {path!r} belongs to another model: this one has no layer {name}"
            )
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"learner.lora.path: the adapter in {path!r} belongs to another model: {name} is {shape[0]} × "
                f"{shape[1]} there, and {weight.shape[0]} × {weight.shape[1]} here"
            )


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("learner.lora needs peft: pip install 'areal_like[lora]'") from None
    return peft
