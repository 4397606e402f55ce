"""SmolLM2-135M-Instruct on the CPU, seconds per step of 64 samples: this project and TRL's GRPOTrainer.

    python -m scripts.bench.pretrained [--json FILE] [--model FOLDER] [--cores N] [--rounds N] [--trl PYTHON]

Same model, prompts (sums of one-digit numbers, as examples/make_sums.py writes them), groups (8 prompts × 8
samples), temperature, learning rate, clipping and one optimizer step per 64 samples, on the same N cores (all processes
of a contender are pinned to them). The end token is one that the model never samples, so each answer has exactly 16
tokens. An answer whose last number is right earns 1. Contenders take turns, each in processes of its own, and the
fastest round of each counts.

- "async", "sync": `configs/smollm2/one-digit.yaml` in that mode; from one batch served to the learner to the next.
- "trl": `GRPOTrainer` (`loss_type="dapo"`, `beta=0`, `num_iterations=1`), from one optimizer step to the next: with
  bfloat16 autocast in micro-batches of 16 and 8 samples, in float32, and wholly in bfloat16 (weights and AdamW too,
  which loses small updates); the fastest counts. glibc keeps its memory, which halves its time. Its interpreter may be
  that of another environment (`--trl PYTHON`); `pip install -e '.[bench]' -c constraints.txt` makes one.

The first steps (warm-up, a pipeline that fills) are left out. Metrics: `async_over_trl`, `sync_over_trl` (TRL's seconds
over ours), `*_seconds`, `*_peak_bytes` (all processes, shared memory counted once), and `computed_over_unique`: tokens
that all of the learner's forward passes computed for the last batch of "async", over its unique tokens (equal
tokens in equal contexts count once).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .figures import bench_parser, tell

GROUPS, SIZE, ANSWER, LR = 8, 8, 16, 4e-5
SILENT = "<jupyter_start>"
"""A token of SmolLM2's tokenizer that the model never samples."""
WARMUP = {"async": 3, "sync": 1, "trl": 1}
TRL_VARIANTS = ("bf16-16", "bf16-8", "fp32-16", "whole-16")
MEMORY_SECONDS = 3.0
"""Seconds between measurements of the memory; each stops the process for a moment."""
KEPT_BY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""Memory that glibc keeps for the next step, which halves TRL's time. Our processes set this themselves."""
LONGEST = 1200.0
"""Seconds of one process, at most."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = bench_parser("pretrained", __doc__)
    parser.add_argument(
        "--model", type=Path, help="folder made by examples/make_smollm2.py (default: made where it belongs)"
    )
    parser.add_argument("--cores", type=int, default=2, help="processor cores for each contender")
    parser.add_argument("--steps", type=int, default=5, help="steps per round that count")
    parser.add_argument("--rounds", type=int, default=1, help="rounds per contender, in turns")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--only", action="append", metavar="NAME", help="async, sync, trl, or e.g. trl-bf16-16")
    parser.add_argument("--keep", type=Path, help="keep models, prompts and runs in this folder")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# What is compared


def silent_folder(model: Path, folder: Path) -> Path:
    """A copy of a model's folder, with linked weights and an end token that is never sampled."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in (".safetensors", ".bin"):
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, folder)
    ids = {t["content"]: t["id"] for t in json.loads((model / "tokenizer.json").read_text())["added_tokens"]}
    for name, value in (("tokenizer_config", SILENT), ("generation_config", ids[SILENT]), ("config", ids[SILENT])):
        path = folder / f"{name}.json"
        fields = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(fields | {"eos_token" if name.startswith("tok") else "eos_token_id": value}))
    return folder


def prepare(args: argparse.Namespace, place: Path) -> None:
    from examples import make_smollm2, make_sums

    model = args.model or Path(make_smollm2.FOLDER)
    make_smollm2.make(model)
    if not (place / "model").exists():
        silent_folder(model, place / "model")
    make_sums.write(place / "sums")


# Ours


