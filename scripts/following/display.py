"""The display of `train`: live, or plain lines without a terminal; it also feeds the run's trackers.

`Display` reads train steps from the learner's file, and asks the buffer twice a second for waiting roles. It reports
dead processes to the buffer and to the user. Nothing in the run waits for it, and it waits for nothing.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_like.config.registry import is_supervised
from areal_like.config.run_config import Config
from areal_like.launch.outcome import Death
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import RENDEZVOUS, SUMMARY
from areal_like.wire.client import SupervisorClient

from ..console.output import sparkline
from .fault_counts import faults
from .last_sample import LastSample

if TYPE_CHECKING:
    from .tracking import Tracking

STATUS_SECONDS = 0.5
SILENCE_SECONDS = 5.0
REFRESH_SECONDS = 0.25
LINE_SECONDS = (2.0, 60.0)
"""Seconds between plain lines, at first and in a long run."""


class Display:
    """`update` is called many times a second and does little; `plain` forces lines even on a terminal."""

    def __init__(self, config: Config, folder: Path, plain: bool):
        self.config, self.alone = config, is_supervised(config)
        self.folder, self.run, self.keys = folder, config.run, config.security.key_folder
        self.follower = MetricsFollower(folder / "metrics.jsonl")
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        live = self.console.is_terminal and not self.console.is_dumb_terminal and not plain
        self.live = Live(console=self.console, auto_refresh=False) if live else None
        self.row: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.rewards: list[float] = []
        self._last_sample = LastSample(folder)
        self.deaths: Sequence[Death] = ()
        self._tracking: Tracking | None = None
        self._client: SupervisorClient | None = None
        self._reported_deaths = 0
        self._said = self._waited = ""
        self._engine_notes: dict[str, str] = {}
        self._began = time.monotonic()
        self._told_at = self._asked_at = self._answered_at = self._began

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
        now = time.monotonic()
        self._talk_to_buffer(now)
        if self.live and (last or now - self._told_at > REFRESH_SECONDS):
            self._told_at = now
            self.live.update(self._table(), refresh=True)
        elif not self.live and (last or now - self._told_at > self._line_seconds(now)):
            self._told_at = now
            self._say_line()

    def _line_seconds(self, now: float) -> float:
        shortest, longest = LINE_SECONDS
        return min(longest, max(shortest, (now - self._began) / 30))

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
        measured = "eval/loss" if self.alone else "eval/reward"
        if row.get(measured) is not None:
            self.evaluation = {"found": row[measured], "version": row["eval/version"]}
        if self._tracking:
            self._tracking.row(row)

    def _talk_to_buffer(self, now: float) -> None:
        if self._client is None:
            path = self.folder / RENDEZVOUS / "buffer.json"
            if not path.exists():
                return
            self._client = SupervisorClient(json.loads(path.read_text())["endpoint"], self.keys)
        if report := self._client.newest_report():
            self.status, self._answered_at = report, now
            self._say_engine_notes(report)
        for death in self.deaths[self._reported_deaths :]:
            for_good = death.again_in is None
            self._client.lost(death.name, death.pid, death.how, for_good=for_good, by_itself=death.by_itself)
        self._reported_deaths = len(self.deaths)
        if now - self._asked_at > STATUS_SECONDS:
            self._asked_at = now
            self._client.ask()

    def _say_engine_notes(self, report: dict[str, Any]) -> None:
        """Report what is wrong with an actor's engine, once, in a line of its own."""
        notes = {name: actor["engine_note"] for name, actor in report.get("actors", {}).items() if actor["engine_note"]}
        for name, note in notes.items():
            if self._engine_notes.get(name) != note:
                self.say(f"{name}: {note}")
        self._engine_notes = notes

    # ---- words ------------------------------------------------------------------------------------------------------

    def _number(self, key: str, form: str) -> str:
        value = self.row.get(key)
        return "-" if value is None else form.format(value)

    def _buffer(self, found: dict[str, Any]) -> str:
        """From a row of metrics, or from the newest status."""
        if found.get("buffer/waiting") is None:
            return "-"
        held = f"{found.get('buffer/bytes', 0) / 1e6:,.0f} of {found.get('buffer/max_bytes', 0) / 1e6:,.0f} MB"
        return f"{found['buffer/waiting']:.0f} groups wait, {found['buffer/running']:.0f} run, {held}"

    def _fields(self) -> dict[str, str]:
        """Facts of the last train step."""
        number, left_out = self._number, [death.name for death in self.deaths if death.again_in is None]
        held_out = f"{self.evaluation['found']:.3f} (v{self.evaluation['version']})" if self.evaluation else "-"
        if self.alone:
            return {
                "loss": number("loss", "{:.3f}"),
                "held-out loss": held_out,
                "tokens/s": number("train/tokens_per_second", "{:,.0f}"),
                **({"faults": found} if (found := faults(self.row)) else {}),
            }
        return {
            "reward": number("reward/mean", "{:.3f}"),
            "held-out": held_out,
            "staleness": f"{number('staleness/mean', '{:.2f}')}, max {number('staleness/max', '{}')}"
            f" of {number('staleness/bound', '{}')}",
            "buffer": self._buffer(self.row),
            "tokens/s": number("rollout/tokens_per_second", "{:,.0f}"),
            **({"left out": ", ".join(left_out)} if left_out else {}),
            **({"faults": found} if (found := faults(self.row | self.status)) else {}),
            "idle": f"actors {number('rollout/idle_share', '{:.0%}')}, learner {number('train/idle_share', '{:.0%}')}",
        }

    def _stage(self) -> str:
        """The progress of the start, until the first train step."""
        status = self.status
        if self.alone:
            return "start: the learner loads its model, and measures the loss on held-out rows"
        if not status:
            return "start, 1 of 4: the processes import and find one another"
        if not status.get("started"):
            return f"start, 2 of 4: {self._waits()}"
        waiting, running = status.get("buffer/waiting", 0), status.get("buffer/running", 0)
        if any(line.startswith("learner waits") for line in status["waits"]) or not waiting + running:
            return f"start, 3 of 4: the first batch is rolled out: {waiting} groups are ready, {running} run"
        return "start, 4 of 4: the first train step"

    def _waits(self) -> str:
        if self.alone:
            return "the learner trains alone"
        if not self.status:
            return "the processes are starting"
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
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"

    def _line(self) -> str:
        if not self.row:
            found, silence = faults(self.status), self._silence()
            stage = f"{self._stage()} | {silence}" if silence else self._stage()
            return f"faults {found} | {stage}" if found else stage
        fields = " | ".join(f"{name} {text}" for name, text in self._fields().items())
        return f"step {self.row['step']}/{self.run.steps} | {fields}"

    def _table(self) -> Table:
        step = self.row.get("step", 0)
        progress = Table.grid(padding=(0, 2))
        progress.add_row(f"{step}/{self.run.steps}", ProgressBar(max(1, self.run.steps), step, width=30), self._left())
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("step", progress)
        if not self.row:
            table.add_row("", Text(f"{self._stage()} ({time.monotonic() - self._began:.0f} s)"))
        shown = self._fields()
        if "buffer/waiting" in self.status:  # beside `waits`: of the same moment
            shown["buffer"] = self._buffer(self.status)
        for name, text in (shown | {"waits": self._waits()}).items():
            curve = f"  {sparkline(self.rewards)}" if name == "reward" and len(self.rewards) > 1 else ""
            table.add_row(name, Text(text + curve))
        if sample := self._last_sample.text():
            table.add_row("sample", Text(sample))
        if self.deaths:
            table.add_row("restarts", str(sum(death.again_in is not None for death in self.deaths)))
        return table

    def close(self) -> None:
        if self._client:
            self._client.close()
        if self._tracking:
            path = self.folder / SUMMARY
            for note in self._tracking.end(json.loads(path.read_text()) if path.exists() else None):
                self.say(note)


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The summary for a person: one line per fact, never cut, so that paths can be copied."""

    def show(key: str, form: str) -> str:
        return "-" if summary.get(key) is None else form.format(summary[key])

    if "loss_after" in summary:
        return _print_lines(_of_supervised(summary, folder, show), show("stopped_because", "{}"))
    since = f" since the resume at step {summary['since_step']}" if summary.get("since_step") else ""
    lines = {
        "held-out reward": f"{show('reward_before', '{:.3f}')} before, {show('reward_after', '{:.3f}')} after",
        "train steps": f"{show('steps', '{}')} in {show('seconds', '{:.1f}')} s",
        "staleness": f"mean {show('staleness_mean', '{:.2f}')}, max {show('staleness_max', '{}')}, "
        f"bound {show('staleness_bound', '{}')}",
        "tokens per second": f"{show('tokens_per_second', '{:,.0f}')} rolled out{since}, "
        f"{show('trained_tokens_per_second', '{:,.0f}')} trained",
        "idle share": f"actors {show('actor_idle_share', '{:.0%}')}{since}, "
        f"learner {show('learner_idle_share', '{:.0%}')}",
        **(ledger_lines(summary["ledger"]) if "ledger" in summary else {"groups": "-"}),
        **({"faults": found} if (found := faults(summary.get("faults", {}))) else {}),
        "actor restarts": str(summary.get("restarts", 0)),
        **{f"{name} was left out": words.splitlines()[0] for name, words in summary.get("left_out", {}).items()},
        **_places(folder),
    }
    _print_lines(lines, show("stopped_because", "{}"))


def _of_supervised(summary: dict[str, Any], folder: Path, show: Callable[[str, str], str]) -> dict[str, str]:
    """The facts of a run without rollouts."""
    return {
        "held-out loss": f"{show('loss_before', '{:.3f}')} before, {show('loss_after', '{:.3f}')} after, in nats",
        "train steps": f"{show('steps', '{}')} in {show('seconds', '{:.1f}')} s",
        "tokens per second": f"{show('trained_tokens_per_second', '{:,.0f}')} trained",
        **({"faults": found} if (found := faults(summary.get("faults", {}))) else {}),
        **_places(folder),
    }


def _places(folder: Path) -> dict[str, str]:
    return {
        "logs": str(folder / "logs"),
        "report": f"areal-like report {shlex.quote(str(folder))}",
        "model": str(folder / "checkpoints" / "final"),
    }


def _print_lines(lines: dict[str, str], ended: str) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"\nfinished: {ended}", style="bold", markup=False)
    for name, text in lines.items():
        console.print(f"  {name:<18}{text}", markup=False)


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
