"""Where every prompt of a run went: `areal-like ledger RUN`; `--verify` checks that its journal is sound.

Reads the run's journal: fates of all groups, with lengths and rewards of those that were rolled out; a table for each
task of a mixture. If the journal was cut at a checkpoint (`buffer.keep_journal=false`), the counts are complete, and
all else covers the time since then.

`--verify` needs `buffer.keep_journal=true`; the run may have crashed and resumed any number of times:

  prompts   group ids are 0, 1, 2, ... without a hole, each admitted once, with the row that the prompt order gives it
  fates     each group is trained, filtered, dropped (for one reason) or active: one of them, once
  batches   batches 0, 1, 2, ... were trained, each with the configured number of groups; no group is in two batches; a
            batch that was served again after a crash had the same groups in the same order
  bound     no trained token is older than the staleness bound allows, by the versions that were pushed
  weights   each version has one digest, even if it was made again after a crash (with the same settings)
  ledger    the journal's snapshots, and the run's summary if there is one, agree with these counts
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from areal_like.config.registry import build
from areal_like.config.run_config import ConfigError, load_resolved
from areal_like.wire.groups import Head
from buffer.entries import UNFINISHED, Entry, Stage
from buffer.events import Admit, Branch, Drop, Event, Filter, Finish, LeaveOut, Push, Serve, Snapshot
from buffer.journal import JournalError, Record, Recorded, scan
from buffer.ledger import Counts
from buffer.prompts import PromptCursor, shares_of
from buffer.recovery import standing
from buffer.staleness import Bound
from buffer.store import Store

from .console import output
from .console.arguments import command, refusing

TRAINED, ACTIVE = "trained", "active"
MOST_REASONS = 10
RULES = ("prompts", "fates", "batches", "bound", "weights", "ledger")


@dataclass
class Account:
    """One fate: `count` groups; lengths (tokens) and rewards of samples; `offered` lengths, also of `cut` ones."""

    count: int = 0
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    cut: int = 0

    def add(self, entry: Entry) -> None:
        self.count += 1
        self.cut += len(entry.cut)
        if entry.head:
            self.lengths += entry.head.lengths
            self.rewards += entry.head.rewards
            self.offered += [*entry.head.lengths, *entry.cut]

    def figures(self) -> dict[str, float]:
        """Mean and 95 % quantile of the lengths, mean reward, cut samples; empty if nothing was rolled out."""
        if not self.lengths:
            return {}
        mean, p95 = float(np.mean(self.lengths)), float(np.quantile(self.lengths, 0.95))
        return {"length": mean, "p95": p95, "reward": float(np.mean(self.rewards)), "cut": self.cut}


class Books:
    """The fates of all groups, from a journal's records; `tasks`: a mixture's; `redrawn`: reasons of new draws."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.tasks: dict[str, dict[str, Account]] = {}
        self.redrawn = Counter[str]()
        self.begins_late = False  # the journal keeps no groups of before its first snapshot, only their number
        self._store = Store(Bound(math.inf, 1))

    def read(self, records: Iterable[Record]) -> dict[str, Account]:
        """Reads `records` twice."""
        for number, (event, _) in enumerate(standing(records)):
            if isinstance(event, Snapshot) and number:
                continue  # the journal also has the records before it
            self._enter(event)
            self._store.apply(event)
        for entry in self._store.entries.values():
            self._close(ACTIVE, entry)
        return self.accounts

    def account(self, fate: str, task: str = "") -> Account:
        """The account of a fate: of all groups, or of those of a task."""
        return (self.tasks.setdefault(task, {}) if task else self.accounts).setdefault(fate, Account())

    def _enter(self, event: Event) -> None:
        entries = self._store.entries
        match event:
            case LeaveOut():
                self.redrawn.update(event.redrawn)
            case Drop():
                self._close(f"dropped: {event.reason}", entries[event.id])
            case Filter():
                self._close(f"filtered: {event.reason}", entries[event.id])
            case Finish():
                for entry in self._store.entries.of(Stage.SERVED):
                    if entry.batch == event.batch:
                        self._close(TRAINED, entry)
            case Snapshot():  # a journal may begin with one: its counts replace the events before it
                for task, fates in event.fates.items():
                    for fate in fates.keys() - {"admitted"}:
                        self.account(fate, task).count = fates[fate]
                self.begins_late = True

    def _close(self, fate: str, entry: Entry) -> None:
        for task in {"", entry.task}:
            self.account(fate, task).add(entry)


