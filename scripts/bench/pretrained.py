"""SmolLM2-135M-Instruct on the CPU, seconds per step of 64 samples: this project and TRL's GRPOTrainer.

    python -m scripts.bench.pretrained [--json FILE] [--trl PYTHON] [--without-trl]      (taskset -c 0,1: on two cores)

Same model, prompts (examples/smollm2), groups (8 × 8), temperature, learning rate, clipping and cores; each answer
has 16 tokens, as the end token is one that is never sampled. "async", "sync": `configs/smollm2/one-digit.yaml`.
"trl": `loss_type="dapo"`, `beta=0`, micro-batches of 16, with bfloat16 autocast and wholly in bfloat16; the faster
counts. `--trl` names the interpreter of another environment (`pip install -e '.[bench]' -c constraints.txt`).

Metrics: `async_over_trl`, `sync_over_trl` (TRL's seconds over ours), `*_seconds`, `*_peak_bytes` (all processes).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from areal_like.places import REPOSITORY

from .figures import bench_parser, rows_of, tell

GROUPS, SIZE, ANSWER, LR, STEPS = 8, 8, 16, 4e-5, 5
SILENT = "<jupyter_start>"
"""A token of SmolLM2's tokenizer that the model never samples."""
WARMUP = {"async": 3, "sync": 1, "trl": 1}
PRECISIONS = ("bf16", "whole")
MEMORY_SECONDS = 3.0
"""Between measurements of the memory; each stops the process for a moment."""
KEPT_BY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""Memory that glibc keeps, which halves TRL's time. Our processes set this themselves."""


def prepare(place: Path) -> None:
    """The prompts, and a copy of the model with an end token that is never sampled."""
    from examples.smollm2 import make_model, make_sums

    make_sums.write(place / "sums")
    model, folder = Path(make_model.FOLDER), place / "model"
    make_model.make(model)
    shutil.copytree(model, folder)
    ids = {t["content"]: t["id"] for t in json.loads((model / "tokenizer.json").read_bytes())["added_tokens"]}
    for name, key, value in (
        ("tokenizer_config", "eos_token", SILENT),
        ("generation_config", "eos_token_id", ids[SILENT]),
        ("config", "eos_token_id", ids[SILENT]),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}), encoding="utf-8")
    turn_end = f"+ ('{SILENT}' if message['role'] == 'assistant' else '<|im_end|>') +"
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text(encoding="utf-8").replace("+ '<|im_end|>' +", turn_end), encoding="utf-8")


def run_ours(mode: str, place: Path) -> dict[str, float]:
    """Seconds per step, from batch to batch, of a run in `mode`."""
    words = ["configs/smollm2/one-digit.yaml", f"mode={mode}", f"run.dir={place}", f"run.name={mode}"]
    words += [f"model.path={place}/model", f"task.path={place}/sums/one-digit-train.jsonl"]
    words += [f"task.heldout_path={place}/sums/one-digit-heldout.jsonl", f"task.max_tokens={ANSWER}"]
    words += [f"run.steps={WARMUP[mode] + STEPS + 1}", "run.target_reward=null", f"learner.lr={LR}"]
    words += [f"groups_per_batch={GROUPS}", f"sizing.group_size={SIZE}"]
    words += ["eval.every=0", "eval.prompts=1", "checkpoint.every=0"]
    peak = watched([sys.executable, "-m", "scripts.train", "--plain", *words], place / f"{mode}.log")
    rows = rows_of(place / mode)
    if {row["response_length/mean"] for row in rows} != {float(ANSWER)}:
        raise RuntimeError(f"answers of {mode} are not all {ANSWER} tokens long")
    seconds = [row["seconds"] for row in rows[WARMUP[mode] :]]
    return {"seconds": (seconds[-1] - seconds[0]) / (len(seconds) - 1), "peak_bytes": peak}


def run_trl(precision: str, python: str, place: Path) -> dict[str, Any]:
    command, log = [python, "-m", "scripts.bench.pretrained", "--contender", precision, str(place)], place / precision
    peak = watched(command, log, **KEPT_BY_MALLOC)
    return {"seconds": float(log.read_text(encoding="utf-8").splitlines()[-1]), "peak_bytes": peak}


def contend(precision: str, place: Path) -> float:
    """TRL's trainer in this process: mean seconds per optimizer step."""
    import torch
    from transformers import AutoTokenizer

    from areal_like.tasks.maths import last_number

    from .trl import trl_steps

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lengths, model = set[int](), str(place / "model")

    def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.update(map(len, completion_ids))
        return [last_number(a, c[0]["content"]) for a, c in zip(answer, completions, strict=True)]

    rows = [json.loads(line) for line in (place / "sums/one-digit-train.jsonl").read_bytes().splitlines()]
    seconds = trl_steps(
        model,
        [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows],
        reward,
        AutoTokenizer.from_pretrained(model),
        (GROUPS * SIZE, 16, SIZE),
        bf16=precision == "bf16",
        model_init_kwargs={"dtype": "bfloat16" if precision == "whole" else "float32"},  # of the weights and AdamW
        max_completion_length=ANSWER,
        max_steps=STEPS + WARMUP["trl"],
        learning_rate=LR,
        lr_scheduler_type="constant",
    )
    if lengths != {ANSWER}:
        raise RuntimeError(f"TRL's answers are not all {ANSWER} tokens long: {sorted(lengths)}")
    return mean(whole for whole, _ in seconds[WARMUP["trl"] :])


def watched(command: list[str], log: Path, **environment: str) -> int:
    """Run a command; returns the peak bytes of it and its descendants (proportional set size). Raises RuntimeError."""
    import psutil  # accelerate needs it, too

    peak, errors = 0, log.with_suffix(".err")
    with log.open("w", encoding="utf-8") as out, errors.open("w", encoding="utf-8") as err:
        variables = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=err, env=variables)
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                started = psutil.Process(process.pid)
                family = [started, *started.children(recursive=True)]
                peak = max(peak, sum(each.memory_full_info().pss for each in family))
            with suppress(subprocess.TimeoutExpired):
                process.wait(MEMORY_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read_text(encoding='utf-8')[-3000:]}")
    return peak


def compare(place: Path, trl: str | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in ("async", "sync", *(f"trl-{each}" for each in PRECISIONS if trl)):
        found = run_trl(name[4:], trl, place) if trl and name.startswith("trl") else run_ours(name, place)
        metrics |= {f"{name}_{key}": value for key, value in found.items()}
    if trl:
        fastest = min(metrics[f"trl-{each}_seconds"] for each in PRECISIONS)
        metrics |= {f"{mode}_over_trl": fastest / metrics[f"{mode}_seconds"] for mode in ("async", "sync")}
    return metrics


def main() -> None:
    parser = bench_parser("pretrained", __doc__)
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out (it is an extra: bench)")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print(contend(args.contender[0], Path(args.contender[1])))
        return
    with tempfile.TemporaryDirectory(prefix="areal-like-bench-") as folder:
        prepare(Path(folder))
        tell(compare(Path(folder), None if args.without_trl else args.trl), args.json)


if __name__ == "__main__":
    main()
