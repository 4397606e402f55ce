"""Common parts of all benches: `--json FILE`, a line per metric, and the fastest of several rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from time import process_time
from typing import Any

from ..console.arguments import command, new_file
from ..console.output import write_json


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m scripts.bench.NAME`, with `--json FILE`."""
    parser = command(f"bench.{name}", description)
    parser.add_argument("--json", type=new_file, help="write {metric: number} here")
    return parser


def tell(metrics: Mapping[str, float], file: Path | None) -> None:
    """Print a line per metric; `file` gets them as JSON."""
    for name, value in metrics.items():
        print(f"{name:45s} {value:12.5g}")
    write_json(file, metrics)


def best_seconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = process_time
) -> dict[str, float]:
    """Name → seconds of its fastest call, by `clock`. They take turns; a first round that does not count warms up."""
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            if repeat:
                best[name] = min(best[name], clock() - begin)
    return best
