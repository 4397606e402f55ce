"""Messages lost with a broken connection are sent again: nothing is counted, served or trained twice. Also shares of a
batch for a learner of several ranks."""

from hypothesis import given
from hypothesis import strategies as st

from buffer.entries import Stage
from buffer.shares import split
from tests.buffer.house import B, House, asynchronous


def begun(ranks: int = 1) -> House:
    """A run that has batch 0."""
    house = House(asynchronous())
    house.server.dispatcher.shares.ranks = ranks
    house.start()
    for group_id in range(B):
        house.finish(group_id, 0)
    return house


def last_refusal(house: House) -> str:
    return [body["reason"] for _, kind, body in house.router.sent if kind == "refused"][-1]


def test_a_batch_that_is_asked_for_again_is_the_same_until_it_is_trained() -> None:
    house = begun()
    before = house.store.ledger()
    for _ in range(3):
        house.want(0)
        house.hello("learner")
        house.publish(0)
    bodies = [body for _, kind, body in house.router.sent if kind == "batch"]
    assert len(bodies) == 3 and bodies[0] == bodies[1] == bodies[2], "evaluations come again, too"
    assert len(house.store.entries.of(Stage.SERVED)) == B
    assert house.store.ledger() == before and not house.router.refused
    house.say("learner", "trained", {"index": 0})
    house.want(0)
    assert len(house.batches()) == 3 and "trained already" in last_refusal(house)
    assert not house.server.dispatcher.shares.served, "its payloads are let go"


def test_trained_counts_once_however_often_it_is_said_and_covers_the_batches_before() -> None:
    house = begun()
    house.want(0)
    house.publish(1)
    house.apply(1)
    for group_id in range(B, 2 * B):
        house.finish(group_id, 0)
    house.want(1)
    for _ in range(2):  # the message about batch 0 was lost
        house.say("learner", "trained", {"index": 1})
    assert house.store.ledger()["trained"] == 2 * B and house.server.learner.steps == 2
    house.say("learner", "trained", {"index": 7})
    assert "was not served" in last_refusal(house) and house.server.learner.steps == 2


def test_the_end_counts_the_trained_batches_and_reports_as_often_as_asked() -> None:
    house = begun()
    house.want(0)
    for _ in range(2):
        house.say("learner", "end_run", {"reason": "enough", "steps": 1})
    reports = [body["report"] for _, kind, body in house.router.sent if kind == "report"]
    assert len(reports) == 2
    assert reports[-1]["ledger"]["trained"] == B and set(reports[-1]["ledger"]["dropped"]) == {"end of run"}


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_group_has_one_rank_and_no_rank_more_than_its_even_share_and_one_group(tokens, ranks):
    shares = split(tokens, ranks)
    assert sorted(place for share in shares for place in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    assert max(sum(tokens[place] for place in share) for share in shares) <= sum(tokens) / ranks + max([0, *tokens])
    assert split([5, 9, 4, 6], 2) == [[1, 2], [0, 3]], "the longest goes to the lightest"


def test_a_rank_gets_its_share_once_the_batch_is_served_and_again_until_it_is_trained() -> None:
    house = begun(ranks=2)

    def sent_by(kind: str, who: str, **body: int) -> list[tuple[str, list[int], list[int], bool]]:
        """(receiver, groups, their places in the whole batch, with evaluations) of each batch that this sends."""
        before = len(house.router.sent)
        house.say(who, kind, body)
        sent = [(who, body) for who, kind, body in house.router.sent[before:] if kind == "batch"]
        return [(w, [r[0] for r in b["table"]["groups"]], b["places"], "evaluations" in b["info"]) for w, b in sent]

    ask = {"index": 0, "rank": 1}
    assert sent_by("want_share", "learner-1", **ask) == []
    (first, groups, places, told), (other, others, elsewhere, told_too) = sent_by("want", "learner", index=0, version=0)
    assert (first, other, told, told_too) == ("learner", "learner-1", True, False)
    assert sorted(groups + others) == sorted(places + elsewhere) == list(range(B)) and groups and others
    assert len(house.store.entries.of(Stage.SERVED)) == B, "served once"
    assert sent_by("want_share", "learner-1", **ask) == [(other, others, elsewhere, False)]
    house.say("learner", "trained", {"index": 0})
    assert sent_by("want_share", "learner-1", **ask) == [] and "trained already" in last_refusal(house)
