"""Break a run again and again, and check how it ends: `python -m scripts.verify.chaos CONFIG [key=value ...]`.

Starts `scripts.train` and makes faults (`scripts.verify.faults`) one at a time, at random moments. Kills (SIGKILL) hit
each role in turn: at the start, in training, in the middle of writing a checkpoint or of beginning a journal segment.
The starter restarts an actor; after any other death this command resumes the run (`resume=auto`). `--stops` stop actors
(SIGSTOP) for `--stop-seconds`, `--hangs` stop their engines only. `--bad-pushes` push untrainable data, `--full-disks`
keep files of the buffer or the learner from growing, `--cuts` break the connections of an actor or the learner. After
the last fault the run trains `--more` steps undisturbed. Then the command audits its journal (`ledger --verify`), and
trains its recorded batches again without faults (`replay=RUN`): that must end in the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from areal_like.places import REPOSITORY

from ..console import output
from ..console.arguments import command, refuse
from ..following.display import ledger_line
from ..ledger import audit, verdicts
from . import faults

STARTER = "starter"
VICTIMS = ["actor", "learner", "buffer", STARTER]
DISK_SECONDS, DYING_SECONDS = 3.0, 60.0
"""Seconds for which a disk is full."""
PATIENCE = 120.0
"""Seconds within which a run must make a step, or end."""
MOMENT_SECONDS = 10.0
"""Seconds to wait for a special moment; after that the kill happens at any moment."""
LOOK_SECONDS = 0.02
"""Seconds between looks at a run; each costs processor time."""
NO_END = 1_000_000_000


class Stuck(RuntimeError):
    """The run does not do what it should; the text has the end of its output."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault, its victim and moment, and the number of rows that `metrics.jsonl` had then."""

    what: str
    who: str
    moment: str
    steps: int


