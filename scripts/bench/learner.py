"""Tokens per second and peak memory of the train step: packed, the same model padded, and TRL's GRPOTrainer.

    python -m scripts.bench.learner [--json FILE] [--repeats N] [--rounds N] [--seed N] [--without-trl]

One batch, one model (Qwen2, hidden size 256, 4 layers, float32), one thread, one optimizer step of PPO-clip per batch
without KL, the sum over tokens divided by their number, AdamW, clipped norm. Lengths of sequences (prompt and response)
are log-normal with p95/p50 = 4. Each contender runs in a process of its own (peak memory), in turns, and its
fastest step counts.

- "packed": `TorchLearner.train` as it is, advantages and metrics included.
- "padded": the same, but each micro-batch is a rectangle as long as its longest sequence, under transformers' own
  attention; as many sequences as fit into the same token budget. The head runs on trained tokens only, as in "packed".
- "trl": `GRPOTrainer` (`loss_type="dapo"`, `num_iterations=1`) gets the same completions from its `rollout_func`.
  Only forward, backward, clipping and AdamW count: its padding, decoding, rewards and advantages are left out, in its
  favour. It has no token budget, so it runs with several `per_device_train_batch_size` and the fastest counts.

Tokens per second are of real input tokens (prompt and response), the same number for all. Metrics:
`packed_over_padded`, `step_over_trl` (packed over TRL), `*_tokens_per_second`,
`*_peak_bytes` (largest resident memory), `*_step_bytes` (the part allocated after the model was made).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("learner", "train step: packed, padded, TRL")
    parser.add_argument("--repeats", type=int, default=3, help="steps per process that count")
    parser.add_argument("--rounds", type=int, default=2, help="processes per contender, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out (it is an extra: bench)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.logprobs import token_logprobs
from learners.losses.clipped import ppo
from learners.passes import Passes

from .figures import tell

VOCAB, GROUPS, SIZE, PROMPT, MEDIAN, LONGEST, BUDGET = 2048, 8, 8, 16, 64, 768, 4096
SIGMA = float(np.log(4) / 1.645)
"""Sigma of the log-normal lengths: p95 is 4 times the median."""
TRL_SIZES = (4, 8, 16)
LR = 1e-5


def model() -> PreTrainedModel:
    return qwen2(
        0, VOCAB, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )  # fmt: skip


def lengths(rng: np.random.Generator) -> np.ndarray:
    """Response lengths int [GROUPS, SIZE], at the distribution's quantiles: seeds only shuffle them."""
    normal = torch.distributions.Normal(0.0, 1.0)
    quantiles = (torch.arange(GROUPS * SIZE) + 0.5) / (GROUPS * SIZE)
    tail = MEDIAN * np.exp(SIGMA * normal.icdf(quantiles).numpy())
    return rng.permutation(np.clip(np.rint(tail) - PROMPT, 1, LONGEST).astype(int)).reshape(GROUPS, SIZE)


