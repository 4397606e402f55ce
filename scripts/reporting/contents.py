"""Everything the page shows of a run, as data for JSON; read from the run's folder, also during the run."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from areal_like.config import run_config as configs
from areal_like.config.eval_sets import OWN
from areal_like.config.registry import COMPONENTS, ConfigError, knobs
from areal_like.config.signatures import REQUIRED
from areal_like.places import CONFIGS
from areal_like.run import samples
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import RECORD, config_file, is_going_on, summary_of
from areal_like.run.spans import FOLDER as SPANS
from areal_like.run.spans import Span
from buffer.journal import JournalError, Recorded

from ..following.fault_counts import FAULTS, faults
from ..ledger import Account, Books, bias
from ..plotting.timelines import ACTIVITIES
from ..samples import Numbers, Texts, texts_of
from ..timeline import WAITS, Timeline, shares, timeline, window
from .excerpts import Excerpt, excerpts
from .series import Series, short

log = logging.getLogger(__name__)
CURATED = (
    *("reward/mean", "staleness/mean", "staleness/max", "entropy", "ess", "kl/k3", "grad_norm", "mismatch_kl", "lr"),
    *("train/tokens_per_second", "rollout/tokens_per_second", "rollout/idle_share", "train/idle_share"),
    *("response_length/mean", "zero_variance_share", "loss/clip_share", "publish/delta_bytes"),
)
"""The metrics of each run if there are many runs; of few runs the page has all metrics."""
IN_TILES = ("step", "seconds", "staleness/bound")
MOST_BUCKETS, LEAST_BUCKETS = 500, 24
BYTES_PER_POINT = 7
MOST_COLUMNS, LEAST_COLUMNS = 160, 16
BYTES_PER_COLUMN = 60
MOST_SPANS = 5000
BYTES_PER_SPAN = 30
MOST_ROLES = 24
JOURNAL_BYTES = 1 << 29
"""The ledger of a run with a longer journal has counts only: reading it would take minutes."""
BINS = 30
NOT_THE_RUNS = ("run.name", "run.dir", "resume", "replay")
"""Keys that say nothing about what a run does."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may take on the page, by part; `whole`: all metrics and the journal, not the chosen few."""

    series: int
    samples: int
    spans: int
    whole: bool

    @classmethod
    def of(cls, most: float, runs: int) -> Budget:
        """`most` bytes for all runs together."""
        each = most / runs
        return cls(int(0.35 * each), int(0.5 * each), int(0.15 * each), runs <= 8)


