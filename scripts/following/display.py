"""The display of `train`: live, or plain lines without a terminal; it also feeds the run's trackers.

`Display` reads train steps from the learner's file, and asks the buffer for waiting roles. It reports dead processes to
the buffer and to the user. Nothing in the run waits for it. Below it are faults, the ledger and the summary in words.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from areal_like.config.run_config import Config, load_resolved
from areal_like.launch.outcome import Death
from areal_like.run import checkpoints
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG, PUBLISHED, RENDEZVOUS, SUMMARY, notes_of
from areal_like.wire.supervisor_client import SupervisorClient

from ..console.output import facts, sparkline

if TYPE_CHECKING:
    from .tracking import Tracking

STATUS_SECONDS = 0.5
SILENCE_SECONDS = 5.0
REFRESH_SECONDS = 0.25
LINE_SECONDS = (2.0, 60.0)
"""Between plain lines, at first and in a long run."""
EXPECTED = ("end of run", "stale", "no reward")
"""Reasons to drop a group that are not faults."""
FAULTS = {
    "train/nonfinite_steps": "train steps without a finite loss or gradient",
    "served/alarms": "alarms: an engine computes other logprobs than the learner",
    "rewards/timeouts": "verifier time-outs (they earn 0)",
    "rewards/unverified": "answers without a verdict of their verifier (they earn 0)",
    "rewards/errors": "errors of verifiers",
    "rewards/resamples": "samples drawn again after their reward crashed",
    "rollout/refused": "groups refused",
}


class Display:
    """`update` is called many times a second and does little; `plain` forces lines even on a terminal."""

    def __init__(self, config: Config, folder: Path, plain: bool):
        self.config, self.run, self.folder = config, config.run, folder
        self.follower, self._done = MetricsFollower(folder / "metrics.jsonl"), checkpoints.steps_done(folder)
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        live = self.console.is_terminal and not self.console.is_dumb_terminal and not plain
        self.live = Live(console=self.console, auto_refresh=False) if live else None
        self.row: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.held_out = "-"
        self.rewards: list[float] = []
        self.deaths: Sequence[Death] = ()
        self._tracking: Tracking | None = None
        self._client: SupervisorClient | None = None
        self._reported_deaths = self._noted = 0
        self._said = self._waited = ""
        self._began = self._shown_at = self._asked_at = self._answered_at = time.monotonic()

    def __enter__(self) -> Display:
        self.say(f"run folder: {self.folder} (logs/, metrics.jsonl, samples/)")
        if self.live:
            self.live.start()
        from .tracking import Tracking  # imports numpy and msgspec

        self._tracking = Tracking(self.config, self.folder)  # now, while the processes start
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the live display if there is one."""
        self.console.print(text, markup=False)
        self.console.file.flush()

    def update(self, deaths: Sequence[Death] = (), last: bool = False) -> None:
        """Read what is new and show it; `last`: the view that stays."""
        for death in deaths[len(self.deaths) :]:
            self.say(str(death))
        self.deaths = list(deaths)
        for row in self.follower.new_rows():
            self._record(row)
        for note in self._tracking.notes() if self._tracking else ():
            self.say(note)
        for note in notes_of(self.folder)[self._noted :]:
            self.say(note)
            self._noted += 1
        now = time.monotonic()
        self._talk_to_buffer(now)
        shortest, longest = LINE_SECONDS
        pause = REFRESH_SECONDS if self.live else min(longest, max(shortest, (now - self._began) / 30))
        if last or now - self._shown_at > pause:
            self._shown_at = now
            if self.live:
                self.live.update(self._view(), refresh=True)
            else:
                self._say_line()

    def _say_line(self) -> None:
        line = self._line()
        waits = self._silence() or (self.status.get("started") and self.status["waits"])
        if line == self._said and self.row and waits:  # no step since the last line: the reason, from the newest status
            line = f"step {self.row['step']}/{self.run.steps} | waits {self._waits()}"
        if line not in (self._said, self._waited):
            self.say(line)
            self._said, self._waited = (self._said, line) if " | waits " in line else (line, "")

    def _record(self, row: dict[str, Any]) -> None:
        self.row = row
        if row.get("reward/mean") is not None:
            self.rewards.append(row["reward/mean"])
        if row.get("eval/reward") is not None:
            self.held_out = f"{row['eval/reward']:.3f} (v{row['eval/version']})"
        if self._tracking and row["step"] > self._done:  # trackers have those of an earlier start
            self._tracking.row(row)

    def _talk_to_buffer(self, now: float) -> None:
        if self._client is None:
            path = self.folder / RENDEZVOUS / "buffer.json"
            if not path.exists():
                return
            self._client = SupervisorClient(json.loads(path.read_bytes())["endpoint"], self.config.security.key_folder)
        if report := self._client.newest_report():
            self.status, self._answered_at = report, now
        for death in self.deaths[self._reported_deaths :]:
            for_good = death.again_in is None
            self._client.lost(death.name, death.pid, death.how, for_good=for_good, by_itself=death.by_itself)
        self._reported_deaths = len(self.deaths)
        if now - self._asked_at > STATUS_SECONDS:
            self._asked_at = now
            self._client.ask()

    def _buffer(self, found: dict[str, Any]) -> str:
        """From a row of metrics, or from the newest status."""
        if found.get("buffer/waiting") is None:
            return "-"
        held = f"{found.get('buffer/bytes', 0) / 1e6:,.0f} of {found.get('buffer/max_bytes', 0) / 1e6:,.0f} MB"
        return f"{found['buffer/waiting']:.0f} groups wait, {found['buffer/running']:.0f} run, {held}"

    def _fields(self) -> dict[str, str]:
        """Facts of the last train step; empty ones are not shown."""
        show = lambda key, form: number(self.row, key, form)  # noqa: E731
        return {
            "reward": show("reward/mean", "{:.3f}"),
            "held-out": self.held_out,
            "staleness": f"{show('staleness/mean', '{:.2f}')}, max {show('staleness/max', '{}')}"
            f" of {show('staleness/bound', '{}')}",
            "buffer": self._buffer(self.row),
            "tokens/s": show("rollout/tokens_per_second", "{:,.0f}"),
            "left out": ", ".join(death.name for death in self.deaths if death.again_in is None),
            "faults": faults(self.row | self.status),
            "idle": f"actors {show('rollout/idle_share', '{:.0%}')}, learner {show('train/idle_share', '{:.0%}')}",
        }

    def _waits(self) -> str:
        if not self.status:
            return "the processes import and find one another"
        if self.row and not self.status["started"]:
            return "-"  # an answer from before the train steps shown
        return self._silence() or "; ".join(self.status["waits"]) or "nothing waits"

    def _silence(self) -> str:
        """For how long the buffer has not answered; "" if it answers, or has never answered."""
        silence = time.monotonic() - self._answered_at
        return f"the buffer has not answered for {silence:.0f} s" if self.status and silence > SILENCE_SECONDS else ""

    def _left(self) -> str:
        """Estimated remaining time at the current pace; a target reward may end the run earlier."""
        step, seconds = self.row.get("step", 0), self.row.get("seconds", 0.0)
        if not step or not seconds or step >= self.run.steps:
            return ""
        left = (self.run.steps - step) * seconds / step
        if self.run.max_seconds is not None:
            left = min(left, max(0.0, self.run.max_seconds - seconds))
        return f"{datetime.timedelta(seconds=round(left))} left"

    def _line(self) -> str:
        if not self.row:
            parts = [f"start: {self._waits()}"]
            if self.status.get("started"):
                parts.append(f"first batch: {self._buffer(self.status)}")
            return " | ".join([*parts, *(f"faults {found}" for found in [faults(self.status)] if found)])
        fields = " | ".join(f"{name} {text}" for name, text in self._fields().items() if text)
        return f"step {self.row['step']}/{self.run.steps} | {fields}"

    def _view(self) -> Group:
        step = self.row.get("step", 0)
        progress = Table.grid(padding=(0, 2))
        progress.add_row(f"{step}/{self.run.steps}", ProgressBar(max(1, self.run.steps), step, width=30), self._left())
        shown = self._fields()
        if "buffer/waiting" in self.status:  # beside `waits`: of the same moment
            shown["buffer"] = self._buffer(self.status)
        if len(self.rewards) > 1:
            shown["reward"] += f"  {sparkline(self.rewards)}"
        return Group(progress, facts(shown | {"waits": self._waits()}))

    def close(self) -> None:
        if self._client:
            self._client.close()
        if self._tracking:
            path = self.folder / SUMMARY
            for note in self._tracking.end(json.loads(path.read_bytes()) if path.exists() else None):
                self.say(note)


