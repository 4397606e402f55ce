"""Let actors come and go: `python -m scripts.verify.elastic CONFIG [key=value ...] --repeats 10`.

Starts a run with one actor, and repeats: five actors join (`scripts.join`), half of the six are killed (SIGKILL),
others leave gently until two are left, and these continue for a while. Then the run trains until its held-out reward
reaches `--reward`, and is drained. The audit of the journal (`ledger --verify`) must show each prompt trained once, the
bound never broken, the ledger balanced.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..console import output
from ..console.arguments import command, refuse
from ..following.running import Running
from ..ledger import audit, verdicts
from .chaos import REPOSITORY, Stuck, Victim, children

FEW, MANY = 2, 6
STEPS = 3
"""Train steps with every number of actors, at least."""
PATIENCE = 120.0


class Elastic:
    """A run of one actor, and the actors that join it."""

    def __init__(self, victim: Victim, seed: int, patience: float = PATIENCE):
        self.victim, self.random, self.patience = victim, random.Random(seed), patience
        self.joiner: subprocess.Popen | None = None
        self._running: Running | None = None

    def start(self) -> None:
        self.victim.start()
        rendezvous = self.victim.folder / "rendezvous" / "buffer.json"
        self.victim.until("the buffer is there", rendezvous.exists, self.patience)
        self._running = Running(self.victim.folder)
        self._until("the first actor", lambda report: len(report["actors"]) == 1)
        self._train()

    def report(self) -> dict[str, Any]:
        assert self._running is not None
        return self._running.report()

    def cycle(self) -> tuple[int, int]:
        """1 → 6 → 2 → 1. Returns how many were killed, and how many left gently."""
        self._join(MANY - len(self.report()["actors"]))
        self._until(f"{MANY} actors with weights", lambda report: holding(report) >= MANY)
        self._train()
        killed = self.random.sample(sorted(self._pids()), MANY // 2)
        for name in killed:
            self._signal(name, signal.SIGKILL)
        self._until("their absence", lambda report: not set(killed) - {"actor-0"} & set(report["actors"]))
        gentle = sorted(name for name in self._pids() if name.startswith("guest"))
        gentle = gentle[: max(0, len(gentle) - (FEW - 1))]
        for name in gentle:
            self._signal(name, signal.SIGTERM)
        self._until(f"{FEW} actors", lambda report: holding(report) == FEW)
        self._train()
        self._end_joiner()
        self._until("one actor", lambda report: holding(report) == 1)
        self._train()
        return len(killed), len(gentle)

    def _join(self, count: int) -> None:
        command = [sys.executable, "-m", "scripts.join", str(self.victim.folder)]
        command += ["--actors", str(count), "--max-restarts", "0"]
        with self.victim.output.open("a") as output:
            self.joiner = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)

    def _end_joiner(self) -> None:
        if self.joiner:
            self.joiner.terminate()
            self.joiner.wait(self.patience)
            self.joiner = None

    def _pids(self) -> dict[str, int]:
        """Actor → process id."""
        found = self.victim.pids() | (children(self.joiner.pid) if self.joiner else {})
        return {name: pid for name, pid in found.items() if name.startswith(("actor", "guest"))}

    def _signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._pids()[name], number)

    def _until(self, what: str, event: Callable[[dict[str, Any]], bool]) -> None:
        """Raises Stuck."""
        deadline = time.monotonic() + self.patience
        while not event(report := self.report()):
            if time.monotonic() > deadline or self.victim.ended:
                raise Stuck(f"not in time: {what}; the buffer: {report['waits']}\n{self.victim.last_words()}")
            time.sleep(0.05)

    def _train(self) -> None:
        begin = self.report()["steps"]
        self._until("train steps", lambda report: report["steps"] >= begin + STEPS)

    def finish(self, reward: float) -> dict[str, Any]:
        """Wait until the reward is reached; then drain. Returns the buffer's last report."""
        assert self._running is not None
        self._until(
            f"a held-out reward of {reward}",
            lambda report: bool(report["evaluations"]) and report["evaluations"][-1]["reward"] >= reward,
        )
        report = self.report()
        self._running.client.stop(drain=True)
        if self.victim.wait():
            raise Stuck(f"the run failed:\n{self.victim.last_words()}")
        return report

    def close(self) -> None:
        self._end_joiner()
        if self._running:
            self._running.close()
        self.victim.end()


def holding(report: dict[str, Any]) -> int:
    """Actors that hold weights."""
    return sum(actor["version"] >= 0 for actor in report["actors"].values())


def main(argv: list[str] | None = None) -> int:
    parser = command("verify.elastic", __doc__)
    parser.add_argument("config", help="a yaml file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="must include run.dir and run.name")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="repeats of 1 → 6 → 2 → 1 actors")
    parser.add_argument("--reward", type=float, default=0.0, help="held-out reward to reach (default: any)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of victims")
    args = parser.parse_intermixed_args(argv)
    named = dict(pair.split("=", 1) for pair in args.overrides if "=" in pair)
    if missing := [key for key in ("run.dir", "run.name") if not named.get(key)]:
        refuse(f"give {' and '.join(f'{key}=...' for key in missing)}: the run is found by its folder")
    folder = Path(named["run.dir"]).expanduser() / named["run.name"]
    fixed = ["actors.count=1", "run.steps=1000000", "run.target_reward=null", "buffer.keep_journal=true"]
    fixed += [f"actors.max_restarts={args.repeats + 1}", "actors.restart_window=1", "--plain"]
    elastic = Elastic(
        Victim([sys.executable, "-m", "scripts.train", args.config, *args.overrides, *fixed], folder), args.seed
    )
    try:
        elastic.start()
        for number in range(args.repeats):
            killed, left = elastic.cycle()
            print(f"{number + 1}: {killed} killed, {left} left, step {elastic.report()['steps']}", flush=True)
        report = elastic.finish(args.reward)
    except Stuck as error:
        print(f"BROKEN: {error}")
        return 1
    finally:
        elastic.close()
    found = audit(folder)
    output.console().print(verdicts(found))
    print(f"staleness max {report['staleness_max']} of {report['staleness_bound']}, resumed {report['resumed']} groups")
    broken = any(found.findings.values()) or report["staleness_max"] > report["staleness_bound"]
    print("BROKEN" if broken else "every prompt trained once, bound kept, ledger balanced")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
