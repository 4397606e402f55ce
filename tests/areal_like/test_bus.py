"""Sockets over real files and ports: nothing is lost or reordered, bad messages are refused."""

import asyncio
import os
import re
import tempfile
import threading
from collections.abc import Iterator

import pytest
import zmq

from areal_like.wire.bus import AsyncDealer, Dealer, Router
from areal_like.wire.frames import MAX_FRAMES, WireError, encode
from areal_like.wire.link import BusError
from areal_like.wire.messages import Chunk, Message, Pushed, Status, Trained, Welcome
from tests.faults.proxy import Proxy
from tests.forked import until

SECONDS = 30.0
"""Time for what takes a millisecond."""


@pytest.fixture(params=["ipc", "tcp"])
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="bus-", dir="/tmp") as folder:
        router = Router(f"ipc://{folder}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0")
        yield router
        router.close()


def received(router: Router) -> tuple[bytes, Message | WireError]:
    result = router.receive(SECONDS)
    assert result is not None, "no message came"
    peer, said = result
    return peer, said if isinstance(said, WireError) else said.message


def test_many_more_messages_than_any_high_water_mark_arrive_in_order(router: Router) -> None:
    dealer = Dealer(router.endpoint, "learner", peer="buffer")
    for index in range(5000):
        dealer.send(Trained(index))
    for index in range(5000):
        peer, message = received(router)
        assert message == Trained(index)
    other = Dealer(router.endpoint, "learner", peer="buffer")
    ids = [each.socket.getsockopt(zmq.ROUTING_ID) for each in (dealer, other)]
    assert ids[0] == peer and ids[0] != ids[1], "a peer with another's routing id could claim its connection"
    assert all(re.fullmatch(rb"learner:%d:[0-9a-f]{16}" % os.getpid(), each) for each in ids)
    dealer.close()
    other.close()


def test_answers_go_to_who_asked_with_their_payload_also_to_an_asyncio_socket(router: Router) -> None:
    async def talk() -> None:
        blocking, other = Dealer(router.endpoint, "a", peer="buffer"), AsyncDealer(router.endpoint, "b", "buffer")
        for dealer in (blocking, other):
            dealer.send(Status())
        for _ in range(2):
            peer, _ = received(router)
            router.send(peer, Chunk(0, -1, 1, 0), [peer * 100_000])
        for dealer, answer in (
            (blocking, blocking.receive(SECONDS)),
            (other, await asyncio.wait_for(other.receive(), SECONDS)),
        ):
            assert answer and bytes(answer.payload) == dealer.socket.getsockopt(zmq.ROUTING_ID) * 100_000
            dealer.close()

    asyncio.run(talk())


@pytest.mark.parametrize("frames", [[b"\x80\x04 no msgpack"], encode(Status(), [b""] * (MAX_FRAMES + 100))], ids=len)
def test_a_bad_message_or_one_of_too_many_frames_is_refused_and_the_next_one_taken(router: Router, frames) -> None:
    raw, broken_off = (zmq.Context.instance().socket(zmq.DEALER) for _ in range(2))
    for each in (raw, broken_off):
        each.connect(router.endpoint)
    broken_off.send(b"x", zmq.SNDMORE)
    broken_off.close(linger=0)
    raw.send_multipart(frames)
    assert isinstance(received(router)[1], WireError) and router.refused == 1
    raw.send_multipart(encode(Trained(7)))
    assert received(router)[1] == Trained(7)
    raw.close(linger=0)


def test_a_port_in_use_is_an_error_with_a_way_out() -> None:
    holder = Router("tcp://127.0.0.1:0")
    with pytest.raises(BusError, match=r"can't bind to tcp://127\.0\.0\.1:\d+: another process uses it; choose"):
        Router(holder.endpoint)
    holder.close()


def test_a_frame_over_the_limit_is_not_taken_and_the_others_are_served() -> None:
    router = Router("tcp://127.0.0.1:0", max_frame=1000)
    large, small = Dealer(router.endpoint, "large", peer="x"), Dealer(router.endpoint, "small", peer="x")
    large.send(Chunk(0, -1, 0, 0), [bytes(2000)])
    small.send(Chunk(0, -1, 1, 0), [bytes(900)])
    _, message = received(router)
    assert isinstance(message, Chunk) and message.version == 1
    assert router.receive(0.1) is None
    large.close()
    small.close()
    router.close()


def test_what_a_peer_does_not_read_is_bounded_and_keeps_nobody_waiting() -> None:
    router = Router("tcp://127.0.0.1:0", unsent=10)
    reader = Dealer(router.endpoint, "reader", peer="x")
    reader.send(Status())
    reader_id, _ = received(router)
    deaf = zmq.Context.instance().socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(router.endpoint)
    deaf.send_multipart(encode(Status()))
    deaf_id, _ = received(router)
    for _ in range(200):
        router.send(deaf_id, Chunk(0, -1, 0, 0), [bytes(1 << 20)])
    assert router.unsent > 100, "of 200 MB only what fits the sockets and ten messages were kept"
    router.send(reader_id, Welcome())
    answer = reader.receive(SECONDS)
    assert answer is not None and answer.message == Welcome()
    deaf.close(linger=0)
    reader.close()
    router.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["close", "swallow"])
def test_a_connection_that_leads_nowhere_is_made_anew_and_reported_once(kind: str) -> None:
    """`swallow`: the connection looks alive; only the other side's silence shows that it is not."""
    router = Router("tcp://127.0.0.1:0")
    proxy = Proxy(int(router.endpoint.rpartition(":")[2]))
    endpoint = f"tcp://127.0.0.1:{proxy.port}"
    blocking = Dealer(endpoint, "learner", peer="buffer", link_timeout=0.5)

    async def talk() -> None:
        dealer = AsyncDealer(endpoint, "actor-0", "buffer", link_timeout=0.5)
        for each in (dealer, blocking):
            each.send(Status())
            received(router)
        assert not blocking.link.reconnected()
        proxy.cut(kind)
        proxy.heal()
        await asyncio.wait_for(dealer.link.until_reconnected(), SECONDS)
        until("a report of the reconnect", blocking.link.reconnected)
        assert not blocking.link.reconnected()
        for each in (dealer, blocking):
            each.send(Trained(1))
            assert received(router)[1] == Trained(1)
            each.close()

    asyncio.run(talk())
    proxy.close()
    router.close()


def test_one_thread_receives_while_others_send(tmp_path) -> None:
    """Every message of every thread arrives, in that thread's order, and no receive misses an answer."""
    router = Router(f"ipc://{tmp_path}/s")
    dealer = Dealer(router.endpoint, "learner", "buffer")
    threads, each = 3, 300

    def echo() -> None:
        for _ in range(threads * each):
            peer, message = received(router)
            assert isinstance(message, Trained)
            router.send(peer, Pushed([message.index]))

    def say(first: int) -> None:
        for index in range(first, first + each):
            dealer.send(Trained(index))

    others = [threading.Thread(target=echo), *(threading.Thread(target=say, args=(k * each,)) for k in range(threads))]
    for other in others:
        other.start()
    answers: list[int] = []
    while len(answers) < threads * each:
        answer = dealer.receive(timeout=20)
        assert answer is not None and isinstance(answer.message, Pushed)
        answers += answer.message.ids
    for other in others:
        other.join(20)
    assert all(sorted(part) == part for k in range(threads) if (part := [a for a in answers if a // each == k]))
    assert sorted(answers) == list(range(threads * each))
    dealer.close()
    router.close()
