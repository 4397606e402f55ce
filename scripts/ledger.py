"""Where every prompt of a run went: `python -m scripts.ledger RUN [--plot FILE]`.

Reads the run's journal: how many groups were trained, filtered, dropped (why), or are still active; and, for those that
were rolled out, how long and how well rewarded they were. A bias of what was left out towards long or short answers
shows as a ratio of mean lengths. Where the journal was cut at a checkpoint (`buffer.keep_journal=false`) the counts are
complete and the distributions cover what has happened since.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from areal_like import checkpoints
from areal_like.groups import Head, unpack_heads
from buffer.journal import SNAPSHOT, JournalError, Record, scan

TRAINED, ACTIVE = "trained", "active"


@dataclass
class Account:
    """One fate: `count` groups; lengths (tokens) and rewards of the samples of those that had been rolled out."""

    count: int = 0
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(self, head: Head | None) -> None:
        self.count += 1
        if head:
            self.lengths += head.lengths
            self.rewards += head.rewards


class Books:
    """The fates of all groups, from the records of a journal in order."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._active: dict[int, Head | None] = {}
        self._served: dict[int, list[int]] = {}
        self._trained_batches: set[int] = set()

    def read(self, records: list[Record]) -> dict[str, Account]:
        for record in records:
            self._enter(record)
        for head in self._active.values():
            self.account(ACTIVE).add(head)
        return self.accounts

    def account(self, fate: str) -> Account:
        return self.accounts.setdefault(fate, Account())

    def _enter(self, record: Record) -> None:
        match record.kind:
            case "snapshot":
                self._start_from(record.fields)
            case "admit":
                self._active[record.fields[0]] = None
            case "push":
                (head,) = unpack_heads(record.fields[0])
                self._active[head.id] = head
            case "requeue":
                self._active[record.fields[0]] = None
            case "drop" | "filter":
                kind = "dropped" if record.kind == "drop" else "filtered"
                self.account(f"{kind}: {record.fields[1]}").add(self._active.pop(record.fields[0], None))
            case "serve":
                self._served[record.fields[0]] = record.fields[1]
            case "finish":
                self._finish(record.fields[0])

    def _finish(self, batch: int) -> None:
        """A batch that was trained again after a crash counts once."""
        if batch not in self._trained_batches:
            self._trained_batches.add(batch)
            for group_id in self._served.get(batch, ()):
                self.account(TRAINED).add(self._active.pop(group_id, None))

    def _start_from(self, fields: list[Any]) -> None:
        """A journal that begins with a snapshot: its counts stand for what came before."""
        if self.accounts or self._active:
            return  # the records before it are here, too
        (_, trained, filtered, dropped, *_), _, _, rows = fields[:4]
        counts = Counter({TRAINED: trained})
        counts.update({f"filtered: {reason}": count for reason, count in filtered.items()})
        counts.update({f"dropped: {reason}": count for reason, count in dropped.items()})
        for fate, count in counts.items():
            self.account(fate).count = count
        for group_id, *_, batch, table, _, _ in rows:
            self._active[group_id] = unpack_heads(table)[0] if table else None
            if batch >= 0:
                self._served.setdefault(batch, []).append(group_id)


def table(accounts: dict[str, Account]) -> Table:
    """A row per fate; the last line is the sum, which is the number of groups admitted."""
    found = Table(title="ledger", title_justify="left")
    for column in ("fate", "groups", "samples", "length mean", "p50", "p95", "reward mean", "length / trained"):
        found.add_column(column, justify="left" if column == "fate" else "right", no_wrap=True)
    trained = np.mean(accounts[TRAINED].lengths) if accounts.get(TRAINED, Account()).lengths else np.nan
    for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count):
        cells = ["-"] * 5
        if account.lengths:
            mean, quantiles = np.mean(account.lengths), np.quantile(account.lengths, [0.5, 0.95])
            cells = [f"{mean:.1f}", *(f"{q:.0f}" for q in quantiles), f"{np.mean(account.rewards):.3f}"]
            cells.append("-" if np.isnan(trained) else f"{mean / trained:.2f}")
        found.add_row(fate, str(account.count), str(len(account.lengths)), *cells)
    found.add_row("admitted", str(sum(account.count for account in accounts.values())), *[""] * 6)
    return found


def plot(accounts: dict[str, Account], path: Path) -> None:
    """Histograms of length and reward, one line per fate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for axis, values in ((left, "lengths"), (right, "rewards")):
        known = {fate: getattr(account, values) for fate, account in accounts.items() if account.lengths}
        edges = np.histogram_bin_edges(np.concatenate([*known.values(), [0]]), bins=40)
        for fate, numbers in known.items():
            axis.hist(numbers, bins=edges, density=True, histtype="step", label=f"{fate} ({accounts[fate].count})")
    left.set_xlabel("response length (tokens)")
    left.set_ylabel("density of samples")
    right.set_xlabel("reward")
    left.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--plot", type=Path, help="write a picture of the distributions here")
    args = parser.parse_args()
    try:
        records = list(scan(args.run / "journal"))
    except (JournalError, OSError) as error:
        sys.exit(f"error: {error}")
    if not records:
        sys.exit(f"error: {args.run} has no journal (buffer.journal=off, or no run folder)")
    accounts = Books().read(records)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(accounts))
    if records[0].kind == SNAPSHOT:
        step = checkpoints.latest(args.run)
        console.print(f"lengths and rewards since step {step[0] if step else '?'} only; buffer.keep_journal keeps all")
    if args.plot:
        try:
            plot(accounts, args.plot)
        except (OSError, ValueError) as error:  # no such folder; an ending that matplotlib does not know
            sys.exit(f"error: --plot {args.plot}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
