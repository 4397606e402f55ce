"""Faults at random moments in one run: the ledger holds, each group is trained once, and the final weights are those of
an undisturbed run over the recorded batches. `CHAOS=10 python -m pytest tests/chaos` makes ten times as many."""

import contextlib
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest

from scripts.following.running import Running
from scripts.ledger import audit
from tests.chaos import hanging
from tests.forked import Command
from tests.integration.living import NO_END, Run, roles
from tests.integration.runs import rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STARTER = "starter"
TIMES = int(os.environ.get("CHAOS", "1"))
SMALL = ["eval.prompts=4", "eval.every=0", "groups_per_batch=4", "checkpoint.every=3", "run.trackers=[]"]
SMALL += ["run.target_reward=null", "resume=auto", "buffer.keep_journal=true", f"run.steps={NO_END}"]
SMALL += [f"actors.max_restarts={NO_END}", "actors.restart_window=1"]  # no restart is delayed
TIMED = ["engine=timed", "learner=timed", "learner.base=0.05", "engine.median=20"]


def wreck(place: Path, plan: list[tuple[str, str]], *overrides: str, seconds: float = 2.0, more: int = 5) -> None:
    """Make the faults (kind, who) of a plan in random order, and check the end of the run."""
    dice = random.Random(1)
    victim, plan, done = Run(place, *SMALL, *overrides), plan * TIMES, []
    dice.shuffle(plan)
    try:
        for what, who in plan:
            done.append((what, who, await_moment(victim, what, who, dice)))
            make(victim, what, who, seconds)
            if victim.ended:
                victim.start()
        disturbed = victim.finish_resumed(more)
    finally:
        victim.close()
        print(*done, sep="\n")
    assert not any((findings := audit(victim.folder).findings).values()), findings
    made = rows(victim.folder)
    assert [row["step"] for row in made] == list(range(1, disturbed["steps"] + 1)) and disturbed["since_step"] > 0
    mean = sum(row["staleness/mean"] for row in made) / len(made)
    assert disturbed["staleness_mean"] == pytest.approx(mean), "of all processes of the run"
    again = [*SMALL, *overrides, f"replay={victim.folder}", "resume=null"]
    again += ["learner.base=0"] * ("learner=timed" in overrides)
    assert disturbed["weights_digest"] == Run(place, *again, name="replay").finish()["weights_digest"]


def pids(victim: Run) -> dict[str, int]:
    """Role → process id of the starter and of the live roles that it has started."""
    return {STARTER: victim.process.pid} | roles(f"--starter {victim.process.pid}")


def make(victim: Run, what: str, who: str, seconds: float) -> None:
    victim.until(f"{who} is there", lambda: who in pids(victim))
    pid, steps = pids(victim)[who], victim.steps()
    if what == "kill":
        os.kill(pid, signal.SIGKILL)
        if not who.startswith("actor"):
            victim.end()
    elif what == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    elif what == "hang":  # the engine, not its process
        switch = hanging.switch(victim.folder / "servers" / who)
        switch.parent.mkdir(parents=True, exist_ok=True)
        switch.touch()
        time.sleep(seconds)
        switch.unlink()
    else:  # a full disk: no file of the process can grow (EFBIG in place of ENOSPC, with the same handling)
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
        time.sleep(1.0)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        deadline = time.monotonic() + 60  # a run that meets it ends, which may take long; otherwise it makes steps
        while time.monotonic() < deadline and not victim.ended and victim.steps() <= steps + 1:
            time.sleep(0.05)
        time.sleep(1.0)


def await_moment(victim: Run, what: str, who: str, dice: random.Random) -> str:
    begin = victim.steps()
    if what == "kill" and dice.random() < 0.2:
        time.sleep(dice.uniform(0.0, 0.5))
        return "starting or training"
    victim.until("the buffer is there", (victim.folder / "rendezvous" / "buffer.json").exists)
    victim.until("a train step", lambda: victim.steps() != begin)
    special = what == "kill" and dice.random() < 0.5
    if special and who in ("learner", STARTER) and caught(victim, "checkpoints", ".step-*.tmp"):
        return "writing a checkpoint"
    if special and who == "buffer" and caught(victim, "journal", "next.tmp"):
        return "beginning a segment"
    time.sleep(dice.uniform(0.0, 0.5))
    return "training"


