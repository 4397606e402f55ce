"""The digest (`areal_like.weights.digest`) of weights that lie in boxes, in one process or several.

    sum over our boxes of their lanes → 16 bytes, summed over the processes → digest

A box that several places hold (a tied weight, what tensor parallelism replicates) counts once, by its *owner*. The
other copies enter a second sum, where each copy has a factor and the factors of a box add up to zero: it is zero if all
copies are equal (and otherwise only with a chance of 2^-64). So processes exchange 40 bytes per update, for any
size of the model. Weights are read `STRIDE` elements at a time. A word is eight bytes of a tensor, and can't be hashed
in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engines.sglang_boxes import Box, LoaderRefused
from areal_like.weights import digest as words_digest
from areal_like.weights.state import ALIGN, TensorSpec

_K, _A, _B = (int(each.view(np.int64)) for each in (words_digest.K, words_digest.A, words_digest.B))


class LoaderError(RuntimeError):
    """The weights are wrong after a patch was applied."""


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """One place of a box. `factor` (int64): of its lanes in the sum that compares copies."""

    box: Box
    is_owner: bool
    factor: int


class DigestTally:
    """Lanes of the weights in `boxes` (name → boxes), and of all processes of `group` (on the CPU; None: one). Raises
    LoaderRefused where there is no place for a tensor, or it is stored in a way that can't be followed."""

    def __init__(self, specs: Sequence[TensorSpec], boxes: dict[str, list[Box]], group: Any = None):
        self.specs, self._group = specs, group
        keys = [[box.key for box in boxes[spec.name]] for spec in specs]
        everywhere = gathered(keys, group)
        rank = 0 if group is None else torch.distributed.get_rank(group)
        self.copies: dict[str, list[StoredCopy]] = {}
        self._first: dict[str, int] = {}
        first = 0
        for index, spec in enumerate(specs):
            held = [(key, (at, i)) for at, keys in enumerate(everywhere) for i, key in enumerate(keys[index])]
            self._check(spec, held)
            factors = _factors(index, held)
            self.copies[spec.name] = [
                StoredCopy(box, *factors[box.key][rank, i]) for i, box in enumerate(boxes[spec.name])
            ]
            self._first[spec.name] = first
            first += spec.space // ALIGN
        self._words = first
        self._device = next((box.target.device for each in boxes.values() for box in each), torch.device("cpu"))

    def _check(self, spec: TensorSpec, held: list) -> None:
        sizes = {
            (start, size): Box(spec.shape, start, size, torch.empty(size, device="meta")) for (start, size), _ in held
        }
        found = sum(box.count for box in sizes.values())
        if spec.count and not found:
            raise LoaderRefused(
                f"{spec.name}: SGLang's model has no place for a tensor of that name: use engine=torch, or another "
                "model"
            )
        if found < spec.count:
            kinds = ", ".join(f"{box.size} from {box.start}" for box in sizes.values())
            raise LoaderRefused(
                f"{spec.name}: not all of it is stored ({found} elements of {list(spec.shape)} {spec.dtype}: {kinds})"
            )
        if found > spec.count:
            raise LoaderRefused(f"{spec.name}: places that hold parts of it overlap")
        if not all(box.is_of_words(ALIGN // spec.itemsize) for box in sizes.values()):
            raise LoaderRefused(f"{spec.name}: it is cut up in the middle of words of {ALIGN} bytes")

    def digest(self, problem: str = "") -> str:
        """Of the weights of all processes. Raises LoaderError where copies differ, or one process has a `problem`."""
        sums = torch.zeros(5, dtype=torch.int64)
        try:
            if not problem:
                found, problem = self._swept()
                sums[:4] = found.cpu()
        except Exception as error:  # the others wait for this one
            problem = f"{type(error).__name__}: {error}"
        sums[4] = int(bool(problem))
        summed(sums, self._group)
        if sums[4]:
            raise LoaderError(problem or "another process of this server has wrong weights")
        if sums[2:4].any():
            raise LoaderError(f"copies of the weights differ{self._differing()}")
        return words_digest.text_of(sums[:2].numpy().view(np.uint64), self._words)

    def _swept(self) -> tuple[Tensor, str]:
        """Sums int64 [4] on the device (lanes, comparison of copies), and what is wrong, if anything is."""
        total = torch.zeros(4, dtype=torch.int64, device=self._device)
        for spec in self.specs:
            wrong = torch.zeros((), dtype=torch.int64, device=self._device)
            for copy in self.copies[spec.name]:
                for piece in copy.box.pieces():
                    values, odd = piece.bits(spec.dtype)
                    wrong += odd
                    words, at = piece.words(values, ALIGN // spec.itemsize)
                    total += _sums_of(copy, words, at + self._first[spec.name])
            if wrong:
                return total, f"LoaderError: {spec.name}: no published bits stand for {int(wrong)} of its elements"
        return total, ""

    def _differing(self) -> str:
        """Which tensors have copies that differ, in words; all processes look."""
        checks = torch.zeros(len(self.specs), dtype=torch.int64)
        for i, spec in enumerate(self.specs):
            for copy in self.copies[spec.name]:
                for piece in copy.box.pieces() if copy.factor else ():
                    words, at = piece.words(piece.bits(spec.dtype)[0], ALIGN // spec.itemsize)
                    checks[i] += _sums_of(copy, words, at)[2].cpu()
        summed(checks, self._group)
        names = [spec.name for spec, check in zip(self.specs, checks, strict=True) if check]
        return f": {', '.join(names[:5])}" if names else ""


def _factors(index: int, held: list) -> dict:
    """Key of a box → holder → (owns it, factor in the comparison of copies) of tensor `index`."""
    found = {}
    for number, (key, several) in enumerate(itertools.groupby(sorted(held), key=lambda each: each[0])):
        _, *others = holders = [holder for _, holder in several]
        odd = [hash((index, number, i)) | 1 for i in range(len(others))]  # of integers alone: the same everywhere
        found[key] = {
            holder: (i == 0, _signed(-sum(odd) if i == 0 else odd[i - 1])) for i, holder in enumerate(holders)
        }
    return found


def _signed(number: int) -> int:
    """Modulo 2^64, as int64 holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _sums_of(copy: StoredCopy, words: Tensor, positions: Tensor) -> Tensor:
    lanes = lanes_of(words, positions)
    return torch.cat([lanes * int(copy.is_owner), lanes * copy.factor])


def lanes_of(words: Tensor, positions: Tensor) -> Tensor:
    """`areal_like.weights.digest.lanes_of` of words (int64) at these positions, on their device: int64 [2] (the same
    bits as uint64)."""
    x = positions * _K
    x += words
    x = (x ^ _shifted(x, 30)).mul_(_A)
    x = (x ^ _shifted(x, 27)).mul_(_B)
    x ^= _shifted(x, 31)
    return torch.stack([x.sum(), ((x & 0xFFFFFFFF) * _shifted(x, 32)).sum()])


def _shifted(x: Tensor, by: int) -> Tensor:
    """Right shift that fills with zeros."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def gathered(mine: Any, group: Any) -> list[Any]:
    """What each process of the group has."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def summed(mine: Tensor, group: Any) -> None:
    """Add up over the processes of the group, in place; int64 on the CPU, modulo 2^64."""
    if group is not None and mine.numel():
        torch.distributed.all_reduce(mine, group=group)