def table(accounts: dict[str, Account], title: str = "ledger") -> Table:
    """A row per fate; the last row is the sum: the number of groups admitted."""
    found = output.table(title, "fate", "groups", "samples", "cut", "length", "p95", "reward", "/ trained")
    trained = accounts.get(TRAINED, Account()).figures().get("length", math.nan)
    for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count):
        cells = ["-"] * 4
        if known := account.figures():
            mean = known["length"]
            cells = [f"{mean:.1f}", f"{known['p95']:.0f}", f"{known['reward']:.3f}", f"{mean / trained:.2f}"]
        found.add_row(fate, f"{account.count}", f"{len(account.lengths)}", f"{account.cut}", *cells)
    found.add_row("admitted", f"{sum(account.count for account in accounts.values())}")
    return found


def bias(accounts: dict[str, Account]) -> float:
    """Mean length of the trained responses over that of all responses, minus 1; NaN without any."""
    trained = accounts.get(TRAINED, Account()).lengths
    offered = [length for account in accounts.values() for length in account.offered]
    return float(np.mean(trained) / np.mean(offered) - 1) if trained and offered else math.nan


class Audit:
    """Takes a journal's events in order and checks each before it is applied, if it breaks no rule. `findings`: rule →
    violations, in words. `prompts`: the order to follow."""

    def __init__(self, prompts: PromptCursor, bound: Bound):
        self.prompts, self.bound, self.store = prompts, bound, Store(bound)
        self.findings: dict[str, list[str]] = {rule: [] for rule in RULES}
        self.gone: dict[int, str] = {}  # groups that have left, and how
        self.trained = 0
        self.digests: dict[int, str] = {}

    def read(self, records: Iterable[Record]) -> Audit:
        """Reads `records` twice. Raises JournalError if their beginning is missing."""
        for number, (event, _) in enumerate(standing(records)):
            if isinstance(event, Snapshot) and number == 0:
                raise JournalError("the journal lacks its beginning: --verify needs buffer.keep_journal=true")
            before = self._misfits()
            self._look_at(event)
            if self._misfits() == before and not isinstance(event, Snapshot):
                self.store.apply(event)
        return self

    def _misfits(self) -> int:
        """Findings about events that cannot be applied."""
        return sum(len(self.findings[rule]) for rule in ("prompts", "fates", "batches"))

    def find(self, rule: str, text: str) -> None:
        self.findings[rule].append(text)

    def _look_at(self, event: Event) -> None:
        match event:
            case Admit():
                self._admit(event)
            case Push():
                self._push(event.head)
            case Drop() | Filter():
                self._leave(event.id, f"{'dropped' if isinstance(event, Drop) else 'filtered'}: {event.reason}")
            case Serve():
                self._serve(event)
            case Finish():
                self._finish(event.batch)
            case Branch():  # later versions will differ
                version = self.bound.batch_version(event.batch)
                self.digests = {made: digest for made, digest in self.digests.items() if made <= version}
            case Snapshot():
                self._compare(event)

    def _stage_of(self, group_id: int) -> Stage | None:
        entry = self.store.entries.get(group_id)
        return entry.stage if entry else None

    def _admit(self, event: Admit) -> None:
        expected = self.prompts.next()
        if (event.id, event.row, event.task) != expected:
            row = f"row {event.row}{event.task and f' (of {event.task})'}"
            self.find("prompts", f"group {event.id} of {row} was admitted, but {tuple(expected)} was next")
        if event.id in self.store.entries or event.id in self.gone:
            self.find("prompts", f"group {event.id} was admitted twice")

    def _push(self, head: Head) -> None:
        if self._stage_of(head.id) not in UNFINISHED:
            self.find("fates", f"group {head.id} was taken twice, or after it had left")
        for made, digest in head.digests.items():
            if self.digests.setdefault(made, digest) != digest:
                self.find("weights", f"version {made} has the digests {self.digests[made]} and {digest}")

    def _leave(self, group_id: int, fate: str) -> None:
        if group_id not in self.store.entries:
            self.find("fates", f"group {group_id}, {fate}, was {self.gone.get(group_id, 'never admitted')}")
        self.gone[group_id] = fate

    def _serve(self, event: Serve) -> None:
        batch, ids, version = event.batch, event.ids, self.bound.batch_version(event.batch)
        if len(set(ids)) != self.bound.batches.size(batch):
            self.find("batches", f"batch {batch} has {len(set(ids))} groups")
        served = [entry.id for entry in self.store.entries.of(Stage.SERVED) if entry.batch == batch]
        planned = self.store.planned.get(batch) or served
        if planned and planned != ids:
            self.find("batches", f"batch {batch} was served again with other groups")
        for group_id in ids:
            entry = self.store.entries.get(group_id)
            if entry is None or entry.head is None:
                self.find("fates", f"group {group_id} of batch {batch} was {self.gone.get(group_id, 'not pushed')}")
                continue
            if entry.stage is not Stage.WAITING:
                self.find("fates", f"group {group_id} is in batches {entry.batch} and {batch}")
            oldest = entry.oldest_trained(event.oldest_allowed)
            if oldest is not None and version - oldest > self.bound.max_staleness:
                self.find("bound", f"group {group_id} of batch {batch} has tokens of version {oldest}")

    def _finish(self, batch: int) -> None:
        groups = [entry.id for entry in self.store.entries.of(Stage.SERVED) if entry.batch == batch]
        if not groups:
            self.find("batches", f"batch {batch} was trained but never served")
        if batch != self.trained:
            self.find("batches", f"batch {batch} was trained, but {self.trained} was next")
        self.trained += 1
        self.gone.update(dict.fromkeys(groups, f"trained in batch {batch}"))

    def _compare(self, event: Snapshot) -> None:
        """A snapshot may count groups as trained whose batches a later resume served again."""
        counts, held = Counts(event.fates).ledger([group.task for group in event.groups]), {g.id for g in event.groups}
        entries, known = self.store.entries, Counts(self.store.counts.fates)
        again = {group_id for ids in self.store.planned.values() for group_id in ids} - held
        for entry in [entries[group_id] for group_id in again & entries.keys()]:
            known.note(entry.task, TRAINED)
        active = entries.keys() - again
        ours = known.ledger([entries[group_id].task for group_id in active])
        if counts != ours:
            self.find("ledger", f"a snapshot has {counts}, but the records have {ours}")
        if wrong := held ^ active:
            self.find("ledger", f"groups {sorted(wrong)} are active in a snapshot or by the records, not in both")


