"""Runs that are inspected, joined, stopped and drained from outside, with real processes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.wire import keys
from areal_like.wire.link import BusError
from areal_like.wire.supervisor_client import SupervisorClient
from scripts import status, stop
from scripts.following.running import Running
from scripts.ledger import audit
from tests.integration.living import Run
from tests.integration.runs import rows

pytestmark = pytest.mark.integration

TIMED = ["engine=timed", "learner=timed", "learner.base=0.05", "engine.median=8", "groups_per_batch=4"]
SMALL = [*TIMED, "run.target_reward=null", "eval.prompts=4", "eval.every=0", "run.steps=100000", "run.trackers=[]"]


KEPT = ["checkpoint.every=100000", "buffer.keep_journal=true"]


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run that goes on until it is ended from outside."""
    live = Run(tmp_path, *SMALL, *KEPT, *getattr(request, "param", ()))
    yield live
    live.close()


def test_a_stopped_run_goes_on_and_a_drained_one_has_trained_all_that_it_admitted(
    live: Run, capsys: pytest.CaptureFixture
) -> None:
    live.until_steps(3)
    assert stop.main([str(live.folder)]) == 0
    assert live.end() == 130
    assert "stopped at a checkpoint" in live.text() and f"resume={live.folder}" in live.text()
    done = live.steps()
    assert (live.folder / "checkpoints" / f"step-{done:08d}" / "meta.json").exists()
    assert not (live.folder / "summary.json").exists()

    live.start("resume=auto")
    live.until_steps(3)
    assert stop.main([str(live.folder), "--drain"]) == 0
    found = live.finish()
    assert "finished: it was drained" in live.text()
    assert found["ledger"]["dropped"] == {} and found["ledger"]["trained"] == found["ledger"]["admitted"]
    assert found["reward_after"] is not None
    assert [row["step"] for row in rows(live.folder)] == list(range(1, found["steps"] + 1)), "nothing was trained twice"
    assert (live.folder / "checkpoints" / f"step-{found['steps']:08d}" / "meta.json").exists()
    assert not any(audit(live.folder).findings.values())

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        stop.main([str(live.folder)])
    assert "its buffer is not running: it has ended" in capsys.readouterr().err
    assert status.main([str(live.folder)]) == 0, "of an ended run: its summary"
    assert "finished: it was drained" in capsys.readouterr().out
    (live.folder / "summary.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        status.main([str(live.folder)])
    assert f"ended without a summary after train step {found['steps']}" in capsys.readouterr().err


@pytest.mark.parametrize("live", [["buffer.transport=tcp"]], indirect=True)
def test_a_run_on_tcp_makes_keys_and_nobody_without_them_gets_in(
    live: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    live.until_steps(3)
    offered = json.loads((live.folder / "rendezvous" / "buffer.json").read_text())
    stranger = SupervisorClient(offered["endpoint"])
    with pytest.raises(BusError, match="asks for keys"):
        stranger.report(30.0)
    stranger.close()
    made = [live.folder / "keys", *(live.folder / "keys").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    actors_only = keys.add_client(live.folder / "keys", "far").rename(tmp_path / "far")
    guests = live.join("--keys", str(actors_only))
    view = Running(live.folder)
    live.until("the guest", lambda: any(name.startswith("guest") for name in view.report()["actors"]))
    view.close()
    capsys.readouterr()
    assert status.main([str(live.folder), "--json", "-", "--keys", str(actors_only)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["actors"].keys() > {"actor-0", "actor-1"} and found["step"]["step"] >= 3
    assert found["report"]["ledger"]["admitted"] >= found["report"]["ledger"]["trained"] >= 4
    assert status.main([str(live.folder)]) == 0 and "staleness" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        stop.main([str(live.folder), "--keys", str(actors_only)])
    assert "a key of role actor may not say 'stop'" in capsys.readouterr().err
    assert stop.main([str(live.folder)]) == 0 and live.end() == 130
    assert guests.wait(60) == 0


def test_usr1_during_the_start_is_not_lost(live: Run) -> None:
    live.until("the buffer", (live.folder / "rendezvous" / "buffer.json").exists)
    live.process.send_signal(signal.SIGUSR1)
    assert live.end() == 75 and "paused at a checkpoint" in live.text()
