"""Networks that fail between real processes: every prompt is trained exactly once, and no process waits endlessly.

The engine and the learner are timed ones (no torch), evaluations go on all the time, so that there is always a message
of each kind to lose.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.ledger import audit
from tests.chaos.victim import NO_END, Victim, finish
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.integration

TIMEOUT = 2.0
"""Seconds of silence after which a peer, or a link, counts as dead."""
SHORT, LONG = 0.3, 3.0
RUN = ["engine=timed", "learner=timed", "learner.base=0.03", "engine.median=20", "eval.prompts=4", "eval.every=3"]
RUN += [f"buffer.heartbeat_timeout={TIMEOUT}", "buffer.transport=tcp", "buffer.keep_journal=true", "resume=auto"]
RUN += ["run.name=run", f"run.steps={NO_END}", "run.target_reward=null", "groups_per_batch=8", "checkpoint.every=10"]


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


class Net:
    """A run whose processes reach the buffer through a proxy."""

    def __init__(self, place: Path):
        port = free_port()
        self.proxy = Proxy(port)
        launcher = f"{{name: tests.faults.proxy:ProxiedLauncher, proxy: 'tcp://127.0.0.1:{self.proxy.port}'}}"
        command = ["scripts.train", "configs/quickstart.yaml", f"run.dir={place}", *RUN]
        self.run = Victim([*command, f"buffer.port={port}", f"launcher={launcher}"], place / "run")
        self.run.start()

    def until_steps(self, more: int) -> None:
        begin = self.run.steps()
        self.run.until(f"{more} train steps more", lambda: self.run.steps() >= begin + more)

    def cut(self, kind: str, who: str, seconds: float) -> None:
        self.run.until(f"a link of {who}", lambda: self.proxy.links(who) > 0)
        self.proxy.cut(kind, who)
        time.sleep(seconds)
        self.proxy.heal()
        self.until_steps(5)

    def log(self, name: str) -> str:
        return (self.run.folder / "logs" / f"{name}.log").read_text()

    def close(self) -> None:
        self.run.end()
        self.proxy.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    net = Net(tmp_path)
    yield net
    net.close()


def assert_all_is_well(net: Net) -> None:
    summary = finish(net.run, 5)
    found = audit(net.run.folder)
    assert not any(found.findings.values()), found.findings
    ledger = summary["ledger"]
    gone = sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == ledger["trained"] + gone + ledger["active"]
    assert set(ledger["dropped"]) <= {"end of run"}
    assert summary["staleness_max"] <= summary["staleness_bound"]


@pytest.mark.parametrize("kind", ["stall", "close", "swallow"])
def test_cuts_shorter_and_longer_than_the_time_out(net: Net, kind: str) -> None:
    net.until_steps(5)
    net.cut(kind, "actor-0", SHORT)
    net.cut(kind, "actor-0", LONG)
    net.cut(kind, "learner", LONG)
    assert "actor-0: no sign of life" in net.log("buffer")
    net.run.until("actor-0 to join again", lambda: net.log("buffer").count("actor-0 joined") >= 2)
    assert_all_is_well(net)


def test_a_storm_of_broken_connections(net: Net) -> None:
    """Any message may be lost, at any time: the run continues."""
    dice = random.Random(0)
    net.until_steps(5)
    for _ in range(25):
        net.proxy.cut("close", dice.choice(["actor-0", "actor-1", "learner", ""]))
        time.sleep(dice.uniform(0.0, 0.05))
        net.proxy.heal()
        time.sleep(dice.uniform(0.0, 0.3))
    net.until_steps(10)
    assert "hello again" in net.log("actor-0")
    assert "the connection to the buffer broke" in net.log("learner")
    assert_all_is_well(net)
