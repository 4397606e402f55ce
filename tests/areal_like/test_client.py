"""The learner's client: how it reads a batch, and its behaviour when a connection breaks."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from areal_like.types import Batch as Taken
from areal_like.types import Group, Sample
from areal_like.wire import actor_client, messages
from areal_like.wire.actor_client import ActorClient
from areal_like.wire.bus import Router
from areal_like.wire.frames import ONLY_THE_LEARNER, Received, WireError
from areal_like.wire.groups import encode_group, pack_heads
from areal_like.wire.learner_client import LearnerClient
from areal_like.wire.link import BusError
from areal_like.wire.messages import Batch, Refused
from tests.faults.proxy import Proxy


def sample(runs: list[tuple[int, int]]) -> Sample:
    n = sum(count for _, count in runs)
    mask = np.ones(n, bool)
    mask[-1] = False  # a token of a tool, say
    mask.flags.writeable = False  # as it comes off the wire
    return Sample(np.zeros(n + 1, np.int32), 1, np.zeros(n, np.float32), mask, runs, 1.0, "stop")


def test_tokens_older_than_allowed_are_masked_and_counted_out() -> None:
    samples = [sample([(0, 2), (3, 1), (4, 2)]), sample([(4, 3)]), sample([(0, 2)])]
    for each in samples:
        each.mask_tokens_before(3)
    assert samples[0].loss_mask.tolist() == [False, False, True, True, False]
    assert samples[1].loss_mask.tolist() == [True, True, False]
    assert not samples[2].loss_mask.any()
    assert Taken(4, 4, [Group(0, samples)], oldest_allowed=3).staleness() == [1, 0]
    assert Taken(4, 4, [Group(0, samples)]).staleness() == [4, 0, 4]


PEERS: list[bytes] = []
"""Of the received messages."""


def send_batch(router: Router, index: int, redo: int = 0) -> None:
    head, payload = encode_group(Group(index, [sample([(index, 2)])], {index: "d"}))
    router.send(PEERS[-1], Batch(index, index, 0, ["actor-0"], pack_heads([head]), {}, redo=redo), [payload])


@pytest.fixture
def sent(monkeypatch) -> list[tuple[messages.Message, list]]:
    """The messages of every actor's client, with their payloads."""
    found: list[tuple[messages.Message, list]] = []
    stub = SimpleNamespace(send=lambda message, payloads=(): found.append((message, list(payloads))))
    monkeypatch.setattr(actor_client, "AsyncDealer", lambda *_, **__: stub)
    return found


def test_a_group_is_sent_once_and_again_until_it_is_acknowledged(sent, monkeypatch) -> None:
    monkeypatch.setattr(actor_client, "RETRY_SECONDS", -1.0)

    async def scenario() -> None:
        client = ActorClient("", "actor-0", 1)
        for each in (7, 8, 7, 9):
            client.push(Group(each, [sample([(0, 2)])], {0: "d"}))
        for acknowledged in ([7, 9], [8], []):
            await asyncio.sleep(0)
            client.acknowledged(acknowledged)
            client.heartbeat({}, {}, {})

    asyncio.run(scenario())
    pushed = [(message.table.groups, len(payloads)) for message, payloads in sent if isinstance(message, messages.Push)]
    assert [([each[0] for each in groups], count) for groups, count in pushed] == [([7, 8, 9], 3), ([8], 1)]


def test_repeats_of_a_push_come_ever_later(sent, monkeypatch) -> None:
    """All of them wait in the actor's memory while the buffer is stopped."""
    now = 0.0
    monkeypatch.setattr(actor_client, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        client = ActorClient("", "actor-0", 1)
        client.push(Group(7, [sample([(0, 2)])], {0: "d"}))
        for second in range(300):
            now = float(second)
            await asyncio.sleep(0)
            client.heartbeat({}, {}, {})

    asyncio.run(scenario())
    assert len([message for message, _ in sent if isinstance(message, messages.Push)]) == 6


def test_many_leases_are_handed_back_in_several_messages_the_last_of_which_is_a_goodbye(sent) -> None:
    ActorClient("", "actor-0", 1).hand_back({each: [(each, True)] for each in range(130)}, True)
    assert {key: of for message, _ in sent for key, of in message.lengths.items()} == {
        each: [(each, True)] for each in range(130)
    }
    assert [(len(message.lengths), message.leaving) for message, _ in sent] == [(64, False), (64, False), (2, True)]


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router("tcp://127.0.0.1:0")
    yield router
    router.close()


def heard(router: Router, until: str) -> list[str]:
    """The kinds of the messages received, up to and including the kind `until`."""
    kinds: list[str] = []
    while until not in kinds:
        received = router.receive(30.0)
        assert received, f"{until} did not come after {kinds}"
        assert isinstance(received[1], Received)
        PEERS.append(received[0])
        kinds.append(received[1].message.kind())
    return kinds


def test_a_batch_that_comes_twice_is_taken_once(router: Router) -> None:
    client = LearnerClient(router.endpoint)
    client.hello()
    client.want(0, 0)
    heard(router, "want")
    for index in (0, 0, 1):
        send_batch(router, index)
    assert client.batch()[0].index == 0
    client.want(1, 1)
    assert client.batch()[0].index == 1
    router.send(PEERS[-1], messages.SetAside(1, 1))
    client.set_aside(1, "NaN")
    client.want(1, 1)
    send_batch(router, 1)  # the one that was set aside
    send_batch(router, 1, redo=1)
    assert client.batch()[0].redo == 1
    client.close()


def test_a_batch_may_have_a_larger_header_than_a_message_to_the_buffer(router: Router) -> None:
    """500,000 samples, or groups whose tokens are of many versions."""
    client = LearnerClient(router.endpoint)
    client.hello()
    heard(router, "hello")
    table = messages.Table([(1, 1, 0.0)], bytes(17 << 20), b"", {})
    router.send(PEERS[-1], Batch(0, 0, 0, [], table, {}))
    received = client.dealer.receive(60)
    assert received and isinstance(received.message, Batch) and len(received.message.table.rows) == 17 << 20
    client.dealer.send(messages.Push(table))
    found = router.receive(60)
    assert found and isinstance(found[1], WireError)
    client.close()


def test_a_learner_whose_connection_broke_says_again_what_may_be_lost(router: Router) -> None:
    proxy = Proxy(int(router.endpoint.rpartition(":")[2]))
    client = LearnerClient(f"tcp://127.0.0.1:{proxy.port}")
    client.hello()
    client.published(messages.Manifest(3, "d"))
    client.want(3, 3)
    heard(router, "want")
    client.trained(2)
    heard(router, "trained")
    proxy.cut("close")
    proxy.heal()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.batch)
        assert sorted(heard(router, "trained")) == ["hello", "published", "trained", "want"]
        send_batch(router, 3)
        assert waiting.result(30.0)[0].index == 3
    client.close()
    proxy.close()


def test_a_learner_whose_hello_was_lost_says_it_when_it_is_refused(router: Router) -> None:
    client = LearnerClient(router.endpoint)
    client.hello()
    client.want(0, 0)
    heard(router, "want")
    peer = PEERS[-1]
    router.send(peer, Refused(f"want: {ONLY_THE_LEARNER}"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.batch)
        assert heard(router, "want") == ["hello", "want"]
        send_batch(router, 0)
        assert waiting.result(30.0)[0].index == 0
    router.send(peer, Refused("there is a learner already"))
    with pytest.raises(BusError, match="already"):
        client.batch()
    client.close()
