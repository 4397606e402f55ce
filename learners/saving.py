"""Outputs of the learner: published bits, model folders, and its part of a checkpoint. With several ranks each
publishes its part of the weights and has its own file in a checkpoint; rank 0 joins them for a model folder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.machine import free_memory
from areal_like.models.causal_lm import read_state, save_as_published
from areal_like.weights.device import DeviceState, state_on
from areal_like.weights.state import State, TensorSpec
from learners.adapters import Adapters
from learners.collectives import Ranks
from learners.optim import MasterAdamW
from learners.sharding import OwnPart, Whole


@dataclass
class Saving:
    """Saves a model that `optimizer` trains; `specs` are its published tensors."""

    model: PreTrainedModel
    specs: list[TensorSpec]
    optimizer: MasterAdamW
    adapters: Adapters | None
    ranks: Ranks
    _fits = False  # does main memory have room for a copy of the state?

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """The published bits of this rank's part of the current weights, in `into` or a new buffer that belongs to the
        caller; `done` as for `read_state`. All ranks must call this at the same time."""
        device = next(self.model.parameters()).device
        state = into or state_on(device, self.specs, self.ranks.rank, self.ranks.count)
        weights = OwnPart(self._weights(), self.specs, self.ranks)
        state.write(weights, done) if isinstance(state, DeviceState) else read_state(weights, state, done)
        return state

    def _weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, before rounding; with several ranks each has its shards."""
        return self.adapters.merged() if self.adapters else dict(self.model.named_parameters())

    def gathered(self) -> tuple[State, dict[str, Tensor]]:
        """All ranks' published bits, and the adapters' own weights. Rank 0 calls this while others call `hand_over`."""
        state = State(self.specs)
        read_state(Whole(self._weights()), state)
        return state, dict(Whole(self.adapters.trained())) if self.adapters else {}

    def hand_over(self) -> None:
        """Send this rank's part while rank 0 runs `gathered` or `save`."""
        for weights in (self._weights(), self.adapters.trained() if self.adapters else {}):
            for _ in Whole(weights).values():
                pass

    def save(self, folder: str) -> None:
        """Write the published weights as a Hugging Face model folder, and adapters to its subfolder `adapter`."""
        state, adapters = self.gathered()
        save_as_published(self.model, state, folder)
        if self.adapters:
            self.adapters.save(f"{folder}/adapter", adapters)

    def save_state(self, folder: Path) -> None:
        self._write(self.optimizer.state_dict(), folder)

    @contextmanager
    def save_beside(self) -> Iterator[Callable[[Path], None]]:
        """See `areal_like.run.checkpoints.Saving`. The optimizer's next step waits until the state is copied, or, if
        main memory has no room for a copy, until it is written."""
        state, may_change = self.optimizer.state_dict(), self.optimizer.hold()
        device = state["master"].device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def save(folder: Path) -> None:
            copy = self._copy(state, ready)
            if copy is not None:
                may_change.set()
            self._write(copy or state, folder)

        try:
            yield save
        finally:
            may_change.set()

    def _write(self, state: dict[str, Any], folder: Path) -> None:
        torch.save(state, folder / file_of(self.ranks.rank, self.ranks.count))

    def _copy(self, state: dict[str, Any], ready: torch.cuda.Event | None) -> dict[str, Any] | None:
        """A copy in main memory, from a GPU through a stream of its own, when that is `ready`; None: no room. torch
        keeps pinned memory, in blocks of powers of two, for the next copy."""
        master = state["master"]
        self._fits = (self._fits and ready is not None) or free_memory() > 2 * 3 * master.nbytes  # with two moments
        if not self._fits:
            return None
        if ready is None:
            return _with_tensors(state, Tensor.clone)
        stream = torch.cuda.Stream(master.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            copy = _with_tensors(state, _pinned)
            stream.synchronize()
        return copy

    def load_state(self, folder: Path) -> None:
        file = folder / file_of(self.ranks.rank, self.ranks.count)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="cpu", mmap=True))

    def load_weights(self, folder: Path) -> None:
        """Load only the weights, from the files of any number of ranks. Only with one rank. Raises OSError if files
        are missing, ValueError if they are of another model."""
        ranks = max((int(path.stem.rpartition("-")[2]) for path in folder.glob("learner-0-of-*.pt")), default=1)
        files = [folder / file_of(rank, ranks) for rank in range(ranks)]
        states = [torch.load(file, weights_only=True, map_location="cpu", mmap=True) for file in files]
        self.optimizer.load_master([state["master"] for state in states])


def _with_tensors(thing: Any, made: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts and lists, with other tensors, `made` of theirs."""
    if isinstance(thing, dict):
        return {key: _with_tensors(each, made) for key, each in thing.items()}
    if isinstance(thing, list):
        return [_with_tensors(each, made) for each in thing]
    return made(thing) if isinstance(thing, Tensor) else thing


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def file_of(rank: int, ranks: int) -> str:
    return "learner.pt" if ranks == 1 else f"learner-{rank}-of-{ranks}.pt"
