"""Warm start and distillation: what imitation makes possible, and what staleness does to a student.

`python -m scripts.claims.warm_start [--quick] [--seeds N] [--out FOLDER]`

The task is to say five digits backwards, with a reward of 1 for the whole answer and 0 otherwise (`WholeReverse`): from
random weights about one answer in 370,000 is right. For each seed: RL alone; imitation (`algorithm=sft`)
of right answers, ended early; reinforcement learning from its checkpoint; and smaller students, from random weights,
that are distilled from what that leaves, with rollouts of age 0 and 8, with and without corrections. Rewards are
held-out ones (greedy), `kl` is the mean k3 of the student's tokens against the teacher, in the last ten batches.

What `--out` has of it is kept: runs that ended with these very settings, also those of an earlier version of the code.
Seeds run side by side, one per processor that the command may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = argument_parser(__doc__, "warm_start")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds (default: 3; with --quick 1)")
    OPTIONS = parser.parse_args()

import contextlib
import io
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from areal_like.config import older_configs
from areal_like.config import run_config as configs
from areal_like.run.run_folder import CONFIG, summary_of
from areal_like.tasks.copying import Reverse
from areal_like.types import Prompt

from ..analysis.intervals import bootstrap, markdown_table
from ..console.output import write_json
from ..train import inline
from .studies import prepare, tell

SEEDS, WARM, STEPS, DISTILLED = 3, 100, 300, 600
"""Seeds; train steps of the imitation, of reinforcement learning, and of a student."""
TASK = "task={name: 'scripts.claims.warm_start:WholeReverse', digits: 5}"
COMMON = ["quickstart", "launcher=inline", "buffer.transport=inproc", TASK]
COMMON += ["run.target_reward=null", "eval.temperature=0", "eval.prompts=256", "eval.every=0"]
COMMON += ["weights.probe_every=0", "rewards.workers=0", "run.trackers=[]", "checkpoint.every=0", "run.samples_bytes=0"]
RL = ["learner.entropy_bonus=0", "learner.lr=1e-3", "learner.warmup_steps=0"]
STUDENT = ["learner.entropy_bonus=0", "learner.lr=3e-3", "groups_per_batch=32"]
STUDENT += ["model.hidden_size=24", "model.intermediate_size=48"]  # 12,096 weights; the teacher has 21,248
TOP = ["algorithm=distill", "advantage.sampled=0", "learner.teacher={path: null, top: 32, trace: 1.0}"]
AGED = ["inject_staleness=8"]
STUDENTS: dict[str, list[str]] = {
    "age 0, sampled token": ["mode=sync", "algorithm=distill"],
    "age 8, sampled token, no correction": [
        *AGED,
        "algorithm=distill",
        "loss={name: reinforce}",
        "advantage.of=behaviour",
    ],
    "age 8, sampled token, weighed (tis)": [*AGED, "algorithm=distill"],
    "age 0, all tokens": ["mode=sync", *TOP, "learner.teacher.trace=null"],
    "age 8, all tokens, no correction": [*AGED, *TOP, "learner.teacher.trace=null"],
    "age 8, all tokens, weighed by their prefix": [*AGED, *TOP],
}
"""Label → overrides."""


class WholeReverse(Reverse):
    """As Reverse; the reward is 1 for the whole answer, else 0."""

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return float(await super().reward(prompt, tokens) == 1.0)


def run(folder: Path, name: str, seed: int, steps: int, *overrides: str) -> Mapping[str, float]:
    """The summary of a run, and the KL to its teacher."""
    mine, where = folder / f"{name}-{seed}", [f"run.dir={folder}", f"run.name={name}-{seed}"]
    wanted = [*COMMON, *where, f"run.seed={seed}", f"run.steps={steps}", *overrides]
    summary = kept(mine, wanted)
    if summary is None:
        shutil.rmtree(mine, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            summary = inline(*wanted)
    lines = (mine / "metrics.jsonl").read_text().splitlines()[-10:]
    kl = [row["teacher_kl"] for row in map(json.loads, lines) if "teacher_kl" in row]
    found = {key: summary.get(key) for key in ("reward_before", "reward_after", "loss_before", "loss_after", "seconds")}
    found |= {"kl": float(np.mean(kl)) if kl else None}
    return {key: value for key, value in found.items() if value is not None}


def kept(run: Path, wanted: list[str]) -> Mapping[str, Any] | None:
    """The summary of a run with these settings that has ended."""
    if not (run / CONFIG).is_file() or older_configs.load(run / CONFIG) != configs.load(wanted):
        return None
    return summary_of(run)


def study(folder: Path, seed: int, scale: float) -> dict[str, Mapping[str, float]]:
    """Label → what a run came to."""

    def steps(count: int) -> int:
        return max(2, round(scale * count))

    def left(name: str) -> str:
        return str(folder / f"{name}-{seed}" / "checkpoints" / "final")

    found = {"RL alone": run(folder, "alone", seed, steps(STEPS), *RL)}
    found["imitation"] = run(
        folder, "warm", seed, steps(WARM), "algorithm=sft", "groups_per_batch=64", "learner.lr=1e-2"
    )
    begun = ["model=folder", f"model.path={left('warm')}"]
    found["RL after imitation"] = run(folder, "taught", seed, steps(STEPS), *begun, *RL)
    for number, (label, overrides) in enumerate(STUDENTS.items()):
        teacher = f"learner.teacher.path={left('taught')}"
        found[label] = run(folder, f"student{number}", seed, steps(DISTILLED), *overrides, teacher, *STUDENT)
    return found


def main() -> None:
    prepare()
    seeds = OPTIONS.seeds or (1 if OPTIONS.quick else SEEDS)
    found: dict[str, list[Mapping[str, float]]] = {}
    scale = 0.05 if OPTIONS.quick else 1.0
    at_once = min(seeds, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(study, [OPTIONS.out] * seeds, range(seeds), [scale] * seeds):
            for label, figures in one.items():
                found.setdefault(label, []).append(figures)
    shown = ["reward_before", "reward_after", "kl"]
    rows = [
        [label, *(bootstrap(one[key] for one in runs) if key in runs[0] else "" for key in shown)]
        for label, runs in found.items()
    ]
    tell(OPTIONS.out, markdown_table(["run", *shown], rows))
    write_json(OPTIONS.out / "warm_start.json", found)


if __name__ == "__main__":
    main()
