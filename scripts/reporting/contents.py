"""Everything the page shows of a run, as data for JSON; read from the run's folder, also during the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.config import run_config as configs
from areal_like.config.registry import COMPONENTS, ConfigError, knobs
from areal_like.config.schema import OWN
from areal_like.config.signatures import REQUIRED
from areal_like.places import CONFIGS
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG, RECORD, config_file, is_going_on, summary_of
from buffer.journal import JournalError, Recorded

from ..following.fault_counts import FAULTS, faults
from ..ledger import Account, Books, bias
from ..samples import texts_of
from ..timeline import ACTIVITIES, WAITS, Timeline, shares, timeline, window
from .excerpts import excerpts
from .series import Series, short

MOST_SAMPLE_BYTES = 1_750_000
MOST_ROLES, MOST_SPANS = 24, 3000
JOURNAL_BYTES = 1 << 29
"""The ledger of a run with a longer journal has counts only: reading it would take minutes."""
BINS = 30
NOT_THE_RUNS = ("run.name", "run.dir", "resume", "replay")
"""Keys that say nothing about what a run does."""


def contents(run: Path) -> dict[str, Any]:
    """All data of the run's page. Raises ConfigError, OSError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: no run folder ({CONFIG} is missing)")
    config = configs.load_resolved(config_file(run))
    going_on = is_going_on(run)
    summary = ({} if going_on else summary_of(run)) or {}
    series, row, evaluations = Series(), dict[str, Any](), dict[int, dict[str, Any]]()
    for each in MetricsFollower(run / "metrics.jsonl").each_new_row():
        series.add(each)
        row |= {key: value for key, value in each.items() if isinstance(value, int | float)}
        if each.get("eval/reward") is not None:
            numbers = {"version": each["eval/version"], "reward": each["eval/reward"], "seconds": each.get("seconds")}
            evaluations[numbers["version"]] = numbers | {"sets": sets_in(each)}
    evaluations |= {each["version"]: each for each in summary.get("evaluations", ())}
    texts, note = texts_of(run)
    ledger, unread = ledger_of(run, going_on, summary, row)
    record = json.loads((run / RECORD).read_text()) if (run / RECORD).is_file() else {}
    group = config.sizing.get("group_size")
    return {
        "name": run.resolve().name,
        "folder": str(run),
        "state": "running" if going_on else "finished" if summary else "stopped",
        "steps": config.run.steps,
        "seed": config.run.seed,
        "samples_per_step": config.groups_per_batch * group if group else None,
        "record": {key: record.get(key) for key in ("command", "commit", "started")},
        "summary": {key: value for key, value in summary.items() if key != "evaluations"},
        "row": row,
        "notes": [each for each in (note, unread) if each],
        "faults": faults(summary.get("faults") or {key: row.get(key) for key in (*FAULTS, *row)}),
        "series": series.data(),
        "evaluations": [_at_step(evaluations[version], config, summary) for version in sorted(evaluations)],
        "config": settings(config),
        "timeline": timeline_of(run),
        "ledger": ledger,
        "samples": excerpts(run, texts, MOST_SAMPLE_BYTES),
    }


