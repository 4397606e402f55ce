"""Watching a run: the live display (plain lines without a terminal) and TensorBoard, derived from `metrics.jsonl`.

Follows the learner's file for train steps and asks the buffer, once a second, who waits for whom. Nothing in the run
waits for the watcher.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from areal_like.bus import Dealer
from areal_like.client import ask_status
from areal_like.config import Config
from areal_like.metrics import MetricsFollower

PLAIN_SECONDS = 2.0
STATUS_SECONDS = 1.0


class Watch:
    """`update` is called many times a second and does little; `plain` forces lines even on a terminal."""

    def __init__(self, config: Config, folder: Path, plain: bool):
        self.folder, self.steps = folder, config.run.steps
        self.follower = MetricsFollower(folder / "metrics.jsonl")
        self.console = Console()
        self.live = None if plain or not self.console.is_terminal else Live(console=self.console, auto_refresh=False)
        self.row: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self._board: Any = None
        self._dealer: Dealer | None = None
        self._told_at = self._asked_at = time.monotonic()

    def __enter__(self) -> Watch:
        self.console.print(f"run folder: {self.folder}   (logs/, metrics.jsonl, tb/)")
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def update(self, last: bool = False) -> None:
        rows = self.follower.new_rows()
        for row in rows:
            self._record(row)
        now = time.monotonic()
        if now - self._asked_at > STATUS_SECONDS and not last:
            self._asked_at = now
            self._ask()
        if self.live and (rows or now - self._told_at > 0.5):
            self._told_at = now
            self.live.update(self._table(), refresh=True)
        elif not self.live and (last or now - self._told_at > PLAIN_SECONDS):
            self._told_at = now
            print(self._line(), flush=True)

    def _record(self, row: dict[str, Any]) -> None:
        self.row = row
        if "eval/reward" in row:
            self.evaluation = {"reward": row["eval/reward"], "version": row["eval/version"]}
        if self._board is None:
            from scripts.board import Board

            self._board = Board(self.folder / "tb")
        self._board.add(row)

    def _ask(self) -> None:
        if self._dealer is None:
            path = self.folder / "rendezvous" / "buffer.json"
            if not path.exists():
                return
            self._dealer = Dealer(json.loads(path.read_text())["endpoint"], "watch", peer="buffer")
        self.status = ask_status(self._dealer, timeout=0.05) or self.status

    # ---- words ------------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, str]:
        row = self.row

        def number(key: str, form: str = "{:.3f}") -> str:
            value = row.get(key)
            return "-" if value is None else form.format(value)

        held_out = f"{self.evaluation['reward']:.3f} (v{self.evaluation['version']})" if self.evaluation else "-"
        return {
            "step": f"{row.get('step', 0)}/{self.steps}",
            "reward": number("reward/mean"),
            "held-out": held_out,
            "staleness": f"{number('staleness/mean', '{:.2f}')} max {number('staleness/max', '{:.0f}')}",
            "buffer": f"{number('buffer/waiting', '{:.0f}')} wait, {number('buffer/running', '{:.0f}')} run",
            "tokens/s": number("rollout/tokens_per_second", "{:,.0f}"),
            "idle": f"actors {number('rollout/idle_share', '{:.0%}')}, learner {number('train/idle_share', '{:.0%}')}",
        }

    def _waits(self) -> str:
        if not self.status:
            return "the processes are starting"
        return "; ".join(self.status["waits"]) or "nobody waits"

    def _line(self) -> str:
        if not self.row:
            return self._waits()
        return "  ".join(f"{name} {text}" for name, text in self._fields().items()) + f"  | {self._waits()}"

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text in self._fields().items():
            table.add_row(f"[bold]{name}[/bold]", text)
        table.add_row("[bold]waits[/bold]", self._waits())
        return table

    def close(self) -> None:
        if self._dealer:
            self._dealer.close()
        if self._board:
            self._board.close()


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The end of a run, for a person."""

    def share(key: str) -> str:
        return "-" if summary.get(key) is None else f"{summary[key]:.0%}"

    def reward(key: str) -> str:
        return "-" if summary.get(key) is None else f"{summary[key]:.3f}"

    table = Table(title=f"finished: {summary['stopped_because']}", show_header=False, title_justify="left")
    rows = {
        "held-out reward": f"{reward('reward_before')} before, {reward('reward_after')} after",
        "train steps": f"{summary['steps']} in {summary['seconds']:.1f} s",
        "staleness": f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}, bound {summary['staleness_bound']}",
        "tokens per second": f"{summary['tokens_per_second']:,.0f} rolled out, {summary['trained_tokens_per_second']:,.0f} trained",
        "idle share": f"actors {share('actor_idle_share')}, learner {share('learner_idle_share')}",
        "ledger": ", ".join(f"{name} {count}" for name, count in summary["ledger"].items() if count),
        "actor restarts": str(summary.get("restarts", 0)),
        "logs": str(folder / "logs"),
        "TensorBoard": f"tensorboard --logdir {folder / 'tb'}",
        "model": str(folder / "checkpoints" / "final"),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    Console(file=sys.stdout).print(table)
