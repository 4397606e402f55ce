"""How the embedded engine computes a model: transformers' own forward, or a leaner one for Llama-like models.

    prefill(tokens, positions)         fills the cache from tokens int64 [b, t] at positions [b or 1, t]
    logits(tokens, positions, cache)   → [b, t, vocab]; in a decode step (t = 1) nothing may ask the host

Both read and write a `SlotCache`, after one of its `begin_...`, and the same parameters. With the compute dtype
bfloat16 both hold the layers' matrices in it, once and exactly (these bits are published), and round the inputs of
products; embedding, norms, rotary angles, the residual stream and the head stay in float32, as they do for a learner.
On a GPU `FusedDecoder` also multiplies the head's matrix in bfloat16, into float32 logits, and torch compiles the
operations between two products into one kernel each.

`FusedDecoder` has one matrix product for query, key and value, one for gate and up, and fewer small operations: in
those small models spend much of a decode step on the CPU. Larger ones spend it in matrix products. torch's in float32
go through MKL, which reaches at most half of an AMD core's peak; oneDNN (`product`) reaches most of it, but costs 10 µs
more per call. bfloat16 products are oneDNN's in torch as well. `ModelDecoder` is the reference in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from actors.engines.slot_cache import ATTENTION, SlotCache
from areal_like.models.causal_lm import multiplied_into_float32, round_inputs
from areal_like.models.compiling import Compiling
from areal_like.models.flat_parameters import FlatParameters

ONE_THREAD = 1 << 15
"""Numbers up to which torch computes a function of each in one thread (its grain size)."""
LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3"}
"""`config.model_type` of the models that `FusedDecoder` knows."""
ONEDNN_FROM = 1 << 16
"""Elements of a matrix from which oneDNN is faster than MKL, measured with 64 rows."""
HALF_HEAD = COMPILED = {"cuda"}
"""Devices whose products of halves into float32 cost less than those of float32; on which small operations are
compiled."""
BLOCK = 64
"""Rows of one product where their number must be the same: for 512 rows 32 cost 3.5 times as much, 64 cost 2.4."""


def decoder_for(model: PreTrainedModel, cache: SlotCache) -> ModelDecoder | FusedDecoder:
    """The fastest decoder that fits the model; it multiplies matrices in the dtype of the cache."""
    return FusedDecoder(model, cache) if FusedDecoder.fits(model) else ModelDecoder(model, cache)


class ModelDecoder:
    """transformers' own forward. From here on the model attends through slot caches only. Raises ValueError for a model
    whose layers do not all have full attention, within the window of sliding ones."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache):
        others = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            raise ValueError(f"the embedded engine runs full attention only; this model has {sorted(others)}")
        model.set_attn_implementation(ATTENTION)
        if cache.dtype != model.dtype:
            for module in round_inputs(model, cache.dtype):
                module.to(cache.dtype)
        alone = (([parameter], parameter.dtype) for parameter in model.parameters())
        self.parameters = FlatParameters(alone, cache.keys.device)
        self._model, self._cache = model.to(cache.keys.device), cache  # type: ignore[arg-type] # with its buffers

    def prefill(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        self._model.base_model(tokens, position_ids=positions, use_cache=False, slot_cache=self._cache)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        return self._model(tokens, position_ids=positions, use_cache=False, slot_cache=cache).logits


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer; its matrices are views of the parameters' own memory."""

    scale: float
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    activation: Callable[[torch.Tensor], torch.Tensor]
    norms: tuple[Any, Any]
    head_norms: tuple[Any, Any] | None


class FusedDecoder:
    """The forward of a Llama-like model. The fused matrices become the parameters' memory, so both stay the same."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this class computes exactly what the model's own forward computes."""
        config = model.config
        full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        sliding = getattr(config, "sliding_window", None) is not None
        if config.model_type not in LLAMA_LIKE or not full or sliding or model.dtype != torch.float32:
            return False
        # Llama can be configured with biases where Qwen has none.
        return all(layer.self_attn.o_proj.bias is None and layer.mlp.up_proj.bias is None for layer in _layers(model))

    def __init__(self, model: PreTrainedModel, cache: SlotCache):
        body: Any = model.base_model
        head: Any = model.get_output_embeddings()
        half_head = cache.dtype != torch.float32 and cache.keys.device.type in HALF_HEAD
        stacks = [stack for layer in _layers(model) for stack in _stacks(layer)]
        products = {id(parameter) for stack in stacks for parameter in stack}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in products]
        groups = [(stack, cache.dtype) for stack in stacks]
        # A head in half precision: the embedding is, too, where they are tied.
        groups += [([p], cache.dtype if half_head and p is head.weight else p.dtype) for p in rest]
        self.parameters = FlatParameters(groups, cache.keys.device)
        model.to(cache.keys.device)  # type: ignore[arg-type] # buffers
        layers = [_fuse(layer, self.parameters, cache.batch_invariant) for layer in _layers(model)]
        self._cache = cache
        self._embedding = body.embed_tokens
        self._rotary = body.rotary_emb
        self._head: Callable[..., torch.Tensor] = product(head.weight, head.bias, cache.batch_invariant)
        if half_head:
            self._head = partial(multiplied_into_float32, weight=head.weight.detach(), bias=head.bias)
        self._layers = layers
        self._norms = [norm for layer in layers for norm in layer.norms] + [body.norm]
        self._rotate, self._place = _rotated, _placed
        self._add: Callable[..., Any] = partial(_added, dtype=cache.dtype)
        self._gate: Callable[..., torch.Tensor] = partial(_gated, layers[0].activation)
        self._compiled = cache.keys.device.type in COMPILED
        if self._compiled:
            compiled = partial(Compiling(True).wrap, name="decode steps")
            self._rotate, self._place = compiled(self._rotate), compiled(self._place)
            self._gate, self._add = compiled(self._gate), compiled(self._add)

    def prefill(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        self._hidden(tokens, positions, self._cache, keys_only=True)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        return self._head(self._hidden(tokens, positions, cache)).view(*tokens.shape, -1)

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache, keys_only: bool = False
    ) -> torch.Tensor:
        """→ [b · t, hidden], after the last norm. `keys_only` stops where the cache is filled; the result is void."""
        x = self._embedding(tokens.flatten()).float()
        cos, sin = self._rotary(x, positions)
        cos, sin = cos[:, :, None], _signed(sin)[:, :, None]
        normed = _normed(self._norms[0], x)
        for index, layer in enumerate(self._layers):
            mixed = self._attend(cache, index, layer, normed, (*tokens.shape, cos, sin))
            if keys_only and index + 1 == len(self._layers):
                break
            x, normed = self._joined(layer.out, mixed, x, self._norms[2 * index + 1])
            x, normed = self._joined(layer.down, self._gate(layer.gate_up(normed)), x, self._norms[2 * index + 2])
        return normed

    def _joined(
        self, multiply: Product, x: torch.Tensor, residual: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual plus a product, and its norm."""
        if not self._compiled:
            total = multiply(x, residual)
            return total, _normed(norm, total)
        return self._add(residual, multiply(x), norm.weight, norm.variance_epsilon)

    def _attend(
        self,
        cache: SlotCache,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        place: tuple[int, int, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        b, t, cos, sin = place
        qkv = layer.qkv(x).view(b, t, -1, cache.dim)
        norms = layer.head_norms
        scales = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].variance_epsilon)
        if cache.decoding:
            query = self._place(qkv, cos, sin, scales, *cache.cells(index))
            out = cache.read(index, query.transpose(1, 2), layer.scale)
        else:
            qk, value = qkv[:, :, : -cache.heads], qkv[:, :, -cache.heads :]
            qk = self._rotate(qk, cos, sin, cache.heads, scales).transpose(1, 2)
            query, key = qk[:, : -cache.heads], qk[:, -cache.heads :]
            out = cache.attend(index, query, key, value.transpose(1, 2), layer.scale)
        return out.transpose(1, 2).reshape(b * t, -1)


def _layers(model: PreTrainedModel) -> list[Any]:
    body: Any = model.base_model
    return list(body.layers)


def _stacks(layer: Any) -> list[list[nn.Parameter]]:
    """The parameters of a layer that are multiplied as one: weights of its four products, and the first one's bias."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    products = [qkv, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    weights = [[linear.weight for linear in linears] for linears in products]
    return weights + [[linear.bias for linear in qkv]] * (attention.q_proj.bias is not None)


def _fuse(layer: Any, parameters: FlatParameters, batch_invariant: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, out, gate_up, down, *bias = (parameters.stacked(stack) for stack in _stacks(layer))
    return _Layer(
        scale=attention.scaling,
        qkv=product(qkv, bias[0] if bias else None, batch_invariant),
        out=product(out, None, batch_invariant),
        gate_up=product(gate_up, None, batch_invariant),
        down=product(down, None, batch_invariant),
        activation=_by_rows(mlp.act_fn) if batch_invariant else mlp.act_fn,
        norms=(layer.input_layernorm, layer.post_attention_layernorm),
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
    )


def _by_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same function of [n, m], a few rows at a time: torch cuts more among threads, and computes cuts otherwise."""

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= ONE_THREAD:
            return function(x)
        return torch.cat([function(rows) for rows in x.split(max(1, ONE_THREAD // x.shape[-1]))])

    return by_rows


def _rotated(
    qk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    scales: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Queries and keys [b, t, heads, dim] at their angles, in float32, after the norms of heads that have any."""
    qk = qk.float()
    if scales is not None:
        of_query, of_key, eps = scales
        query, key = qk[:, :, :-kv_heads], qk[:, :, -kv_heads:]
        parts = [F.rms_norm(x, w.shape, w, eps) for x, w in ((query, of_query), (key, of_key))]
        qk = torch.cat(parts, dim=2)
    return (qk * cos).add_(qk.roll(qk.shape[-1] // 2, dims=-1).mul_(sin))


def _placed(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    cells: torch.Tensor,
) -> torch.Tensor:
    """Of queries, keys and values [n, 1, heads, dim]: the queries at their angles, in the cache's dtype, with keys and
    values put into `cells` int64 [n · kv_heads] of the cache's [places, dim]."""
    heads = len(cells) // len(qkv)
    qk, value = qkv[:, :, :-heads], qkv[:, :, -heads:].to(values.dtype)
    qk = _rotated(qk, cos, sin, heads, scales).to(keys.dtype)
    keys.index_copy_(0, cells, qk[:, :, -heads:].reshape(len(cells), -1))
    values.index_copy_(0, cells, value.reshape(len(cells), -1))
    return qk[:, :, :-heads]


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def _added(
    residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both, float32, and its norm as the next product rounds it."""
    total = residual + out
    return total, F.rms_norm(total, weight.shape, weight, eps).to(dtype)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """With the sign of the rotation in the sine, rotating half a head is a plain roll."""
    low, high = sin.chunk(2, dim=-1)
    return torch.cat((-low, high), dim=-1)


def check_batch_invariant(model: PreTrainedModel, device: torch.device, compute_dtype: str) -> None:
    """Raises ValueError where results depend on what else runs."""
    x, there = torch.arange(4096.0).sin().view(64, 64), torch.backends.mkldnn.is_available()
    many, few = (product(x, batch_invariant=there)(rows)[:2] for rows in (x, x[:2]))
    missing = {
        "a CPU engine": device.type == "cpu",
        "a torch whose float32 products of rows do not depend on their number (2.13's)": torch.equal(many, few),
        f"a model of {', '.join(sorted(LLAMA_LIKE))} in float32": FusedDecoder.fits(model),
        "torch with oneDNN": there,
        "a CPU with bfloat16 products (or engine.compute_dtype=float32)": compute_dtype == "float32"
        or (there and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }
    if lacking := [name for name, there in missing.items() if not there]:
        raise ValueError(f"engine.batch_invariant needs {' and '.join(lacking)}")


class Product(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, in] → [n, out]; with `residual` float32 [n, out], the sum of both, which may be in its memory."""
        ...


def product(weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False) -> Product:
    """The product with a matrix [out, in]. Its memory is read at each call, so new values count.
    `batch_invariant`, on a CPU: a row's result does not depend on the other rows. In float32 oneDNN keeps to that from
    two rows on, in bfloat16 only where their number is the same; MKL has other kernels for the last few rows."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    single = weight.dtype == torch.float32

    def onednn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")

    def from_two_rows(x: torch.Tensor) -> torch.Tensor:
        return onednn(x) if len(x) > 1 else onednn(x.repeat(2, 1))[:1]

    def by_blocks(x: torch.Tensor) -> torch.Tensor:
        blocks = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
        return torch.cat([onednn(block) for block in blocks])[: len(x)]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(weight.dtype), weight, bias)

    if batch_invariant:
        return _with_residual(from_two_rows if single else by_blocks)
    if not single:
        return _with_residual(rounded)
    # The choice must not depend on time measured here: equal runs have equal bits.
    if weight.device.type == "cpu" and weight.numel() >= ONEDNN_FROM and torch.backends.mkldnn.is_available():
        return _with_residual(onednn)

    def plain(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        plus = bias if residual is None else residual
        return torch.mm(x, weight.t()) if plus is None else torch.addmm(plus, x, weight.t())

    return plain


def _with_residual(multiply: Callable[[torch.Tensor], torch.Tensor]) -> Product:
    def call(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(x)
        return out if residual is None else residual.add_(out)

    return call
