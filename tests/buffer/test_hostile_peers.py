"""A hostile or faulty peer: the others make the batches that they would make without it. (On the level of sockets:
`tests/areal_like/test_bus.py`.)"""

from collections.abc import Callable
from typing import Any

import pytest

from areal_like.wire.frames import WireError
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous

BATCHES, ATTACKED = 5, 2
"""Batches in all; how many are trained when the attack comes."""


class Recording(House):
    """Records each message with its sender."""

    def __init__(self) -> None:
        super().__init__(asynchronous(max_staleness=1))
        self.recorded: list[tuple[Any, ...]] = []

    def say(self, who: str, kind: str, body: dict, *payloads: bytes) -> None:
        self.recorded.append((who, kind, body, *payloads))
        super().say(who, kind, body, *payloads)


def old_messages(house: Recording) -> None:
    """Each earlier message again, from its sender and from a stranger, the oldest last: that would set the run back."""
    for who, *message in house.recorded[::-1]:
        for each in (who, "a stranger"):
            house.say(each, *message)
    house.hello(*house.names)
    house.apply(ATTACKED)


def a_taken_name(house: Recording) -> None:
    """An actor's groups go to a stranger that never answers, until the actor itself comes again."""
    house.say("a stranger", "hello", {"role": "actor", "name": "actor-0", "pid": 1, "slots": 8})
    house.say("a stranger", "applied", {"version": 0, "digest": "d0"})
    for kind, body in (("trained", {"index": ATTACKED}), ("want", {"index": BATCHES, "version": BATCHES})):
        house.say("a stranger", kind, body)
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE)
    assert "say hello" in house.router.sent[-1][2]["reason"]
    house.hello("actor-0")
    house.apply(ATTACKED, "actor-0")


def no_messages(house: Recording) -> None:
    for peer in (b"a stranger", b"actor-0", b"learner"):
        house.router.incoming.append((peer, WireError("no message")))
    house.server.step(0)


def state(house: House) -> tuple[Any, ...]:
    return house.server.learner.steps, house.server.weights.published, house.store.ledger(), len(house.batches())


def result(attack: Callable[[Recording], None] | None) -> dict[str, Any]:
    house = Recording()
    house.start()
    for batch in range(BATCHES):
        if batch == ATTACKED and attack:
            before = state(house)
            attack(house)
            assert state(house) == before
        for name in house.names:
            for group_id in sorted(house.store.entries.held_by(name)):
                house.push(name, group_id, batch)
        house.want(batch)
        house.trained(batch)
        house.say("learner", "checkpointed", {"step": batch + 1})
    bodies = {body["index"]: body for _, kind, body in house.router.sent if kind == "batch"}
    return {
        "batches": [(body["version"], body["table"]) for _, body in sorted(bodies.items())],
        "ledger": house.store.ledger(),
        "version": house.server.weights.version,
        "staleness": house.store.staleness_max,
    }


@pytest.mark.parametrize("attack", [old_messages, a_taken_name, no_messages], ids=lambda each: each.__name__)
def test_nothing_changes_for_the_others(attack: Callable[[Recording], None]) -> None:
    undisturbed = result(None)
    assert len(undisturbed["batches"]) == BATCHES and undisturbed["ledger"]["trained"] == BATCHES * B
    assert result(attack) == undisturbed