def faults(row: dict[str, Any]) -> str:
    """Faults so far, from a row of metrics or a status; empty if none."""
    found = [f"{row[key]:.0f} {text}" for key, text in FAULTS.items() if row.get(key)]
    for key, count in row.items():
        kind, _, reason = key.rpartition("/")
        if kind == "ledger/dropped" and reason not in EXPECTED:
            found.append(f"{count} groups dropped ({reason})")
    notes = [actor["stats"].get("verifier_note") for actor in row.get("actors", {}).values()]
    found += [note for note in notes if note][:1]
    return ", ".join(found)


def number(row: dict[str, Any], key: str, form: str) -> str:
    """A number of a row in the form of `str.format`; "-" if it is not there."""
    return "-" if row.get(key) is None else form.format(row[key])


def ledger_line(ledger: dict[str, Any]) -> str:
    """`admitted 336 = trained 320 + dropped 16 (end of run)`."""
    parts = [f"trained {ledger['trained']}"]
    for kind in ("filtered", "dropped"):
        parts += [f"{kind} {count} ({reason})" for reason, count in ledger[kind].items()]
    parts += [f"active {ledger['active']}"] if ledger["active"] else []
    return f"admitted {ledger['admitted']} = {' + '.join(parts)}"


def ledger_lines(ledger: dict[str, Any]) -> dict[str, str]:
    """`ledger_line` under "groups", and under "groups of NAME" for each task of a mixture."""
    tasks = {f"groups of {task}": ledger_line(each) for task, each in ledger.get("tasks", {}).items()}
    return {"groups": ledger_line(ledger), **tasks}


