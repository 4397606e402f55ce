"""A whole run with `engine=sglang`: buffer, learner, an actor with its server, which is killed and later frozen."""

import re
import subprocess
import sys
import threading
import time

import psutil
import pytest

from scripts.ledger import audit
from tests.integration.runs import REPOSITORY, rows, summary
from tests.sglang import servers  # skips where there is no SGLang

pytestmark = pytest.mark.integration


def child_of(parents, word):
    """A child of one of these processes with this word in its title; None if there is none."""
    found = [child for parent in parents for child in parent.children() if word in " ".join(child.cmdline())]
    return found[0] if found else None


def server_of(run):
    titles = {each: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
    return child_of(
        [each for each, title in titles.items() if title.startswith("actor-0 ") and str(run) in title], "sglang"
    )


@pytest.mark.timeout(900)  # three starts of a server
def test_a_run_whose_server_is_killed_and_frozen_goes_on(tmp_path):
    steps, run = 12, tmp_path / "run"
    command = [sys.executable, "-m", "scripts.train", "configs/quickstart.yaml", f"run.dir={tmp_path}", "run.name=run"]
    command += ["engine={name: sglang, device: cpu, slots: 64}", "actors.count=1", "launcher.ready_timeout=300"]
    command += [f"run.steps={steps}", "run.target_reward=null", "eval.every=0", "eval.prompts=4", "groups_per_batch=8"]
    command += ["buffer.keep_journal=true", "checkpoint.every=100", "engine.frozen_after=15"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = threading.Timer(servers.START_SECONDS * 3, process.kill)
    end.start()

    def until_step(count):
        while process.poll() is None and not ((run / "metrics.jsonl").exists() and len(rows(run)) >= count):
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()[0]

    try:
        until_step(4)
        server_of(run).kill()
        until_step(8)
        child_of([server_of(run)], "scheduler").suspend()
        said, _ = process.communicate()
    finally:
        end.cancel()
        process.kill()
    assert process.returncode == 0, said
    frozen = r"actor-0: its SGLang server .*was frozen \(no (token|answer to /\w+) for 15 s\), restarting"
    assert re.search(frozen, said), said
    assert "actor-0: its SGLang server ended with exit code -9, restarting" in said, said
    found = summary(run)
    assert found["steps"] == steps and found["staleness_max"] <= found["staleness_bound"]
    assert (run / "logs" / "actor-0.log").read_text().count("SGLang server is ready") == 3
    assert server_of(run) is None
    assert found["ledger"]["trained"] == steps * 8
    assert not any(audit(run).findings.values()), audit(run).findings
    last = rows(run)[-1]
    # The last start's may be counted behind the last row.
    assert last["servers/restarts"] == 2 and last["servers/whole_updates"] in (2, 3), "all at each start, then patches"
    fresh = [row for row in rows(run) if "mismatch_kl" in row]
    assert fresh and max(row["mismatch_max"] for row in fresh) < 1e-3, "engine and learner agree on the same weights"
