"""A run over hosts with their own addresses: a slow network that loses packets, and one that is split in two."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.ledger import audit
from tests.chaos.victim import NO_END, Victim
from tests.faults.hosts import Network, missing
from tests.integration.runs import REPOSITORY, summary

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(missing()), reason=missing())]

ROLES = ("buffer", "learner", "actor-0", "actor-1")
DELAY, LOSS, CUT_SECONDS, TIMEOUT = 0.005, 0.01, 10.0, 3.0


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(ROLES, DELAY, LOSS)
    yield network
    network.close()


def test_a_network_that_falls_in_two_for_10_seconds(network: Network, tmp_path: Path) -> None:
    """The learner and an actor lose the buffer and the other actor for longer than the time-out. The weights are real,
    and go from the learner to the actors over the same network."""
    run = ["groups_per_batch=4", "eval.prompts=4", "eval.every=5", "run.target_reward=null", f"run.steps={NO_END}"]
    run += [f"buffer.heartbeat_timeout={TIMEOUT}", "buffer.keep_journal=true", "checkpoint.every=10", "resume=auto"]
    launcher = {"name": "tests.faults.hosts:HostsLauncher", "namespaces": network.namespaces}
    command = ["scripts.train", "configs/quickstart.yaml", f"run.dir={tmp_path}", "run.name=run"]
    victim = Victim([*command, *run, f"launcher={json.dumps(launcher)}"], tmp_path / "run")
    victim.start()
    try:
        victim.until("train steps", lambda: victim.steps() >= 10)
        network.part("learner", "actor-0")
        time.sleep(CUT_SECONDS)
        network.heal()
        done = victim.steps()
        victim.until("train steps after the cut", lambda: victim.steps() >= done + 10)
        logs = tmp_path / "run/logs"
        assert "actor-0: no sign of life" in (logs / "buffer.log").read_text()
        assert "the connection to the buffer broke" in (logs / "learner.log").read_text()
        command = [sys.executable, "-m", "scripts.stop", str(victim.folder), "--drain"]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        assert victim.wait() == 0, victim.last_words()
    finally:
        victim.end()
    assert network.carried > 1000 and network.lost > 10
    findings = audit(tmp_path / "run").findings
    assert not any(findings.values()), findings
    found = summary(victim.folder)
    ledger = found["ledger"]
    gone = sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == ledger["trained"] + gone + ledger["active"]
    assert set(ledger["dropped"]) <= {"end of run"}
    assert found["staleness_max"] <= found["staleness_bound"]
