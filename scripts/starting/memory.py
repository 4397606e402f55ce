"""What a model's training and decoding hold, in bytes by part: the one place with these formulas.

Of Llama-like models. States are exact (tests hold them against `learners.optim`). Activations count the tensors that
autograd keeps, and are within a tenth of what the allocator shows on a CPU (tests); in half precision they were only
counted, not measured. `RUNTIME` is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Figures = dict[str, float]
FLOAT = 4
HALF = 2
LOGIT_COPIES = 4
"""Logits, logprobs, probabilities and one product of them are alive at once."""
STEP_LOGITS = 3
"""In a decode step: logits, their sum with noise, logprobs."""
RUNTIME = 3 << 29
"""Of a process on a GPU: CUDA's context, libraries' workspaces, NCCL's buffers, the allocator's gaps."""
SERVER_RUNTIME = 4 << 30
"""Of an SGLang server beside its static memory: activations, CUDA graphs, RUNTIME."""
SERVER_FRACTION = 0.85
"""Of the memory that SGLang takes for weights and KV cache where mem-fraction-static is not set."""
KV_SHARE = 0.25
"""Of a GPU's memory that the embedded engine takes for keys and values where nothing is said."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model: layers, widths, and parameters in all (`count`), of one layer, and outside of layers."""

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    count: int
    layer: int

    @classmethod
    def of(cls, model: Any) -> Sizes:
        shape = model.config
        heads = shape.num_attention_heads
        dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        return cls(
            shape.num_hidden_layers,
            shape.hidden_size,
            shape.intermediate_size,
            heads * dim,
            (getattr(shape, "num_key_value_heads", None) or heads) * dim,
            shape.vocab_size,
            sum(p.numel() for p in model.parameters()),
            max(sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers),
        )

    @property
    def outside(self) -> int:
        """Parameters of embedding, head and last norm."""
        return self.count - self.layers * self.layer

    def kv(self, width: int) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * width


@dataclass(frozen=True, slots=True)
class Precision:
    """How a learner computes: all in float32; under autocast, with float32 weights; or `held`, with weights and states
    between layers in bfloat16 (`learners.sharding.hold_in`)."""

    autocast: bool
    held: bool

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Precision:
        """From a learner's knobs."""
        half = known.get("compute_dtype") == "bfloat16"
        lossless = half and known.get("publish_dtype") == "bfloat16" and known.get("lora") is None
        wanted = known.get("param_dtype") or ("bfloat16" if known.get("device") == "cuda" else "float32")
        held = lossless and "param_dtype" in known and wanted == "bfloat16"
        return cls(half and not held, held)

    @property
    def weight(self) -> int:
        """Bytes of a weight while its layer computes."""
        return HALF if self.held else FLOAT


def training_state(sizes: Sizes, trained: int, frozen: int, ranks: int, precision: Precision) -> Figures:
    """Of one rank, between steps: `trained` and `frozen` parameters (adapters and the rest, with LoRA). FSDP owns its
    shards of weights and gradients in float32, the optimizer a flat copy of each (`learners.optim`)."""
    copies = 1 if ranks == 1 else 2
    weight = precision.weight if ranks == 1 else FLOAT
    return {
        "weights": (weight * copies * trained + FLOAT * frozen) // ranks,
        "master weights": FLOAT * trained // ranks,
        "Adam's moments": 2 * FLOAT * trained // ranks,
        "gradient": FLOAT * copies * trained // ranks,
    }


def whole_layers(sizes: Sizes, trained: int, ranks: int, precision: Precision, checkpointing: bool) -> float:
    """Of one rank, while it computes: weights beyond its shard, and gradients that are not yet summed.

    FSDP gathers what is outside of layers for the whole pass, and two layers at a time; their gradients are summed in
    float32. Autocast keeps a half copy of each weight for the backward pass.
    """
    two = sizes.outside + 2 * sizes.layer
    gathered = precision.weight * two if ranks > 1 else 0
    cast = HALF * (two if checkpointing else sizes.count) if precision.autocast else 0
    largest = sizes.vocabulary * sizes.hidden if trained == sizes.count else 0
    moved = largest * (FLOAT + HALF) if precision.held else 0  # the head's gradient, before it is added to the buffer
    unsummed = (FLOAT + precision.weight) * (sizes.outside + sizes.layer) if ranks > 1 and trained == sizes.count else 0
    return gathered + cast + max(moved, unsummed)


def activations(sizes: Sizes, row: int, copied: int, precision: Precision, checkpointing: bool) -> float:
    """Kept for the backward pass of `row` tokens, and the widest gradients of one layer (of the MLP, as measured).

    Both norms keep input, normalised and scaled value; attention keeps queries, keys, values and its output, and that
    again in the row's order; the MLP keeps gate, up, the activated gate and their product. Of sequences that share
    prefixes, the keys and values of all `copied` tokens are kept instead (0: they are not, see `learners.attention`).
    """
    narrow = HALF if precision.autocast or precision.held else FLOAT
    state = FLOAT if not precision.held else HALF
    norms = 2 * sizes.hidden * ((FLOAT + HALF if precision.held else 2 * FLOAT) + narrow)
    rest = narrow * (sizes.hidden + 2 * sizes.queries + 4 * sizes.inner)
    layer = row * (norms + rest) + (copied or row) * 2 * sizes.keys * narrow
    once = row * (3 * FLOAT * sizes.hidden + round(1.5 * narrow * sizes.inner))
    return once + (layer + row * state * sizes.layers * sizes.hidden if checkpointing else layer * sizes.layers)


def embedded_engine(sizes: Sizes, half: bool) -> float:
    """Weights of the embedded engine: matrices of layers in its compute_dtype, the rest in float32."""
    return (HALF if half else FLOAT) * sizes.layers * sizes.layer + FLOAT * sizes.outside
