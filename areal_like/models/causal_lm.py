"""Models that actors and learners share: made from a config or a local folder, and turned into published bits and back.

The model definitions are transformers'. Every process that holds a model builds it here from the same config, so
names, shapes and initial values agree; from then on the published bits decide. All computing on the CPU is done in
float32 on values that the published dtype can represent.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

from areal_like.models.experts import Routing
from areal_like.models.model_folder import ROUTED
from areal_like.weights.replica import Changes
from areal_like.weights.state import ALIGN, State, TensorSpec

logging.disable_progress_bar()  # each has a semaphore, which a role that is ended would leave behind
_BITS_AS_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32}
"""Width in bytes → a type that NumPy and torch share."""


def qwen2(  # noqa: PLR0913 - the knobs are those of Qwen2Config
    seed: int,
    vocab_size: int,
    *,
    hidden_size: Annotated[int, "[1, inf)"] = 32,
    num_hidden_layers: Annotated[int, "[1, inf)"] = 2,
    num_attention_heads: Annotated[int, "[1, inf)"] = 2,
    num_key_value_heads: Annotated[int, "[1, inf)"] | None = None,
    intermediate_size: Annotated[int, "[1, inf)"] = 64,
    max_position_embeddings: Annotated[int, "[1, inf)"] = 4096,
    rope_theta: Annotated[float, "(0, inf)"] = 100.0,
    initializer_range: Annotated[float, "[0, inf)"] = 0.02,
    tie_word_embeddings: bool = True,
) -> PreTrainedModel:
    """A Qwen2-architecture model from random initial weights that depend only on `seed`; knobs as in Qwen2Config."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads or num_attention_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )

    def made() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen2ForCausalLM(config)

    return _handed_on(config, made) or made()


def pretrained(model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """Mark a model component with trained weights: the defaults for random weights would ruin these
    (`areal_like.config.defaults`)."""
    model.pretrained = True  # type: ignore[attr-defined]
    return model


@pretrained
def folder(seed: int, vocab_size: int, *, path: str) -> PreTrainedModel:
    """A causal language model from a local folder. Raises FileNotFoundError, ValueError (vocabulary, weights)."""
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"model.path: no Hugging Face model in {path!r} (config.json is missing)")
    whole = functools.partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32, local_files_only=True)
    try:
        model = (_skeleton(Path(path)) if _DEFERRED.get() is not None else None) or (
            _handed_on(AutoConfig.from_pretrained(path, local_files_only=True), whole) or whole()
        )
    except SafetensorError as error:
        raise ValueError(f"model.path: the weights in {path!r} can't be read: {error}: get the model again") from error
    if model.config.vocab_size < vocab_size:
        raise ValueError(f"model in {path!r} knows {model.config.vocab_size} token ids; the task uses {vocab_size}")
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("longrope", "dynamic"):
            module.rope_type = "default"  # else all angles depend on the longest sequence (`model_folder.bounds`)
    return model


_DEFERRED: contextvars.ContextVar[bool | None] = contextvars.ContextVar("deferred", default=None)


@contextlib.contextmanager
def deferred_weights(maker: bool = True) -> Iterator[None]:
    """Models made in this context may come without memory for their weights, on the device `meta`: `weight_files` then
    names the files of their weights. If no file has them in this form (random weights, files with other names), one
    process, the `maker`, makes them, and `HandedOn` gives them to the others."""
    token = _DEFERRED.set(maker)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


def weight_files(model: PreTrainedModel) -> dict[str, Path]:
    """Parameter name → the safetensors file that holds it, of a model without weights; empty for one that has them."""
    return getattr(model, "_weight_files", {})


class HandedOn:
    """Weights of a model on `meta` that one process has made. In that process `tensors` has them by name; elsewhere it
    is None. Copies of the model share them."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None):
        self.tensors = tensors

    def __deepcopy__(self, _: object) -> HandedOn:
        return self


def handed_on(model: PreTrainedModel) -> HandedOn | None:
    """The weights of a model that came without; None where files or the model itself have them."""
    return getattr(model, "_handed_on", None)


def _handed_on(config: PretrainedConfig, made: Callable[[], PreTrainedModel]) -> PreTrainedModel | None:
    """The model on `meta`; None where nobody asks for it, or it has buffers that are saved."""
    maker = _DEFERRED.get()
    if maker is None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if set(model.state_dict()) & {name for name, _ in model.named_buffers()}:
        return None
    whole = made() if maker else None
    if whole is not None:
        model.generation_config = whole.generation_config
    model._handed_on = HandedOn(None if whole is None else {n: p.detach() for n, p in whole.named_parameters()})
    return model


def _skeleton(path: Path) -> PreTrainedModel | None:
    """The model of a folder on `meta`. None where its files name or shape tensors otherwise than the model does."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: file for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
    names = [name for name, _ in model.named_parameters()]
    saved = set(model.state_dict())
    if any(name in saved for name, _ in model.named_buffers()) or not all(name in found for name in names):
        return None
    for name, parameter in model.named_parameters():
        with safe_open(found[name], "pt") as tensors:
            if tensors.get_slice(name).get_shape() != list(parameter.shape):
                return None
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    model._weight_files = {name: found[name] for name in names}
    return model


def specs_of(model: PreTrainedModel, dtype: str = "bfloat16") -> list[TensorSpec]:
    """The table of a model's parameters as they are published (a tied weight appears once)."""
    return [TensorSpec(name, dtype, tuple(p.shape)) for name, p in model.named_parameters()]


