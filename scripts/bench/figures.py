"""Common parts of benches: `--json FILE`, a line per metric, runs, random batches, fastest of several rounds."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from areal_like.places import REPOSITORY
from areal_like.types import Batch, Group, Sample

from ..console.arguments import command, json_file
from ..console.output import write_json

SIGMA = float(np.log(4) / 1.645)
"""Of log-normal lengths: p95 is 4 times the median."""


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = command(f"bench.{name}", description)
    parser.add_argument("--json", type=json_file, help="write {metric: number} here (-: standard output)")
    return parser


def tell(metrics: Mapping[str, float], file: Path | None) -> None:
    """Print a line per metric; `file` gets them as JSON."""
    for name, value in metrics.items():
        print(f"{name:45s} {value:12.5g}")
    write_json(file, metrics)


def best_seconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = process_time, warmup: int = 1
) -> dict[str, float]:
    """Name → seconds of its fastest call, by `clock`. They take turns; the first `warmup` rounds do not count."""
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(repeats + warmup):
        for name, call in calls.items():
            begin = clock()
            call()
            if repeat >= warmup:
                best[name] = min(best[name], clock() - begin)
    return best


def ended(command: Sequence[str]) -> None:
    """Run a command in the clone, with its output kept back. Raises RuntimeError with the end of that if it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")


def trained(run: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """Make a run in the folder `run` with these arguments of `train`; its metrics by step. Raises RuntimeError."""
    place = f"run.dir={run.parent}", f"run.name={run.name}"
    ended([sys.executable, "-m", "scripts.train", "--plain", *words, *place])
    return rows_of(run)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def random_batch(lengths: np.ndarray, prompt: int, vocabulary: int) -> Batch:
    """Random tokens; responses of `lengths` int [groups, samples] after prompts of `prompt` tokens, one per group.
    Behaviour logprobs are near those of an untrained model; rewards are 0 and 1."""
    rng = np.random.default_rng(0)

    def sample(asked: np.ndarray, length: int, index: int) -> Sample:
        return Sample(
            tokens=np.concatenate([asked, rng.integers(0, vocabulary, length)]).astype(np.int32),
            prompt_length=prompt,
            logprobs=(rng.normal(0, 0.1, length) - np.log(vocabulary)).astype(np.float32),
            loss_mask=np.ones(length, bool),
            runs=[(0, length)],
            reward=float(index % 2),
            finish="stop",
        )

    groups: list[Group] = []
    for row in lengths.tolist():
        asked = rng.integers(0, vocabulary, prompt)
        groups.append(Group(len(groups), [sample(asked, length, index) for index, length in enumerate(row)]))
    return Batch(0, 0, groups)
