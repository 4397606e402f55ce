"""Was every prompt trained exactly once? `python -m scripts.audit RUN`.

Checks the whole journal of a run (`buffer.keep_journal=true`), however often its processes died:

  prompts   group ids are 0, 1, 2, ... without a hole, each admitted once, with the row that the prompt order gives it
            or, with a sampler, the row that it chooses from the results recorded before
  fates     each group is trained, filtered, dropped (for one reason) or active: one of them, once
  batches   batches 0, 1, 2, ... were trained, each with the configured number of groups; no group is in two batches; a
            batch that was served again after a crash had the same groups in the same order
  bound     no trained token is older than the staleness bound allows, by the versions that were pushed
  weights   each version has one digest, even if it was made again after a crash (with the same settings)
  ledger    the journal's snapshots, and the run's summary if there is one, agree with these counts
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_like.config.registry import bind, build
from areal_like.config.run_config import ConfigError, load_resolved
from buffer.events import Admit, Branch, Drop, Event, Filter, Finish, HandBack, Push, Serve, Snapshot
from buffer.journal import JournalError, Record, Recorded, scan
from buffer.prompts import PromptCursor, shares_of
from buffer.recovery import standing
from buffer.results import Results
from buffer.samplers import asks
from buffer.staleness import Bound
from buffer.store import LEASED, UNFINISHED, Stage, Store, ledger_of

from .console import output
from .console.arguments import command, refuse

RULES = ("prompts", "fates", "batches", "bound", "weights", "ledger")


class Audit:
    """Takes a journal's events in order and checks each before it is applied; `findings` maps a rule to its violations,
    in words. An event that breaks a rule is not applied. `bound`: the run's; `prompts`: the order that the run should
    have followed; `results`: those that its sampler chooses by (None: it has none)."""

    def __init__(self, prompts: PromptCursor, bound: Bound, results: Results | None = None):
        self.prompts, self.bound, self.store = prompts, bound, Store(bound, results=results)
        self.findings: dict[str, list[str]] = {rule: [] for rule in RULES}
        self.gone: dict[int, str] = {}  # groups that have left, and how
        self.trained = self.served_again = 0
        self.digests: dict[int, str] = {}

    def read(self, records: Iterable[Record]) -> Audit:
        """Reads `records` twice. Raises JournalError if their beginning is missing."""
        for number, (event, _) in enumerate(standing(records)):
            if isinstance(event, Snapshot) and number == 0:
                raise JournalError("the journal lacks its beginning: an audit needs buffer.keep_journal=true")
            before = self._misfits()
            self._look_at(event)
            if self._misfits() == before and not isinstance(event, Snapshot):
                self.store.apply(event)
        return self

    def _misfits(self) -> int:
        """Findings about an event that does not fit the state, and so cannot be applied."""
        return sum(len(self.findings[rule]) for rule in ("prompts", "fates", "batches"))

    def _find(self, rule: str, text: str) -> None:
        self.findings[rule].append(text)

    def _look_at(self, event: Event) -> None:
        match event:
            case Admit():
                self._admit(event)
            case Push():
                self._push(event)
            case HandBack() if self._stage_of(event.id) not in LEASED:
                self._find("fates", f"group {event.id} was handed back after it had been pushed, or had left")
            case Drop() | Filter():
                kind = "dropped" if isinstance(event, Drop) else "filtered"
                self._leave(event.id, f"{kind}: {event.reason}")
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
        """The stage of a group; None if it is not active."""
        entry = self.store.entries.get(group_id)
        return entry.stage if entry else None

    def _admit(self, event: Admit) -> None:
        expected = self.prompts.next()
        if (event.id, event.row, event.task) != expected:
            row = f"row {event.row}{event.task and f' (of {event.task})'}"
            self._find("prompts", f"group {event.id} of {row} was admitted, but {tuple(expected)} was next")
        if event.id in self.store.entries or event.id in self.gone:
            self._find("prompts", f"group {event.id} was admitted twice")

    def _push(self, event: Push) -> None:
        head = event.head
        if self._stage_of(head.id) not in UNFINISHED:
            self._find("fates", f"group {head.id} was taken twice, or after it had left")
        for made, digest in head.digests.items():
            if self.digests.setdefault(made, digest) != digest:
                self._find("weights", f"version {made} has the digests {self.digests[made]} and {digest}")

    def _leave(self, group_id: int, fate: str) -> None:
        if group_id not in self.store.entries:
            self._find("fates", f"group {group_id}, {fate}, was {self.gone.get(group_id, 'never admitted')}")
        self.gone[group_id] = fate

    def _serve(self, event: Serve) -> None:
        batch, ids, version = event.batch, event.ids, self.bound.batch_version(event.batch)
        if len(set(ids)) != self.bound.batches.size(batch):
            self._find("batches", f"batch {batch} has {len(set(ids))} groups")
        planned = self.store.planned.get(batch) or [e.id for e in self.store.of(Stage.SERVED) if e.batch == batch]
        if planned and planned != ids:
            self._find("batches", f"batch {batch} was served again with other groups")
        self.served_again += bool(planned)
        for group_id in ids:
            entry = self.store.entries.get(group_id)
            if entry is None or entry.head is None:
                fate = self.gone.get(group_id, "not pushed")
                self._find("fates", f"group {group_id} of batch {batch} was {fate}")
                continue
            if entry.stage is not Stage.WAITING:
                self._find("fates", f"group {group_id} is in batches {entry.batch} and {batch}")
            oldest = entry.oldest_trained(event.oldest_allowed)
            if oldest is not None and version - oldest > self.bound.max_staleness:
                self._find("bound", f"group {group_id} of batch {batch} has tokens of version {oldest}")

    def _finish(self, batch: int) -> None:
        groups = [entry.id for entry in self.store.of(Stage.SERVED) if entry.batch == batch]
        if not groups:
            self._find("batches", f"batch {batch} was trained but never served")
        if batch != self.trained:
            self._find("batches", f"batch {batch} was trained, but {self.trained} was next")
        self.trained += 1
        self.gone.update(dict.fromkeys(groups, f"trained in batch {batch}"))

    def _compare(self, event: Snapshot) -> None:
        said = {"admitted": event.admitted, "trained": event.trained, "filtered": event.filtered}
        said |= {"dropped": event.dropped, "active": len(event.groups)}
        if event.tasks:
            active = Counter(held.task for held in event.groups)
            said["tasks"] = {task: ledger_of(counts, active[task]) for task, counts in event.tasks.items()}
        if said != (ours := self.store.ledger()):
            self._find("ledger", f"a snapshot says {said}, but the records say {ours}")
        if wrong := {held.id for held in event.groups} ^ self.store.entries.keys():
            self._find("ledger", f"groups {sorted(wrong)} are active in a snapshot or by the records, not in both")


def audit(run: Path) -> Audit:
    """Audit a run folder. Raises ConfigError, JournalError."""
    config = load_resolved(run / "config.yaml")
    task = build("task", config.task, config.run.seed)
    scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    sampler = bind("sampler", config.sampler)
    results = Results() if asks(sampler) else None
    prompts = PromptCursor(shares_of(task), config.run.seed, 0, sampler, results)
    bound = Bound(scheduler.max_staleness, config.groups_per_batch, config.weight_sync_interval)
    for _ in scan(run / "journal"):
        pass  # reading checks the payloads' checksums
    found = Audit(prompts, bound, results).read(Recorded(run / "journal", whole=True))
    if (run / "summary.json").exists():
        _compare(found, json.loads((run / "summary.json").read_text()))
    return found


def _compare(found: Audit, summary: dict[str, Any]) -> None:
    if summary["ledger"] != found.store.ledger():
        found.findings["ledger"].append(f"the summary says {summary['ledger']}, the journal {found.store.ledger()}")
    if summary["steps"] != found.trained:
        found.findings["batches"].append(f"{summary['steps']} train steps, {found.trained} batches")


def table(found: Audit) -> Table:
    """A line per rule."""
    counts = found.store.ledger()
    left = sum(counts["filtered"].values()) + sum(counts["dropped"].values())
    seen = {
        "prompts": f"{counts['admitted']} admitted in order",
        "fates": f"{counts['trained']} trained, {left} filtered or dropped, {counts['active']} active",
        "batches": f"{found.trained} trained, {found.served_again} served again",
        "bound": f"at most {found.bound.max_staleness} versions",
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
    if not found.store.admitted:
        refuse(f"{args.run} has no journal (buffer.journal=off, or no run folder)")
    output.console().print(table(found))
    return 1 if any(found.findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
