"""Seconds until a tiny model copies four digits, from random weights: this project and TRL's GRPOTrainer.

    python -m scripts.bench.copying [--json FILE] [--seeds N] [--trl PYTHON] [--only NAME] [--tune]

Ours is `configs/copy4.yaml` as it is, with one run per seed. TRL has the same initial model, prompts, reward,
batch (16 prompts × 8 samples) and optimizer (`loss_type="dapo"`, `beta=0`, no cost for evaluations), and all its seeds
share one process, so that its imports count once. `--tune` tries learning rates, both scalings of its rewards, and one
or two optimizer steps per batch, on seeds of its own; the defaults are the fastest of these.

Ours has learned once a held-out reward (128 prompts, sampled) is at least .95; TRL once a batch's mean reward is, which
needs no evaluation. Seconds count from the first lease and from TRL's `train()`; `whole` from the start of the command,
imports and processes included (TRL's: one import per seed). A seed that has not learned after `--limit` seconds counts
as `--limit`.

Metrics: `ours_seconds`, `trl_seconds` (medians), `ours_learned`, `trl_learned` (seeds), `ours_over_trl` and
`whole_over_trl` (medians, ours over TRL's; less is better).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .figures import bench_parser, tell
from .pretrained import KEPT_BY_MALLOC, started

ENOUGH = 0.95
BATCH, SIZE, DIGITS = 16, 8, 4
"""As in configs/copy4.yaml."""
STEPS = 2000
"""Most optimizer steps of TRL."""
RATE, SCALE, MINIBATCHES = 2e-3, "group", 2
"""TRL's fastest, by `--tune`."""
RATES, SCALES, TUNING_SEEDS = (2e-3, 3e-3, 5e-3, 1e-2), ("none", "group"), (100, 101, 102)
NO_TOKEN = 13
"""An end token that the model does not have, so each answer has four tokens; ours never stops early either."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = bench_parser("copying", __doc__)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--only", choices=["ours", "trl"], help="run one contender alone")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of training per seed, at most")
    parser.add_argument("--tune", action="store_true", help="try TRL's rates and scalings, and print its seconds")
    parser.add_argument("--cores", type=int, default=2, help="processor cores for each contender")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# Ours


def run_ours(seed: int, args: argparse.Namespace, place: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.train", "configs/copy4.yaml", "--plain", f"run.dir={place}"]
    command += [f"run.name=ours-{seed}", f"run.seed={seed}", f"run.target_reward={ENOUGH}", "run.steps=100000"]
    command += [f"run.max_seconds={args.limit}"]
    begin = time.monotonic()
    started(command, args.cores, place / f"ours-{seed}.log")
    whole = time.monotonic() - begin
    rows = [json.loads(line) for line in (place / f"ours-{seed}" / "metrics.jsonl").read_text().splitlines()]
    learned = [row["seconds"] for row in rows if row.get("eval/reward", 0.0) >= ENOUGH]
    if not learned:
        return {"seed": seed, "learned": False, "seconds": args.limit, "whole": whole}
    return {"seed": seed, "learned": True, "seconds": learned[0], "whole": whole}


# TRL


def run_trl(
    seeds: Sequence[int], args: argparse.Namespace, place: Path, rate: float, scale: str, minibatches: int
) -> list[Any]:
    for seed in seeds:
        prepare(seed, place / f"seed-{seed}")
    asked = {"seeds": list(seeds), "rate": rate, "scale": scale, "minibatches": minibatches}
    asked |= {"limit": args.limit, "place": str(place)}
    log = place / f"trl-{rate}-{scale}-{minibatches}.log"
    command = [args.trl, "-m", "scripts.bench.copying", "--contender", json.dumps(asked)]
    started(command, args.cores, log, KEPT_BY_MALLOC)
    found: list[Any] = json.loads(log.read_text().splitlines()[-1])
    return found


def prepare(seed: int, folder: Path) -> None:
    """The initial model and the prompts of our run with this seed."""
    if folder.exists():
        return
    from areal_like.config import run_config as configs
    from areal_like.config.registry import build
    from areal_like.tasks.copying import Copy

    config = configs.load(["configs/copy4.yaml"])
    task = Copy(seed, digits=DIGITS)
    build("model", config.model, seed, task.vocab_size).save_pretrained(folder)
    prompts = [task.prompt("train", row) for row in range(BATCH * STEPS)]
    rows = [{"prompt": task.codec.decode(each.tokens), "answer": each.answer.tolist()} for each in prompts]
    (folder / "prompts.json").write_text(json.dumps(rows))


def contend(asked: dict[str, Any], begun: float) -> list[dict[str, float]]:
    """TRL's trainer in this process, one seed after the other."""
    import torch
    import trl  # noqa: F401 - counts as an import

    torch.set_num_threads(1)  # more are slower for a model this small
    imports = time.monotonic() - begun
    found = []
    for seed in asked["seeds"]:
        prepared = time.monotonic()
        begin, ends, rewards = train_trl(seed, asked)
        learned = [end for end, reward in zip(ends, rewards, strict=False) if reward >= ENOUGH]
        seconds = learned[0] - begin if learned else asked["limit"]
        whole = imports + begin - prepared + seconds
        found.append({"seed": seed, "learned": bool(learned), "seconds": seconds, "whole": whole})
    return found