def made_batch(seed: int) -> Batch:
    """Random tokens; behaviour logprobs near those of an untrained model; rewards of 0 and 1."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, responses in enumerate(lengths(rng)):
        prompt = rng.integers(0, VOCAB, PROMPT)
        samples = [
            Sample(
                tokens=np.concatenate([prompt, rng.integers(0, VOCAB, n)]).astype(np.int32),
                prompt_length=PROMPT,
                logprobs=np.full(n, -np.log(VOCAB), np.float32),
                loss_mask=np.ones(n, bool),
                runs=[(0, int(n))],
                reward=float(i % 2),
                finish="stop",
            )
            for i, n in enumerate(responses)
        ]
        groups.append(Group(id=g, samples=samples))
    return Batch(0, 0, groups)


class PaddedPasses(Passes):
    """Micro-batches that are padded rectangles."""

    def microbatches(self, columns: Any, samples: np.ndarray) -> Any:
        start = 0
        while start < len(samples):
            end = start + 1
            while end < len(samples):
                if int(columns.lengths[samples[start : end + 1]].max()) * (end + 1 - start) > self._micro_batch_tokens:
                    break
                end += 1
            part = columns.microbatch(samples[start:end], self._model.device)
            part.layout = columns.lengths[samples[start:end]]  # all that `padded_logprobs` needs to know of it
            yield part
            start = end


class PaddedLearner(TorchLearner):
    """A TorchLearner that computes rectangles, after `pad`."""

    def __init__(self, *args: Any, **knobs: Any):
        super().__init__(*args, **knobs)
        self.model.set_attn_implementation("sdpa")


def padded_logprobs(model: Any, part: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """`learners.logprobs.forward_logprobs` with padding."""
    counts = torch.from_numpy(part.layout)
    real = torch.arange(int(counts.max())) < counts[:, None]
    tokens = torch.zeros(real.shape, dtype=torch.int64)
    tokens[real] = part.input_ids[0]
    hidden = model.base_model(tokens, attention_mask=real.long(), use_cache=False).last_hidden_state
    return token_logprobs(model.get_output_embeddings()(hidden[real][part.outputs]), part.targets, temperature)


def pad() -> None:
    """From now on this process computes rectangles, which share no prefixes."""
    import learners.learner
    import learners.packing

    learners.learner.Passes = PaddedPasses  # type: ignore[misc]
    learners.learner.forward_logprobs = padded_logprobs  # type: ignore[assignment]
    learners.packing.is_worth = lambda *_: False


def run_own(kind: str, batch: Batch, repeats: int) -> list[float]:
    """Seconds of each train step, the first left out."""
    cls = PaddedLearner if kind == "padded" else TorchLearner
    if kind == "padded":
        pad()
    learner = cls(model(), ppo, group, lr=LR, num_minibatches=1, micro_batch_tokens=BUDGET)
    mark_memory()
    return timed(lambda: learner.train(batch), repeats)


def timed(step: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        begin = perf_counter()
        step()
        seconds.append(perf_counter() - begin)
    return seconds[1:]


def run_trl(size: int, batch: Batch, repeats: int) -> list[float]:
    """Seconds of forward, backward, clipping and AdamW of each step of TRL, the first left out."""
    from datasets import Dataset
    from trl import GRPOTrainer

    samples = batch.samples
    spent = {"scoring": 0.0}
    seconds: list[float] = []

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begin = perf_counter()
            made = super()._generate_and_score_completions(inputs)
            spent["scoring"] += perf_counter() - begin
            return made

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [samples[int(prompt) * SIZE + i % SIZE] for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [s.tokens[:PROMPT].tolist() for s in chosen],
            "completion_ids": [s.tokens[PROMPT:].tolist() for s in chosen],
            "logprobs": [s.logprobs.tolist() for s in chosen],
            "score": [s.reward for s in chosen],
        }

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model(),
            reward_funcs=lambda completions, score, **_: score,
            args=trl_config(folder, size, repeats),
            train_dataset=Dataset.from_dict({"prompt": [str(g) for g in range(GROUPS)]}),
            processing_class=tokenizer(),
            rollout_func=rollout,
            callbacks=[stopwatch(seconds, spent)],
        )
        mark_memory()
        trainer.train()
    return seconds[1:]


def trl_config(folder: str, size: int, repeats: int) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=GROUPS * SIZE // size,
        num_generations=SIZE,
        max_completion_length=LONGEST,
        max_steps=repeats + 1,
        learning_rate=LR,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        temperature=1.0,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def stopwatch(seconds: list[float], spent: dict[str, float]) -> Any:
    """A callback that appends the seconds of each optimizer step, without those spent on scoring."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.begin, spent["scoring"] = perf_counter(), 0.0

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds.append(perf_counter() - self.begin - spent["scoring"])

    return Stopwatch()


def tokenizer() -> Any:
    """Any tokenizer with as many tokens as the model: TRL decodes completions, but that time is left out."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(vocab={f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2")


BEFORE = [0]


def mark_memory() -> None:
    BEFORE[0] = peak_memory()


def peak_memory() -> int:
    """Bytes of the largest resident memory so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def contend(name: str, seed: int, repeats: int) -> dict[str, float]:
    """One contender in this process."""
    torch.set_num_threads(1)
    batch = made_batch(seed)
    seconds = run_trl(int(name[3:]), batch, repeats) if name.startswith("trl") else run_own(name, batch, repeats)
    return {"seconds": min(seconds), "peak_bytes": peak_memory(), "step_bytes": peak_memory() - BEFORE[0]}


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.bench.learner", "--contender", name]
    command += ["--seed", str(args.seed), "--repeats", str(args.repeats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace) -> dict[str, float]:
    names = ["packed", "padded", *(() if args.without_trl else (f"trl{size}" for size in TRL_SIZES))]
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for name in names:
            result = in_own_process(name, args)
            if name not in best or result["seconds"] < best[name]["seconds"]:
                best[name] = result
    if not args.without_trl:
        best["trl"] = min((best[f"trl{size}"] for size in TRL_SIZES), key=lambda result: result["seconds"])
    tokens = sum(len(sample.tokens) for sample in made_batch(args.seed).samples)
    metrics = {"packed_over_padded": best["padded"]["seconds"] / best["packed"]["seconds"]}
    if "trl" in best:
        metrics["step_over_trl"] = best["trl"]["seconds"] / best["packed"]["seconds"]
    for name, result in best.items():
        metrics[f"{name}_tokens_per_second"] = tokens / result["seconds"]
        metrics |= {f"{name}_{key}": result[key] for key in ("peak_bytes", "step_bytes")}
    return metrics


def main(args: argparse.Namespace) -> None:
    if args.contender:
        print(json.dumps(contend(args.contender, args.seed, args.repeats)))
        return
    metrics = compare(args)
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
