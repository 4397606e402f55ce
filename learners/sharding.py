"""Prepares a model's layers for training: sharding over ranks (FSDP2), activation checkpointing, compiling.

`fully_shard` (torch.distributed.fsdp; ZeRO stage 3, arXiv 1910.02054) gives each rank a part of every parameter, its
gradient and its optimizer state, and gathers a layer's parameters when it computes. Gradients are SUMS over ranks: the
loss is divided by the denominator of the whole minibatch. Every rank must make the same number of forward and backward
passes.
"""

import functools
import os
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_like.models.causal_lm import handed_on, layers_of, round_inputs, weight_files
from areal_like.models.compiling import Compiling
from areal_like.weights.state import TensorSpec
from learners.collectives import Ranks
from learners.logprobs import PLAIN, compiled, use_logprob_head


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def recompute(model: PreTrainedModel) -> None:
    """Keep only the inputs of each layer for the backward pass (arXiv 1604.06174)."""
    for layer in layers_of(model):
        layer.forward = functools.partial(_recomputed, layer.forward)


CPU = torch.device("cpu")
COMPILED = {"cuda"}
"""Types of devices on which torch compiles what the head does with logits, too."""


@dataclass(frozen=True)
class Computing:
    """How models compute; the learner's knobs of these names say what each means. `hold_in`: the dtype of weights while
    layers compute; None: that of the parameters. `entropy_gradient`: is it needed?"""

    max_logits: int
    entropy_gradient: bool = True
    compiling: Compiling = field(default_factory=lambda: Compiling(False))
    checkpoint_activations: bool = False
    hold_in: torch.dtype | None = None
    device: torch.device = CPU
    published: torch.dtype = torch.bfloat16


def hold_in(
    params: str | None, compute: str | None, published: str, model: PreTrainedModel, where: str, lora: bool
) -> Any:
    """The dtype of weights while layers compute, for these knobs of the learner; with `lora` that of the layers' frozen
    matrices alone. None: as they are. Raises ValueError where weights would be rounded."""
    lossless = compute == published == "bfloat16" and model.dtype != torch.float64
    if params == "bfloat16" and not lossless:
        raise ValueError(
            "learner.param_dtype=bfloat16 needs compute_dtype=bfloat16 and publish_dtype=bfloat16: "
            "it would round weights otherwise"
        )
    wanted = params or ("bfloat16" if where == "cuda" or lora else "float32")
    return torch.bfloat16 if lossless and wanted == "bfloat16" else None


def prepare(models: list[PreTrainedModel], ranks: Ranks, how: Computing) -> None:
    """Apply the logprob head and everything that `how` has, in the one order that works. On a GPU all of this process's
    sums get one order, so that a replay gives the same bits: else attention's backward pass and the gradients of shared
    prefixes add up as threads finish."""
    if how.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's own size on newer GPUs
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
    chains = compiled(how.compiling) if how.compiling.on and how.device.type in COMPILED else PLAIN
    for model in dict.fromkeys(models):
        use_logprob_head(model, how.max_logits, entropy_gradient=how.entropy_gradient, chains=chains)
        if how.hold_in:
            keep_states_wide(model, how.hold_in)
        for layer in layers_of(model) if how.compiling.on else ():
            layer.forward = how.compiling.wrap(layer.forward, f"the layers of {type(model).__name__}")
        if how.checkpoint_activations:
            recompute(model)
        if ranks.count > 1:
            shard(model, ranks, how.device, how.hold_in)
            fill(model, ranks, how.device, None if any(p.requires_grad for p in model.parameters()) else how.published)
        elif how.hold_in and not any(p.requires_grad for p in model.parameters()):
            for p in model.parameters():  # of a model that is trained, the optimizer holds them
                p.data = p.data.to(how.hold_in)


