"""The experts that the routers of a mixture-of-experts model chose, as they travel with the tokens from engine to
learner (rollout routing replay, R3, arXiv 2510.11370).

uint8 or uint16 [N, layers, k]: k experts per input position in each of the layers that have experts. A token is
predicted at the position before it, so T tokens have T − 1 such positions."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

Shape = tuple[
    Annotated[int, Meta(ge=0, le=1 << 12)], Annotated[int, Meta(ge=0, le=1 << 10)], Annotated[int, Meta(ge=0, le=2)]
]
"""Layers, experts per token, bytes per expert: of a payload's entries per position."""
NONE: Shape = (0, 0, 0)
"""The payload has no experts."""


class Routing(NamedTuple):
    """Choices of a model's routers: in each of `layers`, `top_k` of `experts`."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.experts <= 1 << 8 else np.uint16)

    @property
    def shape(self) -> Shape:
        return self.layers, self.top_k, self.dtype.itemsize

    def problem(self, shape: Shape, experts: np.ndarray) -> str:
        """Problem with experts of that shape, for this model; "" without one or without experts."""
        if shape == NONE:
            return ""
        if shape != self.shape:
            return (
                f"its experts are {shape} (layers, experts per token, bytes) where the learner's model has {self.shape}"
            )
        most = int(np.maximum.reduce(experts, axis=None, initial=0))
        return "" if most < self.experts else f"expert {most} where the learner's model has {self.experts}"


def width(shape: Shape) -> int:
    """Bytes per position."""
    return shape[0] * shape[1] * shape[2]


def is_shape(shape: Shape) -> bool:
    """Is this a shape that experts can have? A sender may send anything."""
    return shape == NONE or width(shape) > 0


def shape_of(found: Sequence[np.ndarray | None]) -> Shape:
    """The shape of several samples' experts; NONE unless all have some. Raises ValueError where they differ."""
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return NONE
    shapes = {(*each.shape[1:], each.itemsize) for each in known}
    if len(shapes) > 1 or any(each.ndim != 3 or each.dtype.kind != "u" for each in known):
        raise ValueError(f"experts are of different shapes: {sorted(shapes)}")
    layers, top_k, size = shapes.pop()
    return layers, top_k, size


def joined_experts(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Experts of positions that follow one another; None where those of a part are not known."""
    known = [each for each in parts if each is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None