def caught(victim: Run, folder: str, pattern: str) -> bool:
    """Wait for a file that exists for milliseconds only."""
    deadline, place = time.monotonic() + 10, victim.folder / folder
    while time.monotonic() < deadline and not victim.ended:
        if next(place.glob(pattern), None):
            return True
        time.sleep(0.0002)
    return False


def test_each_role_killed_in_one_run_leaves_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    wreck(tmp_path, [("kill", who) for who in ("actor-0", "learner", "buffer", STARTER)])


def test_a_buffer_that_dies_again_and_again_under_load(tmp_path: Path) -> None:
    """Out of order, each record synced: batches served before a crash are served again unchanged."""
    order = ["batch_policy=fifo", "buffer.journal=fsync", "scheduler.max_staleness=2"]
    wreck(tmp_path, [("kill", "buffer")] * 3, *TIMED, *order)


def test_an_actor_that_stops_for_longer_than_the_time_out(tmp_path: Path) -> None:
    """Its groups go to others; when it continues it joins again, and its late groups are not trained twice."""
    slow = [*TIMED, "learner.base=0.1", "buffer.heartbeat_timeout=2"]
    wreck(tmp_path, [("stop", "actor-0")], *slow, seconds=4, more=20)
    log = (tmp_path / "run" / "logs" / "buffer.log").read_text()
    assert log.count("actor-0 joined") >= 3, "at the start, after the stop, and at the resume"


def test_hangs_and_full_disks_in_one_run(tmp_path: Path) -> None:
    plan = [("hang", "actor-0"), ("full disk", "buffer"), ("full disk", "learner")]
    wreck(tmp_path, plan, "engine.name=tests.chaos.hanging:HangingEngine")


def test_actors_that_come_and_go(tmp_path: Path) -> None:
    """1 → 6 → 2 → 1 actors, half of the six killed; groups that are handed back continue elsewhere. Each hands its
    weights on to the next one."""
    victim, dice = Run(tmp_path, *SMALL, *TIMED, "actors.count=1", "weights.fanout=1", "--plain"), random.Random(0)
    gentle = 0
    victim.until("the buffer is there", (victim.folder / "rendezvous" / "buffer.json").exists)
    running = Running(victim.folder)
    joiner: Command | None = None

    def ready() -> int:
        """Actors that hold weights."""
        return sum(actor["version"] >= 0 for actor in running.report()["actors"].values())

    def relayed() -> list[bool]:
        """For each guest: have all of its weights come from other actors?"""
        stats = [actor["stats"] for name, actor in running.report()["actors"].items() if name.startswith("guest")]
        counts = [[each.get(f"sum:rollout/weight_bytes{end}", 0) for end in ("", "_relayed")] for each in stats]
        return [count == others > 0 for count, others in counts]

    def actors() -> dict[str, int]:
        return {name: pid for name, pid in victim.roles().items() if name.startswith(("actor", "guest"))}

    try:
        victim.until("the first actor", lambda: ready() == 1)
        for _ in range(TIMES):
            joiner = victim.join("--actors", "5", "--max-restarts", "0")
            victim.until("six actors", lambda: ready() >= 6)
            victim.until("relayed weights", lambda: all(relayed()))
            victim.until_steps(3)
            killed = dice.sample(sorted(actors()), 3)
            for name in killed:
                os.kill(actors()[name], signal.SIGKILL)
            gone = set(killed) - {"actor-0"}  # the starter starts it again
            gentle += 5 - len(gone)
            victim.until("their absence", lambda gone=gone: not gone & set(running.report()["actors"]))
            for name in sorted(name for name in actors() if name.startswith("guest"))[1:]:
                os.kill(actors()[name], signal.SIGTERM)
            victim.until("two actors", lambda: ready() == 2)
            victim.until_steps(3)
            joiner.terminate()
            joiner.wait(60)
            victim.until("one actor", lambda: ready() == 1)
            victim.until_steps(3)
        report = running.report()
        running.client.stop(drain=True)
        victim.finish()
    finally:
        if joiner:
            joiner.terminate()
        running.close()
        victim.close()
    findings = audit(victim.folder).findings
    assert not any(findings.values()), findings
    assert report["staleness_max"] <= report["staleness_bound"]
    assert victim.log("buffer").count("leaves;") == gentle, "the others were killed"