def started(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    """A process of this command, whose output is appended to a file."""
    with output.open("ab") as said:
        return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


class Victim:
    """A run that is started, killed and resumed by `command`, a scripts.train with `resume=auto`."""

    def __init__(self, command: list[str], folder: Path):
        self.command, self.folder = command, folder
        self.output = folder.with_name(f"{folder.name}.out")
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self, *overrides: str) -> None:
        self.process = started([*self.command, *overrides], self.output)
        self.starts += 1

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def pids(self) -> dict[str, int]:
        """Role → process id, of those that live."""
        assert self.process is not None
        return {STARTER: self.process.pid} | children(self.process.pid)

    def until(self, what: str, event: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for an event. Raises Stuck."""
        deadline = time.monotonic() + seconds
        while not event():
            if self.ended:
                raise Stuck(f"the run ended before {what}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise Stuck(f"not within {seconds:.0f} s: {what}:\n{self.last_words()}")
            time.sleep(LOOK_SECONDS)

    def wait(self) -> int:
        """The exit code; waits while the run makes steps."""
        assert self.process is not None
        while True:
            steps = self.steps()
            try:
                return self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                if self.steps() == steps:
                    words = f"the run did not end, nor make a step, in {PATIENCE:.0f} s"
                    raise Stuck(f"{words}:\n{self.last_words()}") from None

    def last_words(self) -> str:
        return "\n".join(self.output.read_text().splitlines()[-12:])

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)


def commands() -> Iterator[tuple[int, str]]:
    """Process id and command line of all living processes, cheaper than by `ps`. A zombie has no command line."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if line := Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid), line.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def children(starter: int) -> dict[str, int]:
    """Role → process id, of the living roles that this process has started, or had started by a fork server."""
    found = {}
    for pid, line in commands():
        words = line.split()
        if f"--starter {starter} " in f"{line} " and "--name" in words:
            found[words[words.index("--name") + 1]] = pid
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """How many faults of each kind; `victims` are the kinds of processes that are killed, in turn."""

    kills: int = 0
    stops: int = 0
    hangs: int = 0
    bad_pushes: int = 0
    full_disks: int = 0
    cuts: int = 0
    victims: tuple[str, ...] = tuple(VICTIMS)

    def draw(self, actors: int, dice: random.Random) -> list[tuple[str, str]]:
        """(what, who) of each fault. Victims of a kind take turns, and so do the actors; then all are shuffled."""
        actor = itertools.cycle(f"actor-{number}" for number in range(actors))
        turns = {
            "kill": (self.kills, itertools.cycle(self.victims)),
            "stop": (self.stops, itertools.cycle(["actor"])),
            "hang": (self.hangs, itertools.cycle(["actor"])),
            "bad push": (self.bad_pushes, itertools.cycle([faults.LIAR])),
            "full disk": (self.full_disks, itertools.cycle(["buffer", "learner"])),
            "cut": (self.cuts, itertools.cycle(["actor", "learner"])),
        }
        drawn = []
        for what, (count, victims) in turns.items():
            for kind in itertools.islice(victims, count):
                drawn.append((what, next(actor) if kind == "actor" else kind))
        dice.shuffle(drawn)
        return drawn


class Chaos:
    """Makes the faults of a plan one by one; each comes at most `spread` seconds after a step (or a start)."""

    def __init__(
        self, victim: Victim, plan: list[tuple[str, str]], spread: float, stop_seconds: float, dice: random.Random
    ):
        self.victim, self.plan, self.spread = victim, plan, spread
        self.stop_seconds, self.random = stop_seconds, dice

    def run(self) -> Iterator[Fault]:
        """Fault by fault; the run lives when the last one is done."""
        self.victim.start()
        for what, who in self.plan:
            moment = self._await_moment(what, who)
            steps = self.victim.steps()
            told = self._make(what, who)
            yield Fault(what, who, f"{moment}: {told}" if told else moment, steps)
            if self.victim.ended:
                self.victim.start()

    def _make(self, what: str, who: str) -> str:
        """Make one fault. Returns its description."""
        if what == "bad push":
            return faults.lie(self.victim.folder, self.random)
        pid = self._pid(who)
        if what == "kill":
            os.kill(pid, signal.SIGKILL)
            if not who.startswith("actor"):
                self.victim.wait()
        elif what == "stop":
            faults.stop(pid, self.stop_seconds)
        elif what == "hang":
            faults.hang(self.victim.folder, who, self.stop_seconds)
        elif what == "full disk":
            steps = self.victim.steps()
            faults.fill(pid, DISK_SECONDS)
            self._until_it_steps_or_ends(steps)
        elif what == "cut":
            return f"{faults.cut(pid)} connections"
        return ""

    def _until_it_steps_or_ends(self, steps: int) -> None:
        """A run that met the full disk ends, which may take long; otherwise it makes steps."""
        deadline = time.monotonic() + DYING_SECONDS
        while time.monotonic() < deadline and not self.victim.ended and self.victim.steps() <= steps + 1:
            time.sleep(0.05)
        time.sleep(DISK_SECONDS)

    def _pid(self, who: str) -> int:
        while (pid := self.victim.pids().get(who)) is None:  # it is being started again
            self.victim.until(f"{who} is there", partial(self._lives, who))
        return pid

    def _lives(self, who: str) -> bool:
        return who in self.victim.pids()

    def _await_moment(self, what: str, role: str) -> str:
        victim, begin = self.victim, self.victim.steps()
        if role != faults.LIAR:
            victim.until("its processes are there", partial(self._lives, role))
        if what in ("kill", "stop") and self.random.random() < 0.2:
            self._sleep()
            return "starting or training"
        started = (victim.folder / "rendezvous" / "buffer.json").exists
        victim.until("the buffer is there", started)
        victim.until("a train step", lambda: victim.steps() != begin)
        special = what == "kill" and self.random.choice([True, False])
        if special and role in ("learner", STARTER) and self._catch("checkpoints", ".step-*.tmp"):
            return "writing a checkpoint"
        if special and role == "buffer" and self._catch("journal", "next.tmp"):
            return "beginning a segment"
        self._sleep()
        return "training"

    def _sleep(self) -> None:
        time.sleep(self.random.uniform(0.0, self.spread))

    def _catch(self, folder: str, pattern: str) -> bool:
        """Wait for a file that exists for milliseconds only."""
        deadline, place = time.monotonic() + MOMENT_SECONDS, self.victim.folder / folder
        while time.monotonic() < deadline and not self.victim.ended:
            if next(place.glob(pattern), None):
                return True
            time.sleep(0.0002)
        return False


def finish(victim: Victim, more: int) -> dict:
    """Let the run train `more` steps, so that the last victim joins again, and as many after a resume. Returns its
    summary."""
    begin = victim.steps()
    victim.until(f"{more} train steps after the last fault", lambda: victim.steps() >= begin + more)
    victim.end()
    victim.start(f"run.steps={victim.steps() + more}")
    if victim.wait():
        raise Stuck(f"the run failed:\n{victim.last_words()}")
    return json.loads((victim.folder / "summary.json").read_text())


def replay(victim: Victim) -> dict:
    """The summary of an undisturbed run over the batches that were recorded."""
    folder = victim.folder.with_name(f"{victim.folder.name}-replay")
    again = Victim([*victim.command, f"replay={victim.folder}", "resume=null", f"run.name={folder.name}"], folder)
    again.start()
    if again.wait():
        raise Stuck(f"the replay failed:\n{again.last_words()}")
    return json.loads((folder / "summary.json").read_text())


def fault_table(made: list[Fault]) -> Table:
    shown = Table(title="faults", title_justify="left")
    for column in ("", "what", "who", "moment", "train steps then"):
        shown.add_column(column, justify="right" if column in ("", "train steps then") else "left")
    for number, fault in enumerate(made, 1):
        shown.add_row(str(number), fault.what, fault.who, fault.moment, str(fault.steps))
    return shown


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("verify.chaos", __doc__)
    parser.add_argument("config", help="a yaml file, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for scripts.train")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="roles to kill, in turn")
    parser.add_argument("--stops", type=int, default=0, help="how often to stop an actor for a while")
    parser.add_argument("--hangs", type=int, default=0, help="how often to hang an actor's engine for a while")
    parser.add_argument("--stop-seconds", type=float, default=30.0, help="seconds of each stop and hang")
    parser.add_argument("--bad-pushes", type=int, default=0, help="how often a false actor pushes untrainable data")
    parser.add_argument("--full-disks", type=int, default=0, help="how often to fill the disk for a while")
    parser.add_argument("--cuts", type=int, default=0, help="how often to break all connections of a process")
    parser.add_argument("--more", type=int, default=5, help="train steps after the last fault, and after a resume")
    parser.add_argument("--spread", type=float, default=2.0, help="most seconds between a step and the next fault")
    parser.add_argument("--seed", type=int, default=0, help="seed for victims and moments")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from areal_like.config import run_config as configs

    name = f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = [f"run.name={name}", "resume=auto", "checkpoint.every=5", "run.target_reward=null", *args.overrides]
    overrides += ["buffer.keep_journal=true", f"actors.max_restarts={NO_END}", f"run.steps={NO_END}"]
    overrides.append("actors.restart_window=1")  # so that no restart is delayed
    if args.hangs:
        overrides.append("engine.name=scripts.verify.hanging_engine:HangingEngine")
    config = configs.load([args.config, *overrides])
    folder = (Path(config.run.dir) / (config.run.name or name)).absolute()
    if folder.exists():
        refuse(f"{folder} exists; choose another run.name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    victim = Victim([sys.executable, "-m", "scripts.train", args.config, *overrides], folder)
    dice = random.Random(args.seed)
    counts = (args.kills, args.stops, args.hangs, args.bad_pushes, args.full_disks, args.cuts)
    plan = Plan(*counts, victims=tuple(args.victims)).draw(config.actors.count or 1, dice)
    return _run(victim, Chaos(victim, plan, args.spread, args.stop_seconds, dice), args.more)


def _run(victim: Victim, chaos: Chaos, more: int) -> int:
    console, begin = output.console(), time.monotonic()
    made: list[Fault] = []
    try:
        for fault in chaos.run():
            made.append(fault)
            console.print(
                f"{time.monotonic() - begin:.0f} s, {len(made)} of {len(chaos.plan)}: {fault.what} {fault.who}, "
                f"{fault.moment}, after {fault.steps} train steps",
                markup=False,
            )
        disturbed = finish(victim, more)
        found, again = audit(victim.folder), replay(victim)
    except Stuck as error:
        console.print(f"error: {error}", markup=False)
        return 1
    finally:
        victim.end()
    console.print(fault_table(made), verdicts(found))
    console.print(
        f"{len(made)} faults, {victim.starts} starts, {disturbed['steps']} train steps in "
        f"{time.monotonic() - begin:.0f} s; groups: {ledger_line(disturbed['ledger'])}",
        highlight=False,
    )
    ours, theirs = disturbed["weights_digest"], again["weights_digest"]
    verdict = "equal" if ours == theirs else "DIFFERENT"
    console.print(f"final weights: {verdict} ({ours}; replayed without faults {theirs})", highlight=False)
    return 0 if ours == theirs and not any(found.findings.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