class Contents:
    """A run's data. `refresh` reads what is new."""

    def __init__(self, run: Path, budget: Budget, labels: Mapping[str, str] | None = None, seed: str = ""):
        self.run, self.budget = run, budget
        self.config = dict[str, Any](configs.read_resolved(config_file(run)))
        self.labels, self.seed = dict(labels or {}), seed or str(self.config["run"]["seed"])
        self._follower = MetricsFollower(run / "metrics.jsonl")
        numbers = 3 * 150 if budget.whole else len(CURATED) + 2
        most = int(np.clip(budget.series / numbers / BYTES_PER_POINT, LEAST_BUCKETS, MOST_BUCKETS))
        self.series = Series(most, self._is_wanted)
        self.row: dict[str, Any] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.notes: list[str] = []
        self._texts: Texts | Numbers = Numbers()
        self._kept: dict[str, tuple[object, Any, list[str]]] = {}

    def _is_wanted(self, key: str) -> bool:
        return self.budget.whole or key in CURATED

    def _is_shown(self, key: str, value: object) -> bool:
        return isinstance(value, int | float) and (self._is_wanted(key) or key in IN_TILES)

    @property
    def is_going_on(self) -> bool:
        return is_going_on(self.run)

    @property
    def summary(self) -> dict[str, Any]:
        return {} if self.is_going_on else summary_of(self.run) or {}

    def refresh(self) -> None:
        """Read new rows of metrics."""
        for row in self._follower.each_new_row():
            self.series.add(row)
            self.row = self.row | row
            if row.get("eval/reward") is not None:
                found = {key: row.get(f"eval/{key}") for key in ("version", "reward", "length")}
                self._note_evaluation(found | {"seconds": row.get("seconds"), "sets": sets_in(row)})
        for each in self.summary.get("evaluations", ()):
            self._note_evaluation(each)

    def _note_evaluation(self, found: Mapping[str, Any]) -> None:
        """An evaluation counts at the step that made its weights."""
        step = int(found["version"]) * self.config["weight_sync_interval"]
        step = min(step, self.summary.get("steps", step))
        values = {name: short(found[name]) for name in ("reward", "length", "seconds") if found.get(name) is not None}
        told = found.get("sets", {}).items()
        sets = {name: {key: short(value) for key, value in figures.items()} for name, figures in told}
        self.evaluations[int(found["version"])] = {"step": step, **values, "sets": sets}

    def data(self) -> dict[str, Any]:
        """All data of the run's page."""
        self.notes = []
        summary, config = self.summary, self.config
        group = config["sizing"].get("group_size")
        return {
            "name": self.run.name,
            "folder": str(self.run),
            "labels": self.labels,
            "seed": self.seed,
            "state": self._state(summary),
            "steps": config["run"]["steps"],
            "samples_per_step": config["groups_per_batch"] * group if group else None,
            "record": self._record(),
            "summary": {key: value for key, value in summary.items() if key != "evaluations"},
            "row": {key: value for key, value in self.row.items() if self._is_shown(key, value)},
            "faults": faults(summary.get("faults") or {key: self.row.get(key) for key in (*FAULTS, *self.row)}),
            "series": self.series.data(extremes=self.budget.whole),
            "evaluations": [self.evaluations[version] for version in sorted(self.evaluations)],
            "config": settings(config),
            "timeline": self._unless_same("timeline", self._spans_size(), self._timeline),
            "ledger": self._unless_same("ledger", (self.is_going_on, self.row.get("step")), self._ledger),
            "samples": self._unless_same("samples", self._samples_size(), self._excerpts),
            "notes": self.notes,
        }

    def _unless_same(self, name: str, state: object, make: Callable[[], Any]) -> Any:
        """The earlier result of `make`, if the files have not changed since."""
        known = self._kept.get(name)
        if known is None or known[0] != state:
            before, self.notes = self.notes, []
            known = self._kept[name] = state, make(), self.notes
            self.notes = before
        self.notes += known[2]
        return known[1]

    def _state(self, summary: Mapping[str, Any]) -> str:
        if self.is_going_on:
            return "running"
        return "finished" if summary else "stopped"

    def _record(self) -> dict[str, Any]:
        path = self.run / RECORD
        found = json.loads(path.read_text()) if path.is_file() else {}
        return {key: found.get(key) for key in ("command", "commit", "started", "settings")}

    # ---- samples ----------------------------------------------------------------------------------------------------

    def _samples_size(self) -> list[int]:
        return [path.stat().st_size for path in sorted((self.run / samples.FOLDER).glob("*.jsonl"))]

    def _excerpts(self) -> list[Excerpt]:
        if not self._samples_size():
            return []
        if isinstance(self._texts, Numbers):
            self._texts, note = texts_of(self.run)
            self.notes += [note] if note else []
        return excerpts(self.run, self._texts, self.budget.samples)

    # ---- timeline ---------------------------------------------------------------------------------------------------

    def _spans_size(self) -> list[int]:
        return [path.stat().st_size for path in sorted((self.run / SPANS).glob("*.jsonl"))]

    def _timeline(self) -> dict[str, Any] | None:
        try:
            found = timeline(self.run)
        except ValueError:
            return None
        hidden = max(0, len(found) - MOST_ROLES)
        kept = list(found.items())[: MOST_ROLES // 2] + list(found.items())[-(MOST_ROLES - MOST_ROLES // 2) :]
        return timeline_data(found, dict(kept) if hidden else found, self.budget.spans) | {"hidden": hidden}

    # ---- ledger -----------------------------------------------------------------------------------------------------

    def _ledger(self) -> dict[str, Any]:
        """The ledger from the journal if there is one that can be read now; else counts only."""
        journal = self.run / "journal"
        size = sum(path.stat().st_size for path in journal.glob("*.wal"))
        if self.budget.whole and not self.is_going_on and 0 < size <= JOURNAL_BYTES:
            try:
                return ledger_data(Books().read(Recorded(journal, whole=True)))
            except (JournalError, OSError, ValueError, KeyError) as error:
                self.notes.append(f"the ledger has counts only, because the journal cannot be read: {error}")
        counts = self.summary.get("ledger") or counted(self.row)
        fates = {"trained": counts.get("trained", 0), "active": counts.get("active", 0)}
        for kind in ("filtered", "dropped"):
            fates |= {f"{kind}: {reason}": count for reason, count in counts.get(kind, {}).items()}
        return {"fates": [{"fate": fate, "count": count} for fate, count in fates.items() if count]}


def sets_in(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Set → its figures, from the keys of a row of metrics (`learners.main.heldout_metrics`)."""
    found: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        prefix, _, rest = key.partition("/")
        if prefix == "heldout" and isinstance(value, int | float):
            name, _, figure = rest.partition("/")
            found.setdefault(name, {})[figure or "reward"] = value
        elif prefix == "eval" and "eval/prompts" in row and isinstance(value, int | float) and rest != "version":
            found.setdefault(OWN, {})[rest] = value
    return found


def counted(row: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger of a live run, from its last train step."""
    found: dict[str, Any] = {"filtered": {}, "dropped": {}}
    for key, value in row.items():
        kind, _, reason = key.removeprefix("ledger/").partition("/")
        if key.startswith("ledger/") and reason:
            found.setdefault(kind, {})[reason] = value
        elif key.startswith("ledger/"):
            found[kind] = value
    return found


def ledger_data(accounts: dict[str, Account]) -> dict[str, Any]:
    """Fates with counts, and lengths and rewards as shares of samples per bin. `bias`: length of what was trained
    against all that was offered."""
    known = [account for account in accounts.values() if account.lengths]
    edges: dict[str, np.ndarray] = {
        name: np.histogram_bin_edges([n for account in known for n in getattr(account, name)], BINS)
        for name in ("lengths", "rewards")
    }
    fates = []
    for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count):
        entry: dict[str, Any] = {"fate": fate, "count": account.count, "samples": len(account.lengths)}
        entry |= {"cut": account.cut, "redrawn": len(account.redrawn)}
        if account.lengths:
            entry |= {
                "length": short(float(np.mean(account.lengths))),
                "reward": short(float(np.mean(account.rewards))),
            }
            entry |= {"p50": float(np.quantile(account.lengths, 0.5)), "p95": float(np.quantile(account.lengths, 0.95))}
            for name in ("lengths", "rewards"):
                counts, _ = np.histogram(getattr(account, name), edges[name])
                entry[name] = [short(float(count / len(account.lengths))) for count in counts]
        fates.append(entry)
    shorter = bias(accounts)
    places = {name: [short(float(edge)) for edge in each] for name, each in edges.items()}
    return {"fates": fates, "edges": places, "bias": None if math.isnan(shorter) else short(shorter)}


def timeline_data(found: Timeline, shown: Timeline, most_bytes: int) -> dict[str, Any]:
    """Shares of the whole time for all roles; for those `shown` also activity over time in columns (`strip`), and spans
    of a part of the time (all of it if they fit), in seconds."""
    begin, end = window(found)
    names = [name for name in ACTIVITIES if any(s.name == name for spans in shown.values() for s in spans)]
    rows = {role: {name: short(share) for name, share in row.items()} for role, row in shares(found).items()}
    columns = int(np.clip(most_bytes / 3 / BYTES_PER_COLUMN, LEAST_COLUMNS, MOST_COLUMNS))
    edges = np.linspace(begin, end, columns + 1)
    part = _part(shown, begin, end, min(MOST_SPANS, most_bytes // BYTES_PER_SPAN))
    return {
        "roles": list(shown),
        "names": names,
        "seconds": short(end - begin),
        "shares": {role: row for role, row in rows.items() if role in shown},
        "waits": WAITS,
        "columns": columns,
        "strip": {
            role: {name: _filled(spans, name, edges) for name in rows[role] if name in names}
            for role, spans in shown.items()
        },
        "part": [short(each) for each in part],
        "spans": {
            role: [
                [names.index(s.name), round(max(s.begin, part[0]), 4), round(min(s.end, part[1]), 4)]
                for s in spans
                if s.name in names and s.end > part[0] and s.begin < part[1]
            ]
            for role, spans in shown.items()
        },
    }


def _part(shown: Timeline, begin: float, end: float, most: int) -> tuple[float, float]:
    """A part in the middle of the time with at most `most` spans."""
    times = np.sort([span.begin for spans in shown.values() for span in spans])
    middle, half = (begin + end) / 2, (end - begin) / 2
    while half > 1e-3 and np.searchsorted(times, middle + half) - np.searchsorted(times, middle - half) > most:
        half /= 2
    return max(begin, middle - half), min(end, middle + half)


def _filled(spans: list[Span], name: str, edges: np.ndarray) -> list[float]:
    """The share of each column of time that spans of a name fill."""
    times = np.array([(span.begin, span.end) for span in spans if span.name == name]).reshape(-1, 2)
    order = np.argsort(times[:, 0])
    begins, ends = times[order, 0], times[order, 1]
    # Time filled until an edge: of spans that began before it, all of those that ended, and a part of the others.
    until = np.array([(np.minimum(ends[begins < e], e) - begins[begins < e]).sum() for e in edges])
    width = max(edges[1] - edges[0], 1e-9)
    return [round(float(share), 3) for share in np.clip(np.diff(until) / width, 0, 1)]


# ---- config ---------------------------------------------------------------------------------------------------------


def settings(config: dict[str, Any]) -> list[list[Any]]:
    """All keys of a run: [key, value, default], with the unset knobs of its components."""
    defaults = _base()
    own = leaves(config)
    for kind in COMPONENTS:
        if name := own.get(f"{kind}.name"):
            known = _knobs(kind, name)
            if defaults.get(f"{kind}.name") != name:
                defaults = {
                    key: value for key, value in defaults.items() if key == f"{kind}.name" or not _in(kind, key)
                }
            for knob, default in known.items():
                key = f"{kind}.{knob}"
                defaults.setdefault(key, default)
                if not any(_in(key, each) or each == key for each in own):
                    own[key] = defaults[key]
    keys = [key for key in own if key not in NOT_THE_RUNS]
    order = {name: place for place, name in enumerate(dict.fromkeys(key.partition(".")[0] for key in keys))}
    keys.sort(key=lambda key: order[key.partition(".")[0]])
    return [[key, _said(own[key]), _said(defaults.get(key))] for key in keys]


@functools.cache
def _base() -> dict[str, Any]:
    return leaves(yaml.safe_load(configs.to_yaml(configs.load([str(CONFIGS / "base.yaml")]))))


def _in(section: str, key: str) -> bool:
    return key.startswith(f"{section}.")


def _knobs(kind: str, name: str) -> dict[str, Any]:
    try:
        return knobs(kind, name)
    except (ConfigError, ValueError):  # the user's own component, not found here
        return {}


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted key → value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
    return found


def _said(value: Any) -> str:
    if value is REQUIRED:
        return "(must be set)"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
