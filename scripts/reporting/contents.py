"""Everything the page shows of a run, as data for JSON; read from the run's folder, also during the run."""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.config import run_config as configs
from areal_like.config.registry import ConfigError
from areal_like.run.metrics import MetricsFollower, Row
from areal_like.run.run_folder import CONFIG, config_file, is_going_on, record_of, summary_of
from buffer.journal import JournalError, Recorded

from ..following.display import FAULTS, faults
from ..ledger import Books, bias
from ..samples import Texts
from .excerpts import excerpts, short

MOST_SAMPLE_BYTES = 1_750_000
JOURNAL_BYTES = 1 << 29
"""The ledger of a run with a longer journal has counts only: reading it would take minutes."""
NOT_THE_RUNS = ("run.name", "run.dir", "resume", "replay")
MOST_BUCKETS = 500
MOST_VALUES = 24
"""Rows of a heat map: more values share rows of equal width."""
Numbers = tuple[float, int, float, float]
"""Sum, count, lowest, highest."""


def contents(run: Path) -> dict[str, Any]:
    """All data of the run's page. Raises ConfigError, OSError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: no run folder ({CONFIG} is missing)")
    config = configs.load_resolved(config_file(run))
    going_on = is_going_on(run)
    summary = ({} if going_on else summary_of(run)) or {}
    metrics, row, evaluations = run / "metrics.jsonl", Row(), dict[int, Row]()
    for each in MetricsFollower(metrics).each_new_row():
        row |= {key: value for key, value in each.items() if isinstance(value, int | float)}
        version = each.get("eval/version")
        if version is not None and each.get("eval/reward") is not None:
            evaluations[version] = {"version": version, "reward": each["eval/reward"], "seconds": each.get("seconds")}
    evaluations |= {each["version"]: each for each in summary.get("evaluations", ())}
    for version, each in evaluations.items():  # it counts at the step that made its weights
        step = version * config.weight_sync_interval
        evaluations[version] = {"step": min(step, summary.get("steps", step)), "sets": {}, **each}
    texts = Texts(run)
    ledger, unread = ledger_of(run, going_on, summary)
    record = record_of(run)
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
        "notes": [each for each in (texts.note, unread) if each],
        "faults": faults(summary.get("faults") or {key: row.get(key) for key in (*FAULTS, *row)}),
        "series": series(MetricsFollower(metrics).each_new_row(), int(row.get("step", 0))),
        "evaluations": [evaluations[version] for version in sorted(evaluations)],
        "config": settings(config),
        "ledger": ledger,
        "samples": excerpts(run, texts, MOST_SAMPLE_BYTES),
    }


def ledger_of(run: Path, going_on: bool, summary: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fates of the groups; of a run that has ended, by its journal, with lengths and rewards, and `bias`: mean length
    of trained samples over that of all, minus 1. With a note if the journal cannot be read."""
    journal, note = run / "journal", ""
    if not going_on and 0 < sum(path.stat().st_size for path in journal.glob("*.wal")) <= JOURNAL_BYTES:
        try:
            accounts = Books().read(Recorded(journal, whole=True))
            fates = [
                {"fate": fate, "count": account.count, "samples": len(account.lengths), **account.figures()}
                for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count)
            ]
            return {"fates": fates, "bias": short(bias(accounts))}, ""
        except (JournalError, OSError, ValueError, KeyError) as error:
            note = f"the ledger has counts only, because the journal cannot be read: {error}"
    counts = summary.get("ledger", {})
    found = {"trained": counts.get("trained", 0), "active": counts.get("active", 0)}
    for kind in ("filtered", "dropped"):
        found |= {f"{kind}: {reason}": count for reason, count in counts.get(kind, {}).items()}
    return {"fates": [{"fate": fate, "count": count} for fate, count in found.items() if count]}, note


def settings(config: configs.Config) -> list[tuple[str, str, bool]]:
    """All keys of a run, with the knobs of its components: key, value, and whether it differs from the default."""
    changed = set(configs.changed(config))
    with contextlib.suppress(ValueError):  # the user's own component, not found here
        config = configs.with_every_knob(config)
    found = configs.leaves(config).items()
    return [(key, str(value), key in changed) for key, value in found if key not in NOT_THE_RUNS]


def series(rows: Iterable[Row], last: int, most: int = MOST_BUCKETS) -> dict[str, Any]:
    """Metrics of the train steps up to `last`, in at most `most` buckets of `width` steps each. `columns`: key → `y`
    (means), and where steps of a bucket differ `lo` and `hi`, a value per bucket (None: there is none). `ages`:
    `values` and `shares` [values][buckets]."""
    width = 1
    while last > most * width:
        width *= 2
    numbers = defaultdict[str, dict[int, Numbers]](dict)
    ages = defaultdict[int, Counter[float]](Counter)
    for row in rows:
        place = (int(row["step"]) - 1) // width
        for key, value in row.items():
            if isinstance(value, int | float):
                total, count, low, high = numbers[key].get(place, (0.0, 0, value, value))
                numbers[key][place] = total + value, count + 1, min(low, value), max(high, value)
        ages[place].update({float(age): count for age, count in row.get("staleness/histogram", {}).items()})
    places = sorted(ages)
    columns = {key: _column([found.get(place) for place in places]) for key, found in numbers.items()}
    return {"width": width, "columns": columns, "ages": _shares([ages[place] for place in places])}


def _column(numbers: list[Numbers | None]) -> dict[str, list[float | None]]:
    found = {"y": [short(each[0] / each[1]) if each else None for each in numbers]}
    if any(each and each[2] != each[3] for each in numbers):
        found["lo"] = [short(each[2]) if each else None for each in numbers]
        found["hi"] = [short(each[3]) if each else None for each in numbers]
    return found


def _shares(counts: list[Counter[float]]) -> dict[str, Any]:
    values = sorted({value for each in counts for value in each})
    if not values:
        return {"values": [], "shares": []}
    step = max(1.0, math.ceil((values[-1] - values[0] + 1) / MOST_VALUES))
    shares = np.zeros((int((values[-1] - values[0]) // step) + 1, len(counts)))
    for column, each in enumerate(counts):
        for value, count in each.items():
            shares[int((value - values[0]) // step), column] += count / each.total()
    return {"values": [values[0] + step * row for row in range(len(shares))], "shares": shares.round(3).tolist()}
