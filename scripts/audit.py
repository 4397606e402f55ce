"""Was every prompt trained exactly once? `python -m scripts.audit RUN`.

Reads the journal of a run that kept all of it (`buffer.keep_journal=true`), however often its processes died:

  prompts   group ids are 0, 1, 2, ... without a hole, each admitted once, with the row that the prompt order gives it
  fates     each group is trained, filtered, dropped (for one reason) or active: one of them, once
  batches   batches 0, 1, 2, ... were trained, each of as many groups as configured, no group in two of them; one that
            was served again after a crash had the same groups in the same order
  bound     no trained token is older than the staleness bound allows, by the versions that were pushed
  weights   each version has one digest, though it was made again after a crash
  ledger    the journal's snapshots, and the run's summary if there is one, agree with the count of all this
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_like import config as configs
from areal_like.config import ConfigError
from areal_like.groups import Head, unpack_heads
from areal_like.registry import build
from buffer.journal import SNAPSHOT, JournalError, Record, scan
from buffer.prompts import PromptCursor
from scripts import output
from scripts.arguments import command, refuse

WITHOUT_FATE = ("place", "defer", "take_up", "partial", "left_out", "start", "advance")
"""Kinds of records that change when a group is rolled out, not what becomes of it."""
RULES = ("prompts", "fates", "batches", "bound", "weights", "ledger")


@dataclass
class Audit:
    """Takes a journal's records in order; `findings` maps a rule to what breaks it, in words.

    `groups_per_batch`, `interval` (train steps per version) and `max_staleness` (inf: none) as the run has them;
    `prompts` the order that it should have followed.
    """

    prompts: PromptCursor
    groups_per_batch: int
    interval: int
    max_staleness: float
    findings: dict[str, list[str]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    admitted: int = 0
    pushed: dict[int, Head] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)
    gone: dict[int, str] = field(default_factory=dict)  # filtered or dropped: why
    served: dict[int, list[int]] = field(default_factory=dict)
    served_again: int = 0
    batch_of: dict[int, int] = field(default_factory=dict)  # of groups that were served: their batch
    trained: list[int] = field(default_factory=list)  # batches, in the order in which they were trained first
    digests: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # batch → groups, of those that a scheduler has opened

    def read(self, records: Iterable[Record]) -> Audit:
        for number, record in enumerate(records):
            if record.kind == SNAPSHOT and number == 0:
                raise JournalError("the journal lacks its beginning: an audit needs buffer.keep_journal=true")
            if record.kind not in WITHOUT_FATE:
                getattr(self, f"_on_{record.kind}")(*record.fields)
        return self

    def ledger(self) -> dict[str, Any]:
        """As the buffer reports it; groups of batches that were not trained yet are active."""
        trained = {group_id for batch in self.trained for group_id in self.served[batch]}
        kinds = {kind: Counter[str]() for kind in ("filtered", "dropped")}
        for fate in self.gone.values():
            kind, _, reason = fate.partition(": ")
            kinds[kind][reason] += 1
        left = {kind: dict(counts) for kind, counts in kinds.items()}
        return {"admitted": self.admitted, "trained": len(trained), **left, "active": len(self.active - trained)}

    def _find(self, rule: str, text: str) -> None:
        self.findings[rule].append(text)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _on_open(self, batch: int, groups: int, scheduler_state: Any) -> None:
        self.sizes[batch] = groups

    def _on_admit(self, group_id: int, row: int, launch: int, need: int, spare: bool = False) -> None:
        expected = self.prompts.next()
        if (group_id, row) != expected:
            self._find("prompts", f"group {group_id} of row {row} was admitted where {expected} was next")
        if group_id in self.active or group_id in self.gone:
            self._find("prompts", f"group {group_id} was admitted twice")
        self.active.add(group_id)
        self.admitted += 1

    def _on_push(self, groups: dict[str, Any], version: int) -> None:
        (head,) = unpack_heads(groups)
        if head.id not in self.active or head.id in self.pushed:
            self._find("fates", f"group {head.id} was taken twice, or after it had left")
        self.pushed[head.id] = head
        for made, digest in head.digests.items():
            if self.digests.setdefault(made, digest) != digest:
                self._find("weights", f"version {made} has the digests {self.digests[made]} and {digest}")

    def _on_requeue(self, group_id: int) -> None:
        self.pushed.pop(group_id, None)

    def _on_partial(self, meta: dict[str, Any]) -> None:
        if meta["id"] not in self.active or meta["id"] in self.pushed:
            self._find("fates", f"group {meta['id']} was handed back after it had been pushed, or had left")

    def _on_start(self, version: int) -> None:
        """Ages were set: no group moves."""

    _on_advance = _on_start

    def _on_drop(self, group_id: int, reason: str) -> None:
        self._leave(group_id, f"dropped: {reason}")

    def _on_filter(self, group_id: int, reason: str) -> None:
        self._leave(group_id, f"filtered: {reason}")

    def _leave(self, group_id: int, fate: str) -> None:
        if group_id not in self.active:
            self._find("fates", f"group {group_id}, {fate}, was {self.gone.get(group_id, 'never admitted')}")
        if self.batch_of.get(group_id) in self.trained:
            self._find("fates", f"group {group_id}, {fate}, was trained in batch {self.batch_of[group_id]}")
        elif group_id in self.batch_of:  # the batch can't be served again as it was
            for each in self.served.pop(self.batch_of[group_id]):
                del self.batch_of[each]
        self.active.discard(group_id)
        self.gone[group_id] = fate

    def _on_serve(self, batch: int, ids: list[int], oldest_allowed: int) -> None:
        self.served_again += batch in self.served
        if len(set(ids)) != self.sizes.get(batch, self.groups_per_batch):
            self._find("batches", f"batch {batch} has {len(set(ids))} groups")
        if self.served.setdefault(batch, ids) != ids:
            self._find("batches", f"batch {batch} was served again with other groups")
        for group_id in ids:
            if self.batch_of.setdefault(group_id, batch) != batch:
                self._find("fates", f"group {group_id} is in batches {self.batch_of[group_id]} and {batch}")
            if group_id not in self.pushed or group_id not in self.active:
                self._find("fates", f"group {group_id} of batch {batch} had not been pushed, or had left")
                continue
            made = self.pushed[group_id].versions
            oldest = min((version for version in made if version >= oldest_allowed), default=None)
            if oldest is not None and batch // self.interval - oldest > self.max_staleness:
                self._find("bound", f"group {group_id} of batch {batch} has tokens of version {oldest}")

    def _on_unserve(self, batch: int) -> None:
        """The learner could not train it: this batch, and those that were served ahead, are made anew."""
        for each in [number for number in self.served if number >= batch and number not in self.trained]:
            for group_id in self.served.pop(each):
                del self.batch_of[group_id]

    def _on_finish(self, batch: int) -> None:
        if batch not in self.served:
            self._find("batches", f"batch {batch} was trained and never served")
            self.served[batch] = []
        if batch not in self.trained:  # else it was trained again because the checkpoint did not have it
            if batch != len(self.trained):
                self._find("batches", f"batch {batch} was trained where {len(self.trained)} was next")
            self.trained.append(batch)

    def _on_snapshot(self, counts: list[Any], slots: list[Any], plan: list[Any], rows: list[Any], *_: Any) -> None:
        admitted, trained, filtered, dropped = counts[:4]
        ours = self.ledger()
        if (admitted, filtered, dropped) != (ours["admitted"], ours["filtered"], ours["dropped"]):
            self._find("ledger", f"a snapshot says {admitted}, {filtered}, {dropped} where the records say {ours}")
        if admitted != trained + sum(filtered.values()) + sum(dropped.values()) + len(rows):
            self._find("ledger", f"a snapshot's {admitted} admitted groups do not add up")


def audit(run: Path) -> Audit:
    """All of a run folder. Raises ConfigError, JournalError."""
    config = configs.load_resolved(run / "config.yaml")
    task = build("task", config.task, config.run.seed)
    scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    prompts = PromptCursor(task.size("train"), config.run.seed)
    found = Audit(prompts, config.groups_per_batch, config.weight_sync_interval, scheduler.max_staleness)
    found.read(scan(run / "journal"))
    if (run / "summary.json").exists():
        _compare(found, json.loads((run / "summary.json").read_text()))
    return found


def _compare(found: Audit, summary: dict[str, Any]) -> None:
    if summary["ledger"] != found.ledger():
        found.findings["ledger"].append(f"the summary says {summary['ledger']}, the journal {found.ledger()}")
    if summary["steps"] != len(found.trained):
        found.findings["batches"].append(f"{summary['steps']} train steps, {len(found.trained)} batches")


def table(found: Audit) -> Table:
    """A line per rule."""
    counts = found.ledger()
    left = sum(counts["filtered"].values()) + sum(counts["dropped"].values())
    seen = {
        "prompts": f"{found.admitted} admitted in order",
        "fates": f"{counts['trained']} trained, {left} filtered or dropped, {counts['active']} active",
        "batches": f"{len(found.trained)} trained, {found.served_again} served again",
        "bound": f"at most {found.max_staleness} versions",
        "weights": f"{len(found.digests)} versions, one digest each",
        "ledger": "agrees",
    }
    shown = Table(title="audit", title_justify="left")
    for column in ("rule", "verdict", "found"):
        shown.add_column(column)
    for rule, texts in found.findings.items():
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        shown.add_row(rule, "BROKEN" if texts else "holds", texts[0] + more if texts else seen[rule])
    return shown


def main() -> int:
    parser = command("audit", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    args = parser.parse_args()
    try:
        found = audit(args.run)
    except (ConfigError, JournalError, OSError) as error:
        refuse(error)
    if not found.admitted:
        refuse(f"{args.run} has no journal (buffer.journal=off, or no run folder)")
    output.console().print(table(found))
    return 1 if any(found.findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