def learning(folder: Path) -> str:
    """Why the run cannot have learned anything; "" if it can have."""
    shares = [row.get("zero_variance_share") or 0.0 for row in MetricsFollower(folder / "metrics.jsonl").each_new_row()]
    return f"none: in all {len(shares)} steps each group's rewards were equal" if shares and min(shares) == 1.0 else ""


def replayed(folder: Path) -> str:
    """How the weights of a replay compare with the recorded run's; "" for another run."""
    if not (folder / CONFIG).is_file() or not (recorded := load_resolved(folder / CONFIG).replay):
        return ""
    ours, theirs = ((path / PUBLISHED).read_text(encoding="utf-8").splitlines() for path in (folder, Path(recorded)))
    same = sum(ours[: n + 1] == theirs[: n + 1] for n in range(len(ours)))
    return f"the first {same} of {len(ours)} versions have the weights of {recorded}"


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The summary for a person: one line per fact, never cut, so that paths can be copied."""
    show = lambda key, form: number(summary, key, form)  # noqa: E731
    steps = f"{show('steps', '{}')} in {show('seconds', '{:.1f}')} s"
    trained = f"{show('trained_tokens_per_second', '{:,.0f}')} trained"
    since = f" since the resume at step {summary['since_step']}" if summary.get("since_step") else ""
    lines = {
        "held-out reward": f"{show('reward_before', '{:.3f}')} before, {show('reward_after', '{:.3f}')} after",
        "train steps": steps,
        "staleness": f"mean {show('staleness_mean', '{:.2f}')}, max {show('staleness_max', '{}')}, "
        f"bound {show('staleness_bound', '{}')}",
        "tokens per second": f"{show('tokens_per_second', '{:,.0f}')} rolled out{since}, {trained}",
        "idle share": f"actors {show('actor_idle_share', '{:.0%}')}{since}, "
        f"learner {show('learner_idle_share', '{:.0%}')}",
        **(ledger_lines(summary["ledger"]) if "ledger" in summary else {}),
        "actor restarts": str(summary.get("restarts", 0)),
        "left out": "; ".join(words.splitlines()[0] for words in summary.get("left_out", {}).values()),
        "learning": learning(folder),
        "replay": replayed(folder),
        "faults": faults(summary.get("faults", {})),
        "logs": str(folder / "logs"),
        "report": f"areal-like report {shlex.quote(str(folder))}",
        "model": str(folder / "checkpoints" / "final"),
    }
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"\nfinished: {show('stopped_because', '{}')}", style="bold", markup=False)
    for name, text in lines.items():
        if text:
            console.print(f"  {name:<18}{text}", markup=False)
