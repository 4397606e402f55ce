"""Sessions with messages in a fixed order: a new hello voids earlier agreements."""

import pytest

from actors import session as sessions
from actors.session import Session
from areal_like.types import Lease
from areal_like.wire import messages
from areal_like.wire.frames import SAY_HELLO, Payloads, Received
from areal_like.wire.link import BusError


class Engine:
    version, digest = 4, "d4"


class Worker:
    def __init__(self, told: list) -> None:
        self.told, self.engine = told, Engine()

    def hello_again(self) -> None:
        self.told.append("hello")

    def start(self, leases: list, carried: dict) -> None:
        self.told.append([lease.group_id for lease in leases])


class Client:
    def __init__(self, told: list) -> None:
        self.told = told

    def send(self, message: messages.Applied) -> None:
        self.told.append((message.version, message.digest))

    def carried(self, lease: messages.Lease, payloads: Payloads) -> dict:
        return {}


def begun() -> tuple[Session, list]:
    told: list = []
    return Session(Client(told), Worker(told), None), told


def lease(number: int) -> Received:
    return Received(messages.Lease([Lease(number, 0, "train", 1, 1)], []))


def refused(reason: str) -> Received:
    return Received(messages.Refused(reason))


REFUSED = refused(f"unknown actor: {SAY_HELLO}")
WELCOME = Received(messages.Welcome())


def test_a_lease_of_the_session_before_is_not_begun() -> None:
    session, told = begun()
    session.handle(WELCOME)
    session.handle(lease(1))
    session.renew()
    session.handle(lease(2))
    session.handle(WELCOME)
    session.handle(lease(3))
    assert told == [[1], "hello", (4, "d4"), [3]]


def test_many_refusals_make_one_hello_until_it_has_been_unanswered_for_long(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    session, told = begun()
    session.handle(WELCOME)
    for _ in range(5):
        session.handle(REFUSED)
    assert told.count("hello") == 1
    now[0] += sessions.HELLO_SECONDS + 1
    for _ in range(5):
        session.handle(REFUSED)
    assert told.count("hello") == 2, "the first one was lost"
    session.handle(WELCOME)
    session.handle(REFUSED)
    assert told.count("hello") == 3


def test_an_actor_whose_key_is_not_one_of_actors_ends() -> None:
    session, _ = begun()
    reason = "a key of role operator can't say hello as 'actor'"
    with pytest.raises(BusError, match=reason):
        session.handle(refused(reason))
