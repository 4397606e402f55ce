"""Many independent learners in one tensor: parameters [learners, ...], Adam with a rate of their own, and two networks.

Row l of every tensor belongs to learner l, and rows never mix. So a stack of learners computes what each would compute
alone, up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = Mapping[str, Tensor]


class Stack:
    """Parameters of L learners as `flat` [L, numbers], and Adam (Kingma & Ba, algorithm 1; β .9/.999).

    `start` holds [L, ...] tensors in float32, `rates` the learning rate of each learner [L].
    """

    def __init__(self, start: Parameters, rates: Tensor):
        self.shapes = {name: values.shape[1:] for name, values in start.items()}
        self.flat = torch.cat([values.flatten(1) for values in start.values()], 1)
        self.rates = rates[:, None]
        self.steps = 0
        self._mean = torch.zeros_like(self.flat)
        self._square = torch.zeros_like(self.flat)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Rows of `flat`, or of a copy of it, as parameters by name [rows, ...]; gradients flow back into it."""
        pieces = flat.split([shape.numel() for shape in self.shapes.values()], 1)
        return {
            name: piece.unflatten(1, shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step of Adam on `gradient` [L, numbers]."""
        self.steps += 1
        self._mean.lerp_(gradient, 0.1)
        self._square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (self._square / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        self.flat.sub_(self._mean / scale * (self.rates / (1 - 0.9**self.steps)))


# A multilayer perceptron


def perceptron(seeds: list[int], sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Weights w0, w1, ... and biases b0, ... of learners with these seeds; PyTorch's default initialisation."""
    made: dict[str, list[Tensor]] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for layer, (wide, out) in enumerate(itertools.pairwise(sizes)):
            for name, shape in ((f"w{layer}", (wide, out)), (f"b{layer}", (out,))):
                values = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(wide)
                made.setdefault(name, []).append(values)
    return {name: torch.stack(values) for name, values in made.items()}


def perceive(parameters: Parameters, inputs: Tensor) -> Tensor:
    """Logits [L, out, N] of inputs [L, in, N]; ReLU between layers. Columns are inputs: softmax over rows is fast."""
    layers = len(parameters) // 2
    for layer in range(layers):
        weights = parameters[f"w{layer}"].transpose(1, 2)
        inputs = torch.baddbmm(parameters[f"b{layer}"][..., None], weights, inputs)
        if layer < layers - 1:
            inputs = F.relu(inputs)
    return inputs


# A decoder-only transformer


@dataclass(frozen=True, slots=True)
class Shape:
    """The papers' network: pre-LayerNorm, ReLU, no bias, learned positions."""

    vocabulary: int
    positions: int
    layers: int = 3
    heads: int = 4
    width: int = 64
    hidden: int = 128


Past = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


def transformer(seeds: list[int], shape: Shape) -> dict[str, Tensor]:
    """Parameters of learners with these seeds.

    The papers give no initialisation. Ours: matrices N(0, 1/inputs), those that write to the residual stream also
    divided by √(2 layers), embeddings and output N(0, .02²), so the first policy is close to uniform.
    """
    made: dict[str, list[Tensor]] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, (rows, columns, deviation) in _matrices(shape).items():
            values = torch.ones(rows) if not columns else torch.randn(rows, columns, generator=generator) * deviation
            made.setdefault(name, []).append(values)
    return {name: torch.stack(values) for name, values in made.items()}


def _matrices(shape: Shape) -> dict[str, tuple[int, int, float]]:
    """Name → rows, columns (0: a LayerNorm's scale), standard deviation."""
    width, hidden = shape.width, shape.hidden
    inner, back = 1 / math.sqrt(width), 1 / math.sqrt(2 * shape.layers)
    found = {"tokens": (shape.vocabulary, width, 0.02), "places": (shape.positions, width, 0.02)}
    for layer in range(shape.layers):
        found |= {
            f"{layer}.norm1": (width, 0, 0.0),
            f"{layer}.qkv": (width, 3 * width, inner),
            f"{layer}.out": (width, width, inner * back),
            f"{layer}.norm2": (width, 0, 0.0),
            f"{layer}.up": (width, hidden, inner),
            f"{layer}.down": (hidden, width, back / math.sqrt(hidden)),
        }
    return found | {"norm": (width, 0, 0.0), "head": (width, shape.vocabulary, 0.02)}


def decode(
    parameters: Parameters, shape: Shape, tokens: Tensor, first: int, prompts: Past, own: Past
) -> tuple[Tensor, Past]:
    """Logits of the next token [L, P, G, T, vocabulary], and the samples' keys and values up to here.

    `tokens` int64 [L, P, G, T] continue G samples of each of P prompts, at the positions from `first` on.
    `prompts` are keys and values that the samples of a prompt share [L, P, heads, H, width/heads] ([] for none). `own`
    has room for those of each sample's own tokens [L, P, heads, G, room, width/heads], those of earlier tokens in it;
    they are written there ([]: there are no earlier tokens and no later ones). Attention is causal.
    """
    learners, places = tokens.shape[0], tokens.shape[-1]
    flat = tokens.flatten(1)
    x = torch.bmm(F.one_hot(flat, shape.vocabulary).float(), parameters["tokens"]).view(*tokens.shape, shape.width)
    x = (x + parameters["places"][:, None, None, first : first + places]).view(learners, -1, shape.width)
    kept: Past = []
    for layer in range(shape.layers):
        here = {name: parameters[f"{layer}.{name}"] for name in ("norm1", "qkv", "out", "norm2", "up", "down")}
        qkv = torch.bmm(_norm(x, here["norm1"]), here["qkv"])
        qkv = qkv.view(*tokens.shape, 3, shape.heads, -1).permute(4, 0, 1, 5, 2, 3, 6)
        query, key, value = qkv.contiguous().unbind(0)  # [L, P, heads, G, T, width/heads]
        if own:
            before = first - prompts[layer][0].shape[-2]
            key, value = (_extended(room, before, new) for room, new in zip(own[layer], (key, value), strict=True))
        kept.append((key, value))
        seen = _attend(query, key, value, prompts[layer] if prompts else None)
        x = x + torch.bmm(seen.permute(0, 1, 3, 4, 2, 5).reshape(x.shape), here["out"])
        x = x + torch.bmm(F.relu(torch.bmm(_norm(x, here["norm2"]), here["up"])), here["down"])
    return torch.bmm(_norm(x, parameters["norm"]), parameters["head"]).view(*tokens.shape, -1), kept


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * scale[:, None]


def _extended(room: Tensor, before: int, new: Tensor) -> Tensor:
    """Appends `new` [..., T, numbers] in `room`; returns the earlier and the new numbers together."""
    room[..., before : before + new.shape[-2], :] = new
    return room[..., : before + new.shape[-2], :]


def _attend(query: Tensor, key: Tensor, value: Tensor, shared: tuple[Tensor, Tensor] | None) -> Tensor:
    """Causal attention of T queries to T' ≥ T own keys, of which the last T are beside them, and to the shared ones."""
    places, length = query.shape[-2], key.shape[-2]
    query = query / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-1, -2)
    if places > 1:
        hidden = torch.ones(places, length, dtype=torch.bool).triu(length - places + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if shared is None:
        return scores.softmax(-1) @ value
    keys, values = shared
    far = query.flatten(3, 4) @ keys.transpose(-1, -2)
    weights = torch.cat([far.unflatten(3, query.shape[3:5]), scores], -1).softmax(-1)
    far, near = weights.split([keys.shape[-2], length], -1)
    return (far.flatten(3, 4) @ values).unflatten(3, query.shape[3:5]) + near @ value
