"""Networks that fail between real processes: every prompt is trained exactly once, and no process waits endlessly.

The engine and the learner are timed ones (no torch), evaluations go on all the time, so that there is always a message
of each kind to lose.
"""

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.ledger import audit
from tests.faults.proxy import Proxy
from tests.integration.living import NO_END, Run

pytestmark = pytest.mark.integration

TIMEOUT = 2.0
"""Seconds of silence after which a peer, or a link, counts as dead."""
SHORT, LONG = 0.3, 3.0
RUN = ["engine=timed", "learner=timed", "learner.base=0.2", "engine.median=20", "eval.prompts=4", "eval.every=3"]
RUN += [f"buffer.heartbeat_timeout={TIMEOUT}", "buffer.transport=tcp", "buffer.keep_journal=true", "resume=auto"]
RUN += [f"run.steps={NO_END}", "run.target_reward=null", "groups_per_batch=8", "checkpoint.every=10"]


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
        self.run = Run(place, *RUN, f"buffer.port={port}", f"launcher={launcher}")

    def cut(self, kind: str, who: str, seconds: float) -> None:
        self.run.until(f"a link of {who}", lambda: self.proxy.links(who) > 0)
        self.proxy.cut(kind, who)
        time.sleep(seconds)
        self.proxy.heal()
        self.run.until_steps(3)

    def close(self) -> None:
        self.run.close()
        self.proxy.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    net = Net(tmp_path)
    yield net
    net.close()


def assert_all_is_well(net: Net) -> None:
    summary = net.run.finish_resumed(3)
    findings = audit(net.run.folder).findings
    assert not any(findings.values()), findings
    assert set(summary["ledger"]["dropped"]) <= {"end of run"}
    assert summary["staleness_max"] <= summary["staleness_bound"]


@pytest.mark.parametrize("kind", ["stall", "close", "swallow"])
def test_cuts_shorter_and_longer_than_the_time_out(net: Net, kind: str) -> None:
    net.run.until_steps(3)
    net.cut(kind, "actor-0", SHORT)
    net.cut(kind, "actor-0", LONG)
    net.cut(kind, "learner", LONG)
    assert "actor-0: no sign of life" in net.run.log("buffer")
    net.run.until("actor-0 to join again", lambda: net.run.log("buffer").count("actor-0 joined") >= 2)
    assert_all_is_well(net)


def test_a_storm_of_broken_connections(net: Net) -> None:
    """Any message may be lost, at any time: the run continues."""
    dice = random.Random(0)
    net.run.until_steps(5)
    for _ in range(25):
        net.proxy.cut("close", dice.choice(["actor-0", "actor-1", "learner", ""]))
        time.sleep(dice.uniform(0.0, 0.05))
        net.proxy.heal()
        time.sleep(dice.uniform(0.0, 0.3))
    net.run.until_steps(5)
    assert "hello again" in net.run.log("actor-0")
    assert "the connection to the buffer broke" in net.run.log("learner")
    assert_all_is_well(net)