def audit(run: Path) -> Audit:
    """Audit a run folder. Raises ConfigError, JournalError, OSError."""
    config = load_resolved(run / "config.yaml")
    task = build("task", config.task, config.run.seed)
    scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    prompts = PromptCursor(shares_of(task), config.run.seed)
    bound = Bound(scheduler.max_staleness, config.groups_per_batch, config.weight_sync_interval)
    for _ in scan(run / "journal"):
        pass  # reading checks the payloads' checksums
    found = Audit(prompts, bound).read(Recorded(run / "journal", whole=True))
    if (run / "summary.json").exists():
        summary = json.loads((run / "summary.json").read_bytes())
        if summary["ledger"] != (ours := found.store.ledger()):
            found.find("ledger", f"the summary has {summary['ledger']}, the journal {ours}")
        if summary["steps"] != found.trained:
            found.find("batches", f"{summary['steps']} train steps, {found.trained} batches")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = command("ledger", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--verify", action="store_true", help="check the journal; exit code 1 if a rule is broken")
    args = parser.parse_args(argv)
    console, books = output.console(), Books()
    with refusing():
        records = Recorded(args.run / "journal", whole=True)
        if not any(True for _ in records):
            raise ConfigError(f"{args.run} has no journal (buffer.journal=off, or no run folder)")
        accounts = books.read(records)
        findings = audit(args.run).findings if args.verify else {}
    console.print(table(accounts))
    for task, of_task in sorted(books.tasks.items()):
        console.print(table(of_task, f"ledger of {task}"))
    if books.begins_late:
        console.print("samples to reward: of the groups still in the journal (buffer.keep_journal=true keeps all)")
    for reason, count in books.redrawn.most_common(MOST_REASONS):
        console.print(f"samples drawn again: {count} × {reason}")
    if not math.isnan(shorter := bias(accounts)):
        console.print(f"length of trained responses against all: {shorter:+.1%}")
    for rule, texts in findings.items():
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        console.print(f"verify {rule:<8} {f'BROKEN: {texts[0]}{more}' if texts else 'holds'}")
    return 1 if any(findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