def run_ours(mode: str, args: argparse.Namespace, place: Path, name: str) -> dict[str, float]:
    """Seconds per step, from batch to batch, of a run in `mode`."""
    steps = WARMUP[mode] + args.steps + 1
    command = [sys.executable, "-m", "scripts.train", "configs/smollm2/one-digit.yaml", "--plain", f"mode={mode}"]
    command += [f"model.path={place}/model", f"task.path={place}/sums/one-digit-train.jsonl"]
    command += [f"task.heldout_path={place}/sums/one-digit-heldout.jsonl", f"task.max_tokens={ANSWER}"]
    command += [f"run.dir={place}/runs", f"run.name={name}"]
    command += [f"run.steps={steps}", "run.target_reward=null", f"learner.lr={LR}", f"groups_per_batch={GROUPS}"]
    command += [f"sizing.group_size={SIZE}", "eval.every=0", "eval.prompts=1", "checkpoint.every=0"]
    command += ["buffer.keep_journal=true"]
    peak = started(command, args.cores, place / f"{name}.log")
    rows = [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    if {row["response_length/mean"] for row in rows} != {float(ANSWER)}:
        raise RuntimeError(f"answers of {name} are not all {ANSWER} tokens long")
    begin, end = rows[WARMUP[mode]]["seconds"], rows[-1]["seconds"]
    return {"seconds": (end - begin) / (len(rows) - 1 - WARMUP[mode]), "peak_bytes": peak}


def last_batch_over_unique(run: Path) -> float:
    """`computed_over_unique` of the last batch that a run trained, from the weights that it began with."""
    from areal_like.config import run_config as configs
    from examples.score_losses import recorded
    from learners.build import build_trainer

    config = configs.load_resolved(run / "config.yaml")
    *_, batch = recorded(run, config.weight_sync_interval)
    return computed_over_unique(build_trainer(config), batch)


def computed_over_unique(learner: Any, batch: Any) -> float:
    """Trains a batch, and counts the tokens that go through the model, in any pass, over the unique ones."""
    computed = 0

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal computed
        computed += inputs[0].numel()

    hook = learner.model.get_input_embeddings().register_forward_pre_hook(count)
    learner.train(batch)
    hook.remove()
    # The last token of a sequence is only ever a target: nothing is computed for it.
    unique = {sample.tokens[:end].tobytes() for sample in batch.samples for end in range(1, len(sample.tokens))}
    return computed / len(unique)


# TRL


def run_trl(variant: str, args: argparse.Namespace, place: Path, name: str) -> dict[str, Any]:
    command = [args.trl, "-m", "scripts.bench.pretrained", "--contender", variant, "--keep", str(place)]
    command += ["--steps", str(args.steps), "--cores", str(args.cores)]
    peak = started(command, args.cores, place / f"{name}.log", KEPT_BY_MALLOC)
    found = json.loads((place / f"{name}.log").read_text().splitlines()[-1])
    return found | {"peak_bytes": peak}


def contend(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer in this process: mean seconds per optimizer step."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    from areal_like.tasks.numbers import last_number

    torch.set_num_threads(args.cores)
    precision, size = variant.split("-")
    folder = str(args.keep / "model")
    rows = load_dataset("json", data_files=str(args.keep / "sums/one-digit-train.jsonl"), split="train")
    lengths, ends = list[int](), list[float]()

    def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [last_number(a, c[0]["content"]) for a, c in zip(answer, completions, strict=True)]

    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=trl_config(args.keep / f"trl-{variant}", precision, int(size), args.steps + WARMUP["trl"]),
        train_dataset=rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[stopwatch(ends)],
    )
    trainer.train()
    if set(lengths) != {ANSWER}:
        raise RuntimeError(f"TRL's answers are not all {ANSWER} tokens long: {sorted(set(lengths))}")
    counted = ends[WARMUP["trl"] - 1 :]
    return {"seconds": (counted[-1] - counted[0]) / (len(counted) - 1)}


def trl_config(folder: Path, precision: str, size: int, steps: int) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=precision == "bf16",
        model_init_kwargs={"dtype": "bfloat16" if precision == "whole" else "float32"},  # of the weights and AdamW
        gradient_checkpointing=False,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=GROUPS * SIZE // size,
        num_generations=SIZE,
        max_completion_length=ANSWER,
        learning_rate=LR,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_steps=steps,
        lr_scheduler_type="constant",
    )


def stopwatch(ends: list[float]) -> Any:
    """A callback that appends the time of the end of each step."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            ends.append(time.monotonic())

    return Stopwatch()


# Processes


def started(command: list[str], cores: int, log: Path, more: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run a command on `cores` cores; returns the peak bytes of it and its descendants. Raises RuntimeError."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(more)
    with log.open("w") as out, log.with_suffix(".err").open("w") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, chosen)
        )
        with watched(process.pid) as most:
            code = process.wait(LONGEST)
    if code:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.with_suffix('.err').read_text()[-3000:]}")
    return max(most)


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """A list that gets the bytes of a process and its descendants, from time to time."""
    found, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(MEMORY_SECONDS):
            found.append(sum(proportional_bytes(each) for each in family(pid)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    members, size = {pid}, 0
    while len(members) > size:
        size = len(members)
        members |= {child for child, parent in parents.items() if parent in members}
    return members


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with its share of shared pages."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def compare(args: argparse.Namespace, place: Path) -> dict[str, float]:
    names = ["async", "sync", *(f"trl-{variant}" for variant in TRL_VARIANTS)]
    chosen = [name for name in names if not args.only or any(name.startswith(each) for each in args.only)]
    metrics: dict[str, float] = {}
    for number in range(args.rounds):
        for name in chosen:
            label = f"{name}-{number}"
            trl = name.startswith("trl-")
            found = run_trl(name[4:], args, place, label) if trl else run_ours(name, args, place, label)
            print(f"{label}: {found['seconds']:.2f} s per step, {found['peak_bytes'] / 1e9:.2f} GB", flush=True)
            if found["seconds"] < metrics.get(f"{name}_seconds", float("inf")):
                metrics |= {f"{name}_{key}": value for key, value in found.items()}
    times = [metrics[f"{name}_seconds"] for name in chosen if name.startswith("trl")]
    for mode in ("async", "sync"):
        if times and mode in chosen:
            metrics[f"{mode}_over_trl"] = min(times) / metrics[f"{mode}_seconds"]
    if "async" in chosen:
        metrics["computed_over_unique"] = last_batch_over_unique(place / "runs" / "async-0")
    return metrics


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.contender:
        print(json.dumps(contend(args.contender, args)))
        return
    with contextlib.ExitStack() as stack:
        place = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-like-bench-")))
        place.mkdir(parents=True, exist_ok=True)
        prepare(args, place)
        tell(compare(args, place), args.json)


if __name__ == "__main__":
    main()
