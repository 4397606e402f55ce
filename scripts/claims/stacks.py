"""Many independent learners in one tensor: parameters [learners, ...], Adam, and two networks.

Row l of every tensor belongs to learner l, and rows never mix: each computes as it would alone, up to rounding.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Mapping[str, Tensor]


class Stack:
    """Parameters of L learners as `flat` [L, numbers], float32 with gradient, from [L, ...] tensors; and Adam."""

    def __init__(self, start: Parameters, rate: float):
        self.shapes = {name: values.shape[1:] for name, values in start.items()}
        self.flat = torch.cat([values.flatten(1) for values in start.values()], 1).requires_grad_()
        self._adam = torch.optim.Adam([self.flat], rate)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Rows of `flat`, or of a copy of it, as parameters by name [rows, ...]; gradients flow back into it."""
        pieces = flat.split([shape.numel() for shape in self.shapes.values()], 1)
        return {name: piece.unflatten(1, self.shapes[name]) for name, piece in zip(self.shapes, pieces, strict=True)}

    def step(self, gradient: Tensor) -> None:
        """One step of Adam on `gradient` [L, numbers]."""
        self.flat.grad = gradient
        self._adam.step()


class Draws:
    """Uniform numbers: row l [L, ...] comes from the stream of learner l's seed alone."""

    def __init__(self, seeds: Sequence[int]):
        self._streams = [torch.Generator().manual_seed(1_000_003 * (seed + 1)) for seed in seeds]

    def __call__(self, *shape: int) -> Tensor:
        return torch.stack([torch.rand(shape, generator=stream) for stream in self._streams])


def _stacked(seeds: list[int], make: Callable[[torch.Generator], dict[str, Tensor]]) -> dict[str, Tensor]:
    made = [make(torch.Generator().manual_seed(seed)) for seed in seeds]
    return {name: torch.stack([each[name] for each in made]) for name in made[0]}


def perceptron(seeds: list[int], sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Weights w0, w1, ... and biases b0, ... of learners with these seeds; PyTorch's default initialisation."""

    def made(dice: torch.Generator) -> dict[str, Tensor]:
        found = {}
        for layer, (wide, out) in enumerate(itertools.pairwise(sizes)):
            for name, shape in ((f"w{layer}", (wide, out)), (f"b{layer}", (out,))):
                found[name] = (torch.rand(shape, generator=dice) * 2 - 1) * (1 / math.sqrt(wide))
        return found

    return _stacked(seeds, made)


def perceive(parameters: Parameters, inputs: Tensor) -> Tensor:
    """Logits [L, out, N] of inputs [L, in, N]; ReLU between layers. Columns are inputs: softmax over rows is fast."""
    layers = len(parameters) // 2
    for layer in range(layers):
        weights = parameters[f"w{layer}"].transpose(1, 2)
        inputs = torch.baddbmm(parameters[f"b{layer}"][..., None], weights, inputs)
        if layer < layers - 1:
            inputs = F.relu(inputs)
    return inputs


@dataclass(frozen=True, slots=True)
class Shape:
    """The papers' transformer: pre-LayerNorm, ReLU, no bias, learned positions."""

    vocabulary: int
    positions: int
    layers: int = 3
    heads: int = 4
    width: int = 64
    hidden: int = 128


def transformer(seeds: list[int], shape: Shape) -> dict[str, Tensor]:
    """Parameters of learners with these seeds: matrices N(0, 1/inputs), those that write to the residual stream also
    divided by √(2 layers), embeddings and output N(0, 0.02²), for a first policy close to uniform."""
    width, hidden = shape.width, shape.hidden
    inner, back = 1 / math.sqrt(width), 1 / math.sqrt(2 * shape.layers)
    # Name → rows, columns (0: a LayerNorm's scale), standard deviation.
    matrices = {"tokens": (shape.vocabulary, width, 0.02), "places": (shape.positions, width, 0.02)}
    for layer in range(shape.layers):
        matrices |= {
            f"{layer}.norm1": (width, 0, 0.0),
            f"{layer}.qkv": (width, 3 * width, inner),
            f"{layer}.out": (width, width, inner * back),
            f"{layer}.norm2": (width, 0, 0.0),
            f"{layer}.up": (width, hidden, inner),
            f"{layer}.down": (hidden, width, back / math.sqrt(hidden)),
        }
    matrices |= {"norm": (width, 0, 0.0), "head": (width, shape.vocabulary, 0.02)}

    def made(name: str, dice: torch.Generator) -> Tensor:
        rows, columns, deviation = matrices[name]
        return torch.randn(rows, columns, generator=dice) * deviation if columns else torch.ones(rows)

    return _stacked(seeds, lambda dice: {name: made(name, dice) for name in matrices})


Past = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer [L · N, heads, T, width/heads]."""


def decode(parameters: Parameters, shape: Shape, tokens: Tensor, past: Past) -> tuple[Tensor, Past]:
    """Logits of each next token [L, N, T, vocabulary] of sequences that `tokens` int64 [L, N, T] continue, and the
    keys and values up to here. `past` holds those of earlier tokens ([]: there are none). Attention is causal."""
    learners, count, length = tokens.shape
    before = past[0][0].shape[-2] if past else 0
    seen = torch.ones(length, before + length, dtype=torch.bool).tril(before)
    x = torch.bmm(F.one_hot(tokens.flatten(1), shape.vocabulary).float(), parameters["tokens"])
    x = (x.unflatten(1, (count, length)) + parameters["places"][:, None, before : before + length]).flatten(1, 2)
    kept: Past = []
    for layer in range(shape.layers):
        here = {name: parameters[f"{layer}.{name}"] for name in ("norm1", "qkv", "out", "norm2", "up", "down")}
        qkv = torch.bmm(_norm(x, here["norm1"]), here["qkv"])
        query, key, value = qkv.view(learners * count, length, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
        if past:
            key, value = (torch.cat([old, new], -2) for old, new in zip(past[layer], (key, value), strict=True))
        kept.append((key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, seen)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(x.shape), here["out"])
        x = x + torch.bmm(F.relu(torch.bmm(_norm(x, here["norm2"]), here["up"])), here["down"])
    return torch.bmm(_norm(x, parameters["norm"]), parameters["head"]).unflatten(1, (count, length)), kept


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * scale[:, None]
