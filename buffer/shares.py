"""Batches for a learner of several ranks: the groups of each rank, and the ranks that still wait for their share.

Rank 0 is the learner: it alone asks for batches and reports trained ones. A batch is served once, to all ranks
together; the others fetch their shares over their own connections, again until the batch is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from areal_like.wire.frames import Frame, Payloads, WireError
from areal_like.wire.groups import Head, pack_heads
from areal_like.wire.messages import Batch


def split(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of each rank's groups, ascending; `tokens`: of each group. Gives the longest group first, each to the rank
    with the fewest tokens: no rank has more than 4/3 of the best split (Graham 1969)."""
    if ranks == 1:
        return [list(range(len(tokens)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for place in sorted(range(len(tokens)), key=lambda each: -tokens[each]):
        lightest = min(range(ranks), key=lambda rank: (totals[rank], len(shares[rank])))
        shares[lightest].append(place)
        totals[lightest] += tokens[place]
    return [sorted(share) for share in shares]


@dataclass(slots=True)
class Served:
    """A batch in flight: its message, `heads` and `payloads` in order. `places`: of each rank's groups in the batch."""

    batch: Batch
    heads: list[Head]
    payloads: list[Frame]
    places: list[list[int]]

    def share(self, rank: int) -> tuple[Batch, Payloads]:
        """The message to a rank, and its payloads. Only rank 0 gets `info`."""
        if len(self.places) == 1:
            return self.batch, self.payloads
        places = self.places[rank]
        share = replace(
            self.batch,
            actors=[self.batch.actors[place] for place in places],
            table=pack_heads([self.heads[place] for place in places]),
            info=self.batch.info if rank == 0 else {},
            places=places,
        )
        return share, [self.payloads[place] for place in places]


@dataclass(slots=True)
class Shares:
    """`served`: batches not trained yet, by index. `wanted`: rank → (peer, batch) of the learner's ranks that wait."""

    ranks: int = 1
    served: dict[int, Served] = field(default_factory=dict)
    wanted: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def put(self, batch: Batch, heads: list[Head], payloads: list[Frame]) -> Served:
        """Keep a served batch until it is trained, so that it can be sent again."""
        places = split([head.tokens for head in heads], self.ranks)
        self.served[batch.index] = served = Served(batch, heads, payloads, places)
        return served

    def want(self, peer: bytes, index: int, rank: int) -> None:
        """A rank other than 0 asks for its share of a batch, which may not be served yet. Raises WireError."""
        if not 0 < rank < self.ranks:
            raise WireError(f"there is no share for rank {rank} of {self.ranks}")
        self.wanted[rank] = peer, index

    def trained(self, steps: int) -> None:
        """Batches before `steps` are trained: no rank needs its share any more."""
        for index in [index for index in self.served if index < steps]:
            del self.served[index]

    def void(self, index: int) -> list[Served]:
        """Remove this batch and all later ones: they will not be trained as served. Returns them."""
        return [self.served.pop(each) for each in sorted(self.served) if each >= index]

    def answer(self, send: Callable[[bytes, Batch, Payloads], None]) -> None:
        """Send the other ranks those wanted shares whose batch is served."""
        for rank, (peer, index) in list(self.wanted.items()):
            if index in self.served:
                del self.wanted[rank]
                send(peer, *self.served[index].share(rank))