def train_trl(seed: int, asked: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    """When training began, when each optimizer step ended, and the mean rewards of the batches."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    folder = Path(asked["place"]) / f"seed-{seed}"
    ends, rewards = list[float](), list[float]()

    def reward(completion_ids: list[list[int]], answer: list[list[int]], **_: Any) -> list[float]:
        pairs = zip(completion_ids, answer, strict=True)
        found = [sum(a == b for a, b in zip(ids, digits, strict=False)) / len(digits) for ids, digits in pairs]
        rewards.append(sum(found) / len(found))
        return found

    options = GRPOConfig(
        output_dir=asked["place"],
        use_cpu=True,
        seed=seed,
        per_device_train_batch_size=BATCH * SIZE // asked["minibatches"],
        steps_per_generation=asked["minibatches"],
        num_generations=SIZE,
        max_completion_length=DIGITS,
        max_steps=STEPS,
        learning_rate=asked["rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards=asked["scale"],
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        reward_funcs=reward,
        args=options,
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.json"), split="train"),
        processing_class=characters(),
        callbacks=[stops(ends, rewards, asked["limit"])],
    )
    begin = time.monotonic()
    trainer.train()
    return begin, ends, rewards


def stops(ends: list[float], rewards: list[float], limit: float) -> Any:
    """A callback that appends the time of the end of each step, and stops when the model has learned or time is up."""
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_train_begin(self, *args: Any, **more: Any) -> None:
            self.last = time.monotonic() + limit

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append(time.monotonic())
            control.should_training_stop |= rewards[-1] >= ENOUGH or ends[-1] >= self.last

    return Stops()


def characters() -> Any:
    """The task's characters as a tokenizer: token i is character i."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: token for token, character in enumerate("0123456789>")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"<eos>": 11, "<pad>": 12, "<none>": NO_TOKEN}, "<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<none>", pad_token="<pad>")


# Both


def compare(args: argparse.Namespace, place: Path) -> dict[str, float]:
    seeds, metrics = range(args.seeds), dict[str, float]()
    rows = {}
    if args.only != "trl":
        rows["ours"] = [run_ours(seed, args, place) for seed in seeds]
    if args.only != "ours":
        rows["trl"] = run_trl(seeds, args, place, RATE, SCALE, MINIBATCHES)
    for name, found in rows.items():
        for row in found:
            print(f"{name}, seed {row['seed']}: {row['seconds']:.1f} s, {row['whole']:.1f} s in all", flush=True)
        metrics[f"{name}_seconds"] = median(row["seconds"] for row in found)
        metrics[f"{name}_whole"] = median(row["whole"] for row in found)
        metrics[f"{name}_learned"] = sum(row["learned"] for row in found)
    if len(rows) == 2:
        metrics["ours_over_trl"] = metrics["ours_seconds"] / metrics["trl_seconds"]
        metrics["whole_over_trl"] = metrics["ours_whole"] / metrics["trl_whole"]
    return metrics


def tune(args: argparse.Namespace, place: Path) -> None:
    for settings in itertools.product(RATES, SCALES, (1, 2)):
        found = [row["seconds"] for row in run_trl(TUNING_SEEDS, args, place, *settings)]
        told = ", ".join(f"{seconds:.1f}" for seconds in found)
        print("rate {:g}, scale_rewards={}, minibatches {}: ".format(*settings) + f"{told} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    begun = time.monotonic()
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.contender:
        print(json.dumps(contend(json.loads(args.contender), begun)))
        return
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-like-bench-")))
        if args.tune:
            tune(args, place)
            return
        tell(compare(args, place), args.json)


if __name__ == "__main__":
    main()
