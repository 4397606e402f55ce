"""Sessions with messages in a fixed order: a new hello voids earlier agreements."""

from types import SimpleNamespace

import pytest

from actors import session as sessions
from actors.session import Session
from areal_like.types import Lease
from areal_like.wire import messages
from areal_like.wire.frames import SAY_HELLO, Received
from areal_like.wire.link import BusError


def begun() -> tuple[Session, list]:
    """A session, and all that its client and worker are called with."""
    calls: list = []
    client = SimpleNamespace(
        send=lambda message: calls.append((message.version, message.digest)), carried=lambda *_: {}
    )
    worker = SimpleNamespace(
        engine=SimpleNamespace(version=4, digest="d4"),
        hello_again=lambda: calls.append("hello"),
        start=lambda leases, carried: calls.append([lease.group_id for lease in leases]),
    )
    return Session(client, worker, None), calls


def lease(number: int) -> Received:
    return Received(messages.Lease([Lease(number, 0, "train", 1, 1)], []))


REFUSED = Received(messages.Refused(f"unknown actor: {SAY_HELLO}"))
WELCOME = Received(messages.Welcome())


def test_a_lease_of_the_session_before_is_not_begun() -> None:
    session, calls = begun()
    session.handle(WELCOME)
    session.handle(lease(1))
    session.renew()
    session.handle(lease(2))
    session.handle(WELCOME)
    session.handle(lease(3))
    assert calls == [[1], "hello", (4, "d4"), [3]]


def test_many_refusals_make_one_hello_until_it_has_been_unanswered_for_long(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    session, calls = begun()
    session.handle(WELCOME)
    for seconds, hellos in ((0, 1), (sessions.HELLO_SECONDS + 1, 2)):
        now[0] += seconds
        for _ in range(5):
            session.handle(REFUSED)
        assert calls.count("hello") == hellos
    session.handle(WELCOME)
    session.handle(REFUSED)
    assert calls.count("hello") == 3


def test_an_actor_whose_key_is_not_one_of_actors_ends() -> None:
    reason = "a key of role operator can't say hello as 'actor'"
    with pytest.raises(BusError, match=reason):
        begun()[0].handle(Received(messages.Refused(reason)))