def _as_torch(spec: TensorSpec, bits: np.ndarray) -> torch.Tensor:
    """The tensor with these bits, flat, in the same memory."""
    return torch.from_numpy(bits.view(_BITS_AS_NUMPY[spec.itemsize])).view(getattr(torch, spec.dtype))


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, in the published dtype, of each part of a state; they share its memory."""
    for spec, bits in state.tensors():
        yield spec.name, _as_torch(spec, bits).view(spec.shape)


@torch.no_grad()
def read_state(tensors: Mapping[str, torch.Tensor], state: State, done: Callable[[int], None] | None = None) -> None:
    """Round tensors to the state's dtypes (nearest even) and write their bits into it; of a state that is a part, the
    elements that it has. `done` receives after each tensor the number of bytes of the buffer written so far."""
    offset = 0
    for spec, bits in state.tensors():
        tensor = tensors[spec.name].detach()
        offset += -(-bits.nbytes // ALIGN) * ALIGN
        _as_torch(spec, bits).view(tensor.shape).copy_(tensor)
        if done:
            done(offset)


@torch.no_grad()
def write_state(state: State, tensors: Mapping[str, torch.Tensor], changes: Changes | None = None) -> None:
    """Copy published bits, or those that `changes.tensors` name, into tensors of the same names and shapes."""
    for index, (spec, bits) in enumerate(state.tensors()):
        source, target = bits if isinstance(bits, torch.Tensor) else _as_torch(spec, bits), tensors[spec.name]
        if changes is None:
            target.copy_(source.view(spec.shape))
            continue
        flat = target.view(-1)
        for where in changes.tensors.get(index, ()):
            if isinstance(where, slice):
                flat[where].copy_(source[where])
            else:
                places = torch.from_numpy(where)
                flat[places.to(flat.device)] = source[places].to(flat.device).to(flat.dtype)


def save_as_published(model: PreTrainedModel, state: State, folder: str) -> None:
    """Write published bits as a Hugging Face folder that `from_pretrained` loads with these very values.

    Config and generation config are the model's own; the weights are in the published dtype, which the config names.
    The tokenizer is the task's to write.
    """
    kept = model.state_dict().keys() - dict(model.named_parameters()).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    model.save_pretrained(folder, state_dict=buffers | dict(tensors_of(state)))
    config = copy.deepcopy(model.config)
    config.dtype = getattr(torch, state.specs[0].dtype)
    config.save_pretrained(folder)
    file = Path(folder) / "config.json"
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | _older_settings(config), indent=2).encode() + b"\n")


def _older_settings(config: PretrainedConfig) -> dict[str, object]:
    """The rotary angles under the names of transformers 4, which ignores `rope_parameters`, and takes others."""
    found = getattr(config, "rope_parameters", None) or {}
    rope, local = found.get("full_attention", found), found.get("sliding_attention")
    kind = rope.get("rope_type", "default")
    outside = ("rope_theta", "partial_rotary_factor", *["original_max_position_embeddings"] * (kind == "longrope"))
    names: dict[str, object] = {name: rope[name] for name in outside if name in rope}
    if kind != "default":
        names["rope_scaling"] = {"type": kind} | {name: rope[name] for name in rope.keys() - {*outside, "rope_type"}}
    return names | ({"rope_local_base_freq": local["rope_theta"]} if local else {})


def state_of(model: PreTrainedModel, dtype: str = "bfloat16") -> State:
    """The model's weights as published bits."""
    state = State(specs_of(model, dtype))
    read_state(dict(model.named_parameters()), state)
    return state


def publishable(model: PreTrainedModel, dtype: str = "bfloat16") -> State:
    """Round the model's weights in place to what `dtype` can represent; returns their bits."""
    state = state_of(model, dtype)
    write_state(state, dict(model.named_parameters()))
    return state


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    decoder: Any = model.get_decoder()
    return list(decoder.layers if hasattr(decoder, "layers") else decoder.h)  # GPT-2's


def routers_of(model: PreTrainedModel) -> list[tuple[int, nn.Module, nn.Module]]:
    """(number of the decoder layer, layer, its router) of each layer that has experts, in order. A router maps hidden
    states [N, H] to (logits [N, experts], weights [N, k], experts [N, k]). Raises ValueError for a model without."""
    kind = model.config.model_type
    layers: list[Any] = layers_of(model) if kind in ROUTED else []
    found = [(i, layer, layer.mlp.gate) for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    if not found:
        raise ValueError(
            f"learner.router_replay needs a mixture-of-experts model of the kinds {', '.join(sorted(ROUTED))}, and "
            f"this one is of {kind}: leave it out"
        )
    return found


def round_inputs(model: PreTrainedModel, dtype: torch.dtype) -> list[nn.Module]:
    """Have the inputs of matrices rounded to `dtype`: those of all linear layers but the head, of routers and experts.
    Returns these modules."""

    def rounded(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)

    head = model.get_output_embeddings()
    found: list[nn.Module] = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    if model.config.model_type in ROUTED:
        for _, layer, router in routers_of(model):
            found += [each for each in (router, layer.get_submodule("mlp.experts")) if each not in found]
    for module in found:
        module.register_forward_pre_hook(rounded)
    return found


def multiplied_into_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in], rounded to the half precision of a weight [out, in], times that → float32 [n, out]. Products of halves
    have few enough digits for float32, which also sums them: only x is rounded. A CPU makes copies of both."""
    x = x.to(weight.dtype)
    if weight.is_cuda:
        found = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        found = torch.mm(x.float(), weight.t().float())
    return found if bias is None else found.add_(bias)


def routing_of(model: PreTrainedModel) -> Routing:
    """Raises as `routers_of`."""
    routers = [router for _, _, router in routers_of(model)]
    return Routing(len(routers), int(routers[0].top_k), int(routers[0].num_experts))  # type: ignore[arg-type]
