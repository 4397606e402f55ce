"""Keys: peers on the allow-list are admitted, all others refused, and both sides receive the reason. The output and
exit codes of `areal-like keys`."""

import errno
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.wire import keys
from areal_like.wire.bus import Dealer, Router
from areal_like.wire.frames import Received
from areal_like.wire.keys import KeysError
from areal_like.wire.link import BusError
from areal_like.wire.messages import SENDS, Hello, Lost, Status, Trained, Welcome
from scripts import keys as command
from tests.messages import examples

SECONDS = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(params=["ipc", "tcp"])
def router(request: pytest.FixtureRequest, folder: Path) -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="keys-", dir="/tmp") as place:
        router = Router(f"ipc://{place}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0", str(folder))
        yield router
        router.close()


def assert_served(router: Router, folder: Path, name: str = "friend") -> None:
    """A client on the allow-list sends, and gets an answer."""
    dealer = Dealer(router.endpoint, name, "buffer", keys=str(folder))
    dealer.send(Status())
    received = router.receive(SECONDS)
    assert received is not None and received[1].message == Status()
    router.send(received[0], Welcome())
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
def test_a_stranger_is_refused_and_the_others_are_served(router, folder, tmp_path, taken, reason: str) -> None:
    """`taken`: the file that the stranger has for the server's public key."""
    other = tmp_path / "other"
    keys.make(other)
    if taken:
        (other / "server.key").write_bytes((folder / taken).read_bytes())
    assert_served(router, folder)
    stranger = Dealer(router.endpoint, "stranger", "buffer", keys=str(other) if taken else None)
    assert_refused(stranger, f"the buffer .*{reason}")
    assert_served(router, folder, "other friend")
    assert router.receive(0.05) is None and router.refused == 0, "no word of the stranger has come in"


def test_a_client_with_keys_refuses_a_server_without(folder: Path) -> None:
    router = Router("tcp://127.0.0.1:0")
    assert_refused(Dealer(router.endpoint, "a", "buffer", keys=str(folder)), "runs without keys")
    router.close()


def test_clients_come_and_go_without_a_restart(router: Router, folder: Path) -> None:
    machine = keys.add_client(folder, "machine-2")
    assert sorted(path.name for path in machine.iterdir()) == ["client.key_secret", "server.key"]
    assert_served(router, machine)
    (folder / "clients" / "machine-2.key").unlink()
    assert_refused(Dealer(router.endpoint, "a", "buffer", keys=str(machine)), "allow-list")
    assert_served(router, folder)
    (folder / "clients" / "broken.key").write_text("no key")
    assert_served(router, folder, "beside a broken file")


def test_a_file_that_cannot_be_read_for_a_while_shuts_out_nobody(router: Router, folder: Path, monkeypatch) -> None:
    """Network file systems have such moments; the client would end for good."""

    def read_text(path: Path, *_: object, **__: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert_served(router, folder)
    monkeypatch.setattr(Path, "iterdir", read_text)
    assert_served(router, folder, "without a list")


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
    router = Router("tcp://127.0.0.1:0", str(folder))
    for place in [folder] * (role in keys.ROLES) + [folder / "machine"]:
        dealer = Dealer(router.endpoint, role, "buffer", keys=str(place), role=role)
        for message in [*EXAMPLES, *GUARDED]:
            dealer.send(message)
            _, answer = router.receive(SECONDS) or (b"", None)
            may = message.role == role if isinstance(message, Hello) else type(message) in SENDS[role]
            may = may and not (role == "actor" and isinstance(message, Lost) and message.for_good)
            assert isinstance(answer, Received) == may, (message, answer)
            owners = {keys.client_pair(place, role)[0].decode()} if role == "actor" else {""}
            assert not may or {answer.owner} == owners
        dealer.close()
    router.close()


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
