"""Batches for a learner of several ranks: which rank gets which groups, and when."""

from hypothesis import given
from hypothesis import strategies as st

from buffer.shares import split
from buffer.store import Stage
from tests.buffer.house import B, FakeRouter, House
from tests.buffer.test_lost_messages import begun, refusals, want


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_group_has_one_rank_and_no_rank_more_than_its_even_share_and_one_group(tokens, ranks):
    shares = split(tokens, ranks)
    assert sorted(place for share in shares for place in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    assert max(sum(tokens[place] for place in share) for share in shares) <= sum(tokens) / ranks + max([0, *tokens])


def test_the_longest_goes_to_the_lightest():
    assert split([5, 9, 4, 6], 2) == [[1, 2], [0, 3]]
    assert split([7], 3) == [[0], [], []]
    assert split([1, 1, 1, 1], 1) == [[0, 1, 2, 3]]


def of_two_ranks() -> House:
    house = begun()
    house.server.dispatcher.shares.ranks = 2
    return house


def want_share(house: House, index: int, rank: int = 1) -> None:
    house.say(f"learner-{rank}", "want_share", {"index": index, "rank": rank})


def served(router: FakeRouter) -> list[tuple[str, list[int], list[int]]]:
    """The receiver, the groups, and their places in the whole batch."""
    sent = [(who, body) for who, kind, body in router.sent if kind == "batch"]
    return [(who, [row[0] for row in body["table"]["groups"]], body["places"]) for who, body in sent]


def test_a_rank_that_asks_before_the_learner_gets_its_share_when_the_batch_is_served() -> None:
    house = of_two_ranks()
    want_share(house, 0)
    assert not served(house.router)
    want(house, 0)
    (first, groups, places), (other, others, elsewhere) = served(house.router)
    assert (first, other) == ("learner", "learner-1")
    assert sorted(groups + others) == sorted(places + elsewhere) == list(range(B)) and groups and others
    assert len(house.server.store.of(Stage.SERVED)) == B, "served once"
    infos = [body["info"] for _, kind, body in house.router.sent if kind == "batch"]
    assert "evaluations" in infos[0] and "evaluations" not in infos[1]


def test_a_share_is_sent_again_until_its_batch_is_trained() -> None:
    house = of_two_ranks()
    want(house, 0)
    for _ in range(2):
        want_share(house, 0)
    shares = [each for each in served(house.router) if each[0] == "learner-1"]
    assert len(shares) == 2 and shares[0] == shares[1]
    house.say("learner", "trained", {"index": 0})
    want_share(house, 0)
    assert len(served(house.router)) == 3 and "trained already" in refusals(house)[-1]
