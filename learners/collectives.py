"""The ranks of a learner: processes that each hold a share of every batch, and of the model (`learners.sharding`).

Every rank holds the numbers per token of the whole batch, and computes all that depends on it (advantages, plans of
losses, denominators), as a single rank would. Each number comes from the one rank that computes its sample, so
combining them rounds nothing. All ranks must call these methods in the same order; with one rank nothing communicates.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_like.types import Batch, Group
from areal_like.wire.groups import decode_group, encode_group, pack_heads, unpack_heads
from areal_like.wire.messages import Table

_ARRAY = 1
"""msgpack's extension type of an array."""
PATIENCE = timedelta(days=30)
"""Time-out between steps, where a rank waits as long as the others live. A death breaks the connection."""
LOST_RANK_GRACE_SECONDS = 2.0
"""After another rank has died, a rank waits this many seconds before it ends: the launcher sees the dead one first."""


_JOINED = SimpleNamespace(patient=None)
"""What `join` has made: connections for waiting without a limit."""


def join(rank: int, ranks: int, store: Path, *, local: bool, seconds: float = 900.0) -> None:
    """Connect to the other ranks through the file `store`, which all can reach. Returns when all are connected. Tensors
    on the CPU and plain data use gloo, tensors on a GPU use NCCL. `local`: all ranks are on this host, and need not
    listen to other hosts. `seconds`: time-out of all collectives within a step; `barrier` and `broadcast` have none."""
    if local and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend += ",cuda:nccl"
    store.parent.mkdir(exist_ok=True)
    met = dist.FileStore(str(store), ranks)
    met.add("arrived", 1)
    while met.add("arrived", 0) < ranks:  # they may start far apart
        time.sleep(0.05)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=met, rank=rank, world_size=ranks, timeout=limit)
    _JOINED.patient = dist.new_group(backend="gloo", timeout=PATIENCE)


class Ranks:
    """`count` ranks; this process is `rank`. Raises ValueError unless `join` has connected `count` ranks."""

    def __init__(self, count: int):
        joined = dist.get_world_size() if dist.is_initialized() else 1
        if count < 1 or count != joined:
            raise ValueError(f"learner.ranks is {count}, but {joined} processes have joined")
        self.count, self.rank = count, dist.get_rank() if count > 1 else 0
        self._group: dist.ProcessGroup | None = None

    def side_channel(self) -> Ranks:
        """The same ranks over separate connections, for one other thread. Plain data only."""
        ranks = Ranks(self.count)
        ranks._group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.count > 1 else None
        return ranks

    def gather_batch(self, batch: Batch) -> tuple[Batch, np.ndarray]:
        """The whole batch, from this rank's share, others' token ids as zeros; and bool [n], the rank's samples."""
        if self.count == 1:
            return batch, np.ones(len(batch.samples), bool)
        assert batch.places is not None
        mine = dict(zip(batch.places, batch.groups, strict=True))
        placed: dict[int, tuple[int, Group]] = {}
        for rank, groups in enumerate(self.gathered([[place, *_encoded(group)] for place, group in mine.items()])):
            for place, table, payload in groups:
                placed[place] = rank, mine.get(place) or decode_group(unpack_heads(Table(*table))[0], payload)
        if sorted(placed) != list(range(len(placed))):
            raise RuntimeError(f"the ranks' shares of batch {batch.index} do not add up to the whole batch")
        ordered = [placed[place] for place in range(len(placed))]
        own = np.repeat([rank == self.rank for rank, _ in ordered], [len(group.samples) for _, group in ordered])
        return Batch(batch.index, batch.version, [group for _, group in ordered], batch.oldest_allowed), own

    def sum_disjoint(self, values: Tensor, own: Tensor) -> Tensor:
        """Combine numbers [N]; each rank knows those where its bool `own` [N] is True. Exact, NaN included."""
        if self.count == 1:
            return values
        merged = torch.where(own, values, 0.0)
        dist.all_reduce(merged)
        return merged

    def sum(self, value: float) -> float:
        """The sum over ranks, in float64."""
        total = torch.tensor(value, dtype=torch.float64)
        self.sum_tensor(total)
        return total.item()

    def max(self, value: int) -> int:
        if self.count == 1:
            return value
        most = torch.tensor(value)
        self.max_tensor(most)
        return int(most)

    def sum_tensor(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def max_tensor(self, tensor: Tensor) -> None:
        """Replace each element of the tensor by its maximum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def norm(self, shard: Tensor) -> float:
        """L2 norm of a vector that is divided over the ranks."""
        norm = torch.linalg.vector_norm(shard)
        return norm.item() if self.count == 1 else self.sum(norm.double().item() ** 2) ** 0.5

    def gathered(self, thing: Any) -> list[Any]:
        """Plain data and NumPy arrays of all ranks, by rank. As msgpack encodes them: tuples become lists."""
        if self.count == 1:
            return [thing]
        own = _packed(thing)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self._group)
        most = max(int(size) for size in sizes)
        everybody = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(everybody, torch.cat([own, own.new_zeros(most - own.numel())]), group=self._group)
        return [_unpacked(each[: int(size)]) for each, size in zip(everybody, sizes, strict=True)]

    def send(self, tensor: Tensor) -> None:
        """Give rank 0's tensor, in main memory, to all."""
        if self.count > 1:
            dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Wait, while all ranks live, until all have called this."""
        if self.count > 1:
            dist.barrier(_JOINED.patient)

    def broadcast(self, thing: Any) -> Any:
        """Rank 0's argument, encoded as in `gathered`; others are ignored. The other ranks wait while rank 0 lives."""
        if self.count == 1:
            return thing
        packed = _packed(thing if self.rank == 0 else None)
        size = torch.tensor([packed.numel()])
        dist.broadcast(size, src=0, group=_JOINED.patient)
        box = packed if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(box, src=0, group=_JOINED.patient)
        return _unpacked(box)


def is_lost_rank(error: BaseException) -> bool:
    """Does this collective's error mean that another process is gone or late, rather than a fault of this one?"""
    words = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "timed out")
    known = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words))


def _encoded(group: Group) -> tuple[tuple[Any, ...], Any]:
    """A group's table and payload as they come from the buffer, with zeros in place of token ids and without experts:
    only the rank that computes on the group needs these."""
    samples = [replace(s, tokens=np.zeros(len(s.tokens), np.int32), experts=None) for s in group.samples]
    head, payload = encode_group(replace(group, samples=samples))
    return msgspec.structs.astuple(pack_heads([head])), payload


def _packed(thing: Any) -> Tensor:
    """msgpack, never pickled; uint8 [n]."""
    return torch.frombuffer(bytearray(msgpack.packb(thing, default=_array)), dtype=torch.uint8)


def _array(thing: Any) -> msgpack.ExtType:
    if not isinstance(thing, np.ndarray):
        raise TypeError(f"ranks exchange plain data and arrays, not {type(thing).__name__}")
    return msgpack.ExtType(_ARRAY, msgpack.packb([thing.dtype.str, thing.shape, thing.tobytes()]))


def _unpacked(packed: Tensor) -> Any:
    return msgpack.unpackb(packed.numpy().tobytes(), ext_hook=_made, strict_map_key=False)


def _made(code: int, data: bytes) -> np.ndarray:
    kind, shape, values = msgpack.unpackb(data)
    return np.frombuffer(bytearray(values), kind).reshape(shape)
