"""Compare runs: `areal-like compare RUN RUN ... [--json FILE]`.

Shows the keys of the config that differ, the reward's curve, and each measure of each setting. Runs that differ only in
the seed are one setting. With five seeds or more it has 95 % intervals of the mean, with fewer the range. A folder with
runs (an ablation's) stands for them. `areal-like eval A --against B` compares models by prompt.
"""

import contextlib
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_like.config.run_config import ConfigError, leaves, load_resolved, with_every_knob
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG, config_file, summary_of

from .console.arguments import command, json_file, refusing
from .console.output import console, shortened, sparkline, table, visible, write_json

REWARD, SEED = "reward/mean", "run.seed"
UNTELLING = ("run.", "buffer.", "checkpoint.", "security.", "launcher.", "replay", "resume")
TELLING = ("run.steps", "run.target_reward")
"""Prefixes of keys that change how a run is stored or started, not what it does, except the second ones."""
MEASURES = {
    "held-out reward": "reward_after",
    "train steps": "steps",
    "seconds": "seconds",
    "mean staleness": "staleness_mean",
    "trained tokens per second": "trained_tokens_per_second",
}
"""Name → key of the summary."""


def runs_of(paths: Iterable[Path]) -> list[Path]:
    """The runs that some folders are or hold, each once. Raises ConfigError for a folder without any."""
    found: dict[Path, Path] = {}
    for path in paths:
        inside = [each for place in (path, path / "runs") if place.is_dir() for each in sorted(place.iterdir())]
        runs = [path] if (path / CONFIG).is_file() else [each for each in inside if (each / CONFIG).is_file()]
        if not runs:
            raise ConfigError(f"{path}: no run folder ({CONFIG} is missing), nor a folder with runs in it")
        found |= {run.resolve(): run for run in runs}
    return list(found.values())


def compare(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """A row per setting: all that differs (`settings`), the runs' folders, the rewards of the first run, and of each
    measure the mean, an interval or the range, and the number of runs that have it. Raises ConfigError, OSError."""
    configs = [leaves(load_resolved(config_file(run))) for run in runs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config)
            if key in TELLING or not key.startswith(UNTELLING)]  # fmt: skip
    with contextlib.suppress(ConfigError):  # the user's own component, not found here
        configs = [leaves(with_every_knob(load_resolved(config_file(run)))) for run in runs]
    differ = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    members: dict[tuple[str, ...], list[Path]] = {}
    for run, config in zip(runs, configs, strict=True):
        members.setdefault(tuple(str(config.get(key, "-")) for key in differ), []).append(run)
    rows = []
    for values, its in members.items():
        summaries = [summary_of(run) or {} for run in its]
        measures = {name: measured([each.get(key) for each in summaries]) for name, key in MEASURES.items()}
        settings = dict(zip(differ, values, strict=True))
        metrics = MetricsFollower(its[0] / "metrics.jsonl").each_new_row()
        curve = [each[REWARD] for each in metrics if each.get(REWARD) is not None]
        folders = [str(run) for run in its]
        rows.append({"settings": settings, "runs": folders, "measures": measures, "curve": curve})
    return rows


def measured(values: Iterable[Any]) -> dict[str, Any]:
    from .analysis.intervals import FEWEST_FOR_INTERVALS, bootstrap

    known = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not known:
        return {"count": 0}
    found = bootstrap(known)
    low, high = (found.low, found.high) if len(known) >= FEWEST_FOR_INTERVALS else (min(known), max(known))
    return {"mean": found.mean, "low": low, "high": high, "count": len(known)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A column per setting: what differs, and a row per measure; then the settings' curves."""
    out = console()
    for number, row in enumerate(rows, 1):
        names = ", ".join(visible(Path(folder).resolve().name) for folder in row["runs"])
        out.print(f"{number}: {names}  {sparkline(row['curve'], 24)}", soft_wrap=True)
    if keys := list(rows[0]["settings"]):
        differ = table("what differs", "", *(str(number) for number in range(1, len(rows) + 1)))
        for key in keys:
            differ.add_row(key, *(visible(shortened(str(row["settings"][key]), 24)) for row in rows))
        out.print(differ)
    found = table("measures", "measure", "setting", "runs", "mean", "low", "high")
    for name in MEASURES:
        for number, row in enumerate(rows, 1):
            figures = row["measures"][name]
            if figures["count"]:
                cells = (f"{figures[key]:.4g}" for key in ("mean", "low", "high"))
                found.add_row(name if number == 1 else "", str(number), str(figures["count"]), *cells)
    out.print(found)
    out.print("low, high: 95 % interval of the mean of five runs or more, else the range")


def main(argv: list[str] | None = None) -> int:
    parser = command("compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, or a folder of runs")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for all figures (-: standard output)")
    args = parser.parse_args(argv)
    with refusing():
        rows = compare(runs_of(args.runs))
    if args.json != Path("-"):
        show(rows)
    write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
