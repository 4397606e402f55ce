"""Sockets over real files and ports: nothing is lost or reordered, bad messages are refused, and with keys all
peers that are not on the allow-list; the output and exit codes of `areal-like keys`."""

import asyncio
import errno
import os
import random
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from areal_like.wire import keys
from areal_like.wire.bus import AsyncDealer, Dealer, Router
from areal_like.wire.frames import MAX_FRAMES, Received, WireError, encode
from areal_like.wire.keys import KeysError
from areal_like.wire.link import BusError
from areal_like.wire.messages import SENDS, Chunk, Hello, Lost, Message, Pushed, Status, Trained, Welcome
from scripts import keys as command
from tests.faults.proxy import Proxy
from tests.forked import until
from tests.messages import examples

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
    with pytest.raises(BusError, match=r"can't bind to tcp://127\.0\.0\.1:\d+: in use; choose a free buffer\.port"):
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(params=["ipc", "tcp"])
def guarded(request: pytest.FixtureRequest, folder: Path) -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="keys-", dir="/tmp") as place:
        guarded = Router(f"ipc://{place}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0", str(folder))
        yield guarded
        guarded.close()


def assert_served(guarded: Router, folder: Path, name: str = "friend") -> None:
    """A client on the allow-list sends, and gets an answer."""
    dealer = Dealer(guarded.endpoint, name, "buffer", keys=str(folder))
    dealer.send(Status())
    received = guarded.receive(SECONDS)
    assert received is not None and received[1].message == Status()
    guarded.send(received[0], Welcome())
    answer = dealer.receive(SECONDS)
    assert answer is not None and answer.message == Welcome()
    dealer.close()


def assert_refused(dealer: Dealer, reason: str) -> None:
    """The client receives the refusal while it sends or while it waits, whichever comes first."""
    with pytest.raises(BusError, match=reason):
        dealer.send(Trained(1))
        dealer.receive(SECONDS)
    dealer.close()


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (None, "asks for keys, and here security.key_folder is not set"),
        ("server.key", "not in its allow-list"),
        ("clients/actor.key", "server.key is not that of its keys"),
    ],
    ids=["no keys", "not on the list", "keys of another server"],
)
def test_a_stranger_is_refused_and_the_others_are_served(guarded, folder, tmp_path, taken, reason: str) -> None:
    """`taken`: the file that the stranger has for the server's public key."""
    other = tmp_path / "other"
    keys.make(other)
    if taken:
        (other / "server.key").write_bytes((folder / taken).read_bytes())
    assert_served(guarded, folder)
    stranger = Dealer(guarded.endpoint, "stranger", "buffer", keys=str(other) if taken else None)
    assert_refused(stranger, f"the buffer .*{reason}")
    assert_served(guarded, folder, "other friend")
    assert guarded.receive(0.05) is None and guarded.refused == 0, "no word of the stranger has come in"


def test_a_client_with_keys_refuses_a_server_without(folder: Path) -> None:
    guarded = Router("tcp://127.0.0.1:0")
    assert_refused(Dealer(guarded.endpoint, "a", "buffer", keys=str(folder)), "runs without keys")
    guarded.close()


def test_clients_come_and_go_without_a_restart(guarded: Router, folder: Path) -> None:
    machine = keys.add_client(folder, "machine-2")
    assert sorted(path.name for path in machine.iterdir()) == ["client.key_secret", "server.key"]
    assert_served(guarded, machine)
    (folder / "clients" / "machine-2.key").unlink()
    assert_refused(Dealer(guarded.endpoint, "a", "buffer", keys=str(machine)), "allow-list")
    assert_served(guarded, folder)
    (folder / "clients" / "broken.key").write_text("no key")
    assert_served(guarded, folder, "beside a broken file")


def test_a_file_that_cannot_be_read_for_a_while_shuts_out_nobody(guarded: Router, folder: Path, monkeypatch) -> None:
    """Network file systems have such moments; the client would end for good."""

    def read_text(path: Path, *_: object, **__: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert_served(guarded, folder)
    monkeypatch.setattr(Path, "iterdir", read_text)
    assert_served(guarded, folder, "without a list")


def test_only_the_owner_can_read_what_is_secret(folder: Path) -> None:
    secret = sorted(folder.glob("**/*_secret"))
    assert [path.stem for path in secret] == ["actor", "learner", "operator", "server"]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    secret[0].chmod(0o640)
    with pytest.raises(KeysError, match=r"can be read by others.*chmod 600"):
        keys.client_pair(folder, "actor")
    secret[3].chmod(0o604)
    with pytest.raises(KeysError, match=r"can be read by others.*chmod 600"):
        Router("tcp://127.0.0.1:0", str(folder))


EXAMPLES = [message for message, _ in examples(random.Random(0))]
GUARDED = [Hello("learner", "x", 1, 1), Hello("actor", "x", 1, 1), Lost("x", 1, "", True), Lost("x", 1, "", False)]


@pytest.mark.parametrize("role", list(SENDS))
def test_a_key_is_for_one_role_and_says_nothing_of_anothers(folder: Path, role: str) -> None:
    keys.add_client(folder, "machine", role)
    guarded = Router("tcp://127.0.0.1:0", str(folder))
    for place in [folder] * (role in keys.ROLES) + [folder / "machine"]:
        dealer = Dealer(guarded.endpoint, role, "buffer", keys=str(place), role=role)
        for message in [*EXAMPLES, *GUARDED]:
            dealer.send(message)
            _, answer = guarded.receive(SECONDS) or (b"", None)
            may = message.role == role if isinstance(message, Hello) else type(message) in SENDS[role]
            may = may and not (role == "actor" and isinstance(message, Lost) and message.for_good)
            assert isinstance(answer, Received) == may, (message, answer)
            owners = {keys.client_pair(place, role)[0].decode()} if role == "actor" else {""}
            assert not may or {answer.owner} == owners
        dealer.close()
    guarded.close()


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("**/*.key*")}
    for missing in ("server.key", "server.key_secret", "learner.key_secret"):
        (folder / missing).rename(folder / "away")
        with pytest.raises(KeysError, match="exists: nothing was changed"):
            keys.make(folder)
        (folder / "away").rename(folder / missing)
    keys.add_client(folder, "b")
    for name, reason in (("b", "already"), ("", "name"), ("..", "name"), ("a/b", "name"), ("clients", "name")):
        with pytest.raises(KeysError, match=reason):
            keys.add_client(folder, name)
    assert before.items() <= {path: path.read_bytes() for path in folder.glob("**/*.key*")}.items()


def test_keys_that_are_missing_are_an_error_that_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"no key in .*security.key_folder"):
        Dealer("tcp://127.0.0.1:1", "a", "buffer", keys=str(tmp_path))
    with pytest.raises(KeysError, match="clients is missing"):
        Router("tcp://127.0.0.1:0", str(tmp_path))
    (tmp_path / "clients").mkdir()
    with pytest.raises(KeysError, match="no key in"):
        Router("tcp://127.0.0.1:0", str(tmp_path))


def test_keys_are_made_once_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "command"
    assert command.main([str(folder)]) == command.main([str(folder), "--client", "far"]) == 0
    assert (folder / "far" / "client.key_secret").stat().st_mode & 0o777 == 0o600
    for wrong in ([str(folder)], [str(tmp_path / "none"), "--client", "x"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)
    said = "".join(capsys.readouterr())
    assert f"security.key_folder={folder}" in said and str(folder / "far") in said
    for line in (line for path in folder.glob("**/*.key*") for line in path.read_text().splitlines()):
        if "-key" in line and "=" in line:
            assert line.partition("=")[2].strip(' "') not in said
