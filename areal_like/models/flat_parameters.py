"""A model's parameters side by side in one tensor per dtype: one scatter then writes elements of any of them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from areal_like.models.causal_lm import write_state
from areal_like.weights.device import BATCH
from areal_like.weights.replica import Changes
from areal_like.weights.state import State
from areal_like.weights.transfer import to_device

ALIGN = 64
"""Elements at whose multiples groups begin: kernels of matrix products want at least 16 bytes."""


class FlatParameters:
    """Moves parameters, by groups of one dtype, to `device`. Those of a group follow one another without a gap."""

    def __init__(self, groups: Iterable[tuple[Sequence[nn.Parameter], torch.dtype]], device: torch.device):
        groups, ends, begins = list(groups), dict[torch.dtype, int](), list[int]()
        for group, dtype in groups:
            begins.append(ends.get(dtype, 0))
            ends[dtype] = begins[-1] + -(-sum(p.numel() for p in group) // ALIGN) * ALIGN
        # The last element takes what is meant for tensors of other dtypes.
        self._flats = {dtype: torch.zeros(end + 1, dtype=dtype, device=device) for dtype, end in ends.items()}
        for (group, dtype), begin in zip(groups, begins, strict=True):
            for parameter in group:
                flat = self._flats[dtype][begin : begin + parameter.numel()]
                parameter.data = flat.view(parameter.shape).copy_(parameter.detach())
                begin += parameter.numel()
        self._specs: object = None

    def stacked(self, group: Sequence[nn.Parameter]) -> Tensor:
        """The parameters of a group as one tensor, along their first dimension."""
        first, count = group[0], sum(parameter.numel() for parameter in group)
        return self._flats[first.dtype][first.storage_offset() :][:count].view(-1, *first.shape[1:])

    @torch.no_grad()
    def write(self, state: State, tensors: Mapping[str, Tensor], changes: Changes | None) -> None:
        """`write_state` of changes, with those by place in a state on the device. `tensors`: the parameters."""
        write_state(state, tensors, changes)
        places = changes.places if changes else []
        if places and state.specs is not self._specs:
            self._route(state, tensors)
        for itemsize, found in places:
            for some in found.split(BATCH):
                tensor = torch.searchsorted(self._starts, some * itemsize, right=True) - 1
                for published, flat, shifts, fits in self._routes:
                    if published.itemsize == itemsize:
                        at = torch.where(fits[tensor], some + shifts[tensor], len(flat) - 1)
                        flat.index_copy_(0, at, state.buffer.view(published)[some].to(flat.dtype))

    def _route(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """For each pair of a published and an own dtype: by how many elements a tensor's place differs, and which
        tensors are of that pair."""
        rows = [(getattr(torch, spec.dtype), tensors[spec.name], start) for spec, start, _ in state.places()]
        self._routes, device = [], state.buffer.device
        for published, own in dict.fromkeys((published, tensor.dtype) for published, tensor, _ in rows):
            shifts = [tensor.storage_offset() - start // published.itemsize for _, tensor, start in rows]
            fits = [(kind, tensor.dtype) == (published, own) for kind, tensor, _ in rows]
            found = (to_device(np.array(each), device) for each in (shifts, fits))
            self._routes.append((published, self._flats[own], *found))
        self._starts, self._specs = to_device(np.array([start for *_, start in rows]), device), state.specs
