"""The tree by which actors hand weights on to one another."""

import random
from collections import Counter

import pytest

from buffer.fleet import RelayTree


def tree_of(fanout: int, count: int) -> RelayTree:
    relays = RelayTree(fanout)
    for number in range(count):
        relays.join(f"a{number}", f"tcp://{number}", "")
    return relays


@pytest.mark.parametrize("fanout", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [1, 2, 16, 100])
def test_each_serves_no_more_than_the_fan_out_whatever_comes_and_goes(fanout: int, count: int) -> None:
    relays, chance, alive = tree_of(fanout, count), random.Random(0), {f"a{number}" for number in range(count)}
    for turn in range(30):
        parents = {name: relays.above(name) for name in alive}
        served = Counter(above[0][0] if above else "the publisher" for above in parents.values())
        assert max(served.values()) <= fanout
        assert len(alive) <= fanout or served["the publisher"] == fanout
        for name, above in parents.items():  # a chain to the root, and no circle
            assert (f"tcp://{name[1:]}", "") not in above and len({each for each, _ in above}) == len(above)
            assert all(f"a{endpoint[6:]}" in alive for endpoint, _ in above)
        gone = chance.choice(sorted(alive))
        relays.leave(gone)
        alive.discard(gone)
        if turn % 3:
            relays.join(gone, f"tcp://{gone[1:]}", "")
            alive.add(gone)
        if not alive:
            break


def test_a_newcomer_is_sent_to_a_relay_before_it_offers_to_be_one() -> None:
    relays = tree_of(2, 6)
    assert relays.above("new") == [("tcp://2", ""), ("tcp://0", "")]
    assert RelayTree(0).above("new") == tree_of(0, 6).above("a5") == []