def keep_states_wide(model: PreTrainedModel, half: torch.dtype) -> None:
    """Keep states between layers, norms and rotary angles in float32, with products in `half`, as autocast and engines
    do. Models whose norms take one dtype only (LayerNorm) are left as they are."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    if any(isinstance(norm, nn.LayerNorm) for norm in norms):
        return
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output.float())
    round_inputs(model, half)


def shard(model: PreTrainedModel, ranks: Ranks, device: torch.device, hold_in: torch.dtype | None = None) -> None:
    """Leave each rank its part of every parameter, on `device`. Layer by layer: it never holds the whole model."""
    ranks.barrier()  # they read models at their own speed
    mesh = init_device_mesh(device.type, (ranks.count,))
    policy = MixedPrecisionPolicy(hold_in, torch.float32 if hold_in else None, cast_forward_inputs=False)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other


def reshard(model: nn.Module) -> None:
    """Forget gathered parameters: FSDP keeps those of the root after a forward pass without gradient."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """The flat weights of all ranks, one parameter after another, from each rank's [n]: its rows of every parameter, as
    FSDP cuts them (torch.chunk). Raises ValueError for other sizes."""
    at, rows = [0] * len(parts), list[Tensor]()
    for parameter in parameters:
        for rank, own in enumerate(parameter.chunk(len(parts))):
            rows.append(parts[rank][at[rank] : at[rank] + own.numel()])
            at[rank] += own.numel()
    if at != (sizes := [len(part) for part in parts]):
        raise ValueError(f"the parts have {sizes} weights, and those of this model {at}")
    return torch.cat(rows)


class LazyWeights(UserDict[str, Tensor]):
    """A view of other weights by name, whose values are made when they are looked up."""

    data: Any

    def __init__(self, weights: Mapping[str, Tensor]):
        self.data = weights


class OwnPart(LazyWeights):
    """The elements of each weight that this rank publishes, by name and flat: the words that begin in its shard
    (`areal_like.weights.state`). With one rank, the weights as they are. A shard may end within a word: later ranks
    send the elements that it lacks, so all must create one of these, and look up the same names, at the same time."""

    def __init__(self, weights: Mapping[str, Tensor], specs: Sequence[TensorSpec], ranks: Ranks):
        super().__init__(weights)
        self._specs, self._ranks = {spec.name: spec for spec in specs}, ranks
        edges = [(spec, *edge) for spec in specs for edge in _edges(spec, ranks.count)]
        self._lacking: dict[str, Tensor] = {}
        if not edges:
            return
        values = torch.cat([self._known(*edge) for edge in edges])
        ranks.sum_tensor(values)  # as bits: one rank knows each of them, all others have zero
        stretches = values.split([end - first for *_, first, end in edges])
        for (spec, rank, *_), bits in zip(edges, stretches, strict=True):
            if rank == ranks.rank:
                self._lacking[spec.name] = bits.view(torch.float32)

    def _known(self, spec: TensorSpec, _: int, first: int, end: int) -> Tensor:
        """int32 [end - first]: the bits of those elements of a stretch that are in this rank's shard."""
        begin, stop = spec.shards(self._ranks.count)[self._ranks.rank :][:2]
        bits, own = torch.zeros(end - first, dtype=torch.int32), own_part(self.data[spec.name].detach())
        a, b = max(first, begin), min(end, stop)
        if a < b:
            shard = own.reshape(-1)[a - begin : b - begin]
            bits[a - first : b - first] = shard.float().view(torch.int32).cpu()
        return bits

    def __getitem__(self, name: str) -> Tensor:
        own, spec, ranks = own_part(self.data[name].detach()), self._specs[name], self._ranks
        if ranks.count == 1:
            return own
        begin = spec.shards(ranks.count)[ranks.rank]
        own = own.reshape(-1)[_starts(spec, ranks.count)[ranks.rank] - begin :]
        lacking = self._lacking.get(name)
        return own if lacking is None else torch.cat([own, lacking.to(own.device)])


def _starts(spec: TensorSpec, parts: int) -> list[int]:
    """The first element of each part of the published weights, and the end."""
    return [min(spec.count, cut // spec.itemsize) for cut in spec.cuts(parts)]


def _edges(spec: TensorSpec, parts: int) -> list[tuple[int, int, int]]:
    """(part, first, end) of the elements at the end of a part that are not in the shard of its rank."""
    shards, starts = spec.shards(parts), _starts(spec, parts)
    stretches = [(part, max(shards[part + 1], starts[part]), starts[part + 1]) for part in range(parts)]
    return [(part, first, end) for part, first, end in stretches if first < end]


class Whole(LazyWeights):
    """A model's weights by name, gathered from all ranks one by one as they are looked up. Every rank must look them up
    in the same order. Only saving needs whole weights."""

    def __getitem__(self, name: str) -> Tensor:
        weight = self.data[name].detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight


# A model that was made without memory (`areal_like.models.causal_lm.deferred_weights`): each rank reads the rows of its
# own shards from the safetensors files, so none ever holds a whole model. If no file has a weight in its final form,
# rank 0 makes it in main memory and sends it to the others, one weight at a time.


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
            whole = torch.empty(parameter.shape) if made.tensors is None else made.tensors[name].contiguous()
            ranks.send(whole)
            rows = whole[first : first + len(own)]
        elif own.numel():
            with safe_open(files[name], "pt") as tensors:
                rows = tensors.get_slice(name)[first : first + len(own)]
        if own.numel():
            own.copy_(rows if rounded_to is None else rows.to(rounded_to))
    model._handed_on = None


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