def _at_step(found: Mapping[str, Any], config: configs.Config, summary: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation counts at the step that made its weights."""
    step = int(found["version"]) * config.weight_sync_interval
    return {"step": min(step, summary.get("steps", step)), "sets": {}, **found}


def sets_in(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Held-out set → its figures, from the keys of a row of metrics (`learners.main.heldout_metrics`)."""
    found: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        prefix, _, rest = key.partition("/")
        if prefix == "heldout" and isinstance(value, int | float):
            name, _, figure = rest.partition("/")
            found.setdefault(name, {})[figure or "reward"] = value
        elif prefix == "eval" and "eval/prompts" in row and isinstance(value, int | float) and rest != "version":
            found.setdefault(OWN, {})[rest] = value
    return found


# ---- timeline -------------------------------------------------------------------------------------------------------


def timeline_of(run: Path) -> dict[str, Any] | None:
    """Shares of the whole time, and the spans of a part in the middle (all of it if they fit): role → [activity, begin,
    end] in seconds. None without spans."""
    try:
        found = timeline(run)
    except ValueError:
        return None
    begin, end = window(found)
    shown: Timeline = dict([*found.items()][:MOST_ROLES])
    names = [name for name in ACTIVITIES if any(span.name == name for spans in shown.values() for span in spans)]
    times = np.sort([span.begin for spans in shown.values() for span in spans])
    middle, half = (begin + end) / 2, (end - begin) / 2
    while half > 1e-3 and np.searchsorted(times, middle + half) - np.searchsorted(times, middle - half) > MOST_SPANS:
        half /= 2
    spans = {
        role: [
            [names.index(span.name), round(span.begin, 4), round(span.end, 4)]
            for span in each
            if span.name in names and span.end > middle - half and span.begin < middle + half
        ]
        for role, each in shown.items()
    }
    of_time = {role: {name: short(share) for name, share in row.items()} for role, row in shares(found).items()}
    return {
        "names": names,
        "waits": WAITS,
        "seconds": short(end - begin),
        "shares": {role: of_time[role] for role in shown},
        "spans": spans,
        "hidden": len(found) - len(shown),
    }


# ---- ledger ---------------------------------------------------------------------------------------------------------


def ledger_of(
    run: Path, going_on: bool, summary: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The ledger from the journal of a run that has ended; else, or with a note if it cannot be read, counts only."""
    journal, note = run / "journal", ""
    if not going_on and 0 < sum(path.stat().st_size for path in journal.glob("*.wal")) <= JOURNAL_BYTES:
        try:
            return ledger_data(Books().read(Recorded(journal, whole=True))), ""
        except (JournalError, OSError, ValueError, KeyError) as error:
            note = f"the ledger has counts only, because the journal cannot be read: {error}"
    counts = summary.get("ledger") or counted(row)
    fates = {"trained": counts.get("trained", 0), "active": counts.get("active", 0)}
    for kind in ("filtered", "dropped"):
        fates |= {f"{kind}: {reason}": count for reason, count in counts.get(kind, {}).items()}
    return {"fates": [{"fate": fate, "count": count} for fate, count in fates.items() if count]}, note


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


def ledger_data(accounts: Mapping[str, Account]) -> dict[str, Any]:
    """Fates with counts, and lengths and rewards as shares of samples per bin. `bias`: mean length of trained samples
    over that of all, minus 1."""
    known = [account for account in accounts.values() if account.lengths]
    edges: dict[str, np.ndarray] = {
        name: np.histogram_bin_edges([n for account in known for n in getattr(account, name)], BINS)
        for name in ("lengths", "rewards")
    }
    fates = []
    for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count):
        entry: dict[str, Any] = {"fate": fate, "count": account.count, "samples": len(account.lengths)}
        if account.lengths:
            entry |= {"length": float(np.mean(account.lengths)), "p95": float(np.quantile(account.lengths, 0.95))}
            entry |= {"reward": float(np.mean(account.rewards)), "cut": account.cut}
            for name in ("lengths", "rewards"):
                counts, _ = np.histogram(getattr(account, name), edges[name])
                entry[name] = [short(float(count / len(account.lengths))) for count in counts]
        fates.append(entry)
    shorter = bias(dict(accounts))
    places = {name: [short(float(edge)) for edge in each] for name, each in edges.items()}
    return {"fates": fates, "edges": places, "bias": None if math.isnan(shorter) else short(shorter)}


# ---- config ---------------------------------------------------------------------------------------------------------


def settings(config: configs.Config) -> list[list[str]]:
    """All keys of a run: [key, value, default], with the unset knobs of its components."""
    own: dict[str, Any] = dict(configs.leaves(config))
    base: dict[str, Any] = dict(configs.leaves(configs.load([str(CONFIGS / "base.yaml")])))
    for kind in COMPONENTS:
        if name := own.get(f"{kind}.name"):
            if base.get(f"{kind}.name") != name:  # base.yaml has another component's knobs
                base = {key: value for key, value in base.items() if not _within(key, [kind])}
            base = {f"{kind}.{knob}": default for knob, default in _knobs(kind, name).items()} | base
    unset = {key: value for key, value in base.items() if _within(key, COMPONENTS) and not _within(key, own)}
    keys = {**own, **{key: value for key, value in unset.items() if f"{key.partition('.')[0]}.name" in own}}
    rows = [[key, _shown(value), _shown(base.get(key))] for key, value in keys.items() if key not in NOT_THE_RUNS]
    order = {name: place for place, name in enumerate(dict.fromkeys(key.partition(".")[0] for key, _, _ in rows))}
    return sorted(rows, key=lambda row: order[row[0].partition(".")[0]])


def _within(key: str, sections: Mapping[str, object] | Sequence[str]) -> bool:
    """Is the key one of these, or within one?"""
    parts = key.split(".")
    return any(".".join(parts[:count]) in sections for count in range(1, len(parts) + 1))


def _knobs(kind: str, name: str) -> dict[str, Any]:
    try:
        return knobs(kind, name)
    except (ConfigError, ValueError):  # the user's own component, not found here
        return {}


def _shown(value: Any) -> str:
    if value is REQUIRED:
        return "(must be set)"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
