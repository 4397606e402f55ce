"""Batches for a learner of several ranks: which groups each of them gets, and who is still to get his.

Rank 0 is the learner: it alone asks for batches and says what is trained. A batch is served once, to all ranks at once;
the others then fetch their shares of it over connections of their own. A share is a view of the batch that was served,
so nothing is accounted for twice, and it is there, to be sent again, until the batch is trained. Groups stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_like.groups import Head, pack_heads
from areal_like.messages import Batch
from areal_like.wire import Frame, Payloads, WireError
from buffer.outbox import Outbox


def split(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of the groups of each rank, ascending: longest first, each to the rank with the fewest tokens so far.

    `tokens` counts those of each group. Pure; ties go to the earlier group and the lower rank. No rank has more than
    4/3 of the best split (Graham 1969). A rank gets none where there are fewer groups than ranks.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for place in sorted(range(len(tokens)), key=lambda each: -tokens[each]):
        lightest = min(range(ranks), key=lambda rank: (totals[rank], len(shares[rank])))
        shares[lightest].append(place)
        totals[lightest] += tokens[place]
    return [sorted(share) for share in shares]


@dataclass(slots=True)
class Served:
    """A batch on its way: as one message, and its `heads` and `payloads` in the order of the batch; `places` of each
    rank's groups."""

    batch: Batch
    heads: list[Head]
    payloads: list[Frame]
    places: list[list[int]]

    def share(self, rank: int) -> tuple[Batch, Payloads]:
        """The message to a rank, and its payloads. What the buffer tells goes to rank 0 alone."""
        if len(self.places) == 1:
            return self.batch, self.payloads
        batch, places = self.batch, self.places[rank]
        share = Batch(
            batch.index,
            batch.version,
            batch.oldest_allowed,
            [batch.actors[place] for place in places],
            pack_heads([self.heads[place] for place in places]),
            batch.info if rank == 0 else {},
            batch.redo,
            places,
        )
        return share, [self.payloads[place] for place in places]


@dataclass(slots=True)
class Shares:
    """`ranks` of the learner; `served` batches by index, those that are not trained yet; `wanted` by rank: who waits
    for the share of which batch."""

    ranks: int = 1
    served: dict[int, Served] = field(default_factory=dict)
    wanted: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def put(self, batch: Batch, heads: list[Head], payloads: list[Frame]) -> Served:
        """Keep a batch that is served, to be sent until it is trained."""
        places = split([head.tokens for head in heads], self.ranks)
        self.served[batch.index] = served = Served(batch, heads, payloads, places)
        return served

    def want(self, peer: bytes, index: int, rank: int) -> None:
        """A rank other than 0 asks for its share of a batch, which may not be there yet. Raises WireError."""
        if not 0 < rank < self.ranks:
            raise WireError(f"there is no share for rank {rank} of {self.ranks}")
        self.wanted[rank] = peer, index

    def trained(self, steps: int) -> None:
        """Batches before `steps` are trained: every rank has had its share of them."""
        for index in [index for index in self.served if index < steps]:
            del self.served[index]

    def void(self, index: int) -> list[Served]:
        """This batch and those after it are not to be trained as they were served; returns them."""
        return [self.served.pop(each) for each in sorted(self.served) if each >= index]

    def answer(self, outbox: Outbox) -> None:
        """Send what other ranks wait for and is there."""
        for rank, (peer, index) in list(self.wanted.items()):
            if index in self.served:
                del self.wanted[rank]
                outbox.put(peer, *self.served[index].share(rank))
