"""Tokens per second and peak memory of the train step: packed, the same model padded, and TRL's GRPOTrainer.

    python -m scripts.bench.learner [--json FILE] [--repeats N] [--without-trl]

One batch (log-normal lengths, p95/p50 = 4), one float32 model, one thread, one optimizer step of PPO-clip. Each
contender runs in a process of its own, and its fastest step counts. "padded": rectangles under transformers' own
attention, in the same token budget. "trl": the same completions from its `rollout_func`; only forward, backward,
clipping and AdamW count, with the fastest `per_device_train_batch_size`. Metrics: `packed_over_padded`,
`step_over_trl`, `*_tokens_per_second` (of real input tokens), `*_peak_bytes`.
"""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("learner", "train step: packed, padded, TRL")
    parser.add_argument("--repeats", type=int, default=3, help="steps that count")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out (it is an extra: bench)")
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import learners.learner
import learners.packing
from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch
from learners.advantages import group
from learners.learner import TorchLearner
from learners.logprobs import token_logprobs
from learners.losses.clipped import ppo
from learners.passes import Passes

from .figures import SIGMA, random_batch, tell
from .trl import trl_steps

VOCAB, GROUPS, SIZE, PROMPT, MEDIAN, LONGEST, BUDGET = 2048, 8, 8, 16, 64, 768, 4096
TRL_SIZES = (4, 8, 16)
LR = 1e-5


def model() -> PreTrainedModel:
    return qwen2(0, VOCAB, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)


def made_batch() -> Batch:
    """Response lengths are at the distribution's quantiles, shuffled."""
    quantiles = (torch.arange(GROUPS * SIZE) + 0.5) / (GROUPS * SIZE)
    lengths = MEDIAN * np.exp(SIGMA * torch.distributions.Normal(0.0, 1.0).icdf(quantiles).numpy()) - PROMPT
    lengths = np.random.default_rng(0).permutation(np.clip(np.rint(lengths), 1, LONGEST).astype(int))
    return random_batch(lengths.reshape(GROUPS, SIZE), PROMPT, VOCAB)


class PaddedPasses(Passes):
    def microbatches(self, columns: Any, samples: np.ndarray) -> Any:
        start = 0
        while start < len(samples):
            end = start + 1
            while end < len(samples):
                if int(columns.lengths[samples[start : end + 1]].max()) * (end + 1 - start) > self.micro_batch_tokens:
                    break
                end += 1
            part = columns.microbatch(samples[start:end], self.model.device)
            part.layout = columns.lengths[samples[start:end]]  # `padded_logprobs` needs no more of it
            yield part
            start = end


def padded_logprobs(model: Any, part: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """`learners.logprobs.forward_logprobs` with padding."""
    counts = torch.from_numpy(part.layout)
    real = torch.arange(int(counts.max())) < counts[:, None]
    tokens = torch.zeros(real.shape, dtype=torch.int64)
    tokens[real] = part.input_ids[0]
    hidden = model.base_model(tokens, attention_mask=real.long(), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[real][part.outputs])
    return token_logprobs(logits, part.targets, temperature)


def padded_learner(*args: Any, **knobs: Any) -> TorchLearner:
    """A learner that computes rectangles without shared prefixes under transformers' attention, as then all here do."""
    learners.learner.Passes = PaddedPasses  # type: ignore[misc]
    learners.learner.forward_logprobs = padded_logprobs  # type: ignore[assignment]
    learners.packing.is_worth = lambda *_: False
    learner = TorchLearner(*args, **knobs)
    learner.model.set_attn_implementation("sdpa")
    return learner


def run_own(kind: str, batch: Batch, repeats: int) -> list[float]:
    make: Callable[..., TorchLearner] = padded_learner if kind == "padded" else TorchLearner
    learner, seconds = make(model(), ppo, group, lr=LR, num_minibatches=1, micro_batch_tokens=BUDGET), []
    for _ in range(repeats + 1):
        begin = perf_counter()
        learner.train(batch)
        seconds.append(perf_counter() - begin)
    return seconds


def run_trl(model: PreTrainedModel, batch: Batch, micro_batch: int, repeats: int, **fields: Any) -> list[float]:
    """Seconds of each step of TRL, without generating: it takes the batch's answers. `fields`: of GRPOConfig."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2")
    size, prompt = len(batch.groups[0].samples), batch.samples[0].prompt_length

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [batch.samples[int(each) * size + i % size] for i, each in enumerate(prompts)]
        return {
            "prompt_ids": [s.tokens[:prompt].tolist() for s in chosen],
            "completion_ids": [s.tokens[prompt:].tolist() for s in chosen],
            "logprobs": [s.logprobs.tolist() for s in chosen],
            "score": [s.reward for s in chosen],
        }

    rows = [{"prompt": str(group)} for group in range(len(batch.groups))]
    sizes = len(batch.samples), micro_batch, size
    more = {"max_completion_length": max(len(each.tokens) for each in batch.samples) - prompt, "learning_rate": LR}
    more |= {"max_steps": repeats + 1, "shuffle_dataset": False, "seed": 0, **fields}
    steps = trl_steps(model, rows, lambda completions, score, **_: score, tokenizer, sizes, rollout, **more)
    return [training for _, training in steps]


def contend(name: str, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    batch, trl = made_batch(), name.startswith("trl")
    seconds = run_trl(model(), batch, int(name[3:]), repeats, bf16=False) if trl else run_own(name, batch, repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"seconds": min(seconds[1:]), "peak_bytes": peak}


def in_own_process(name: str, repeats: int) -> dict[str, float]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(contend, name, repeats).result()


def compare(repeats: int, trl: bool) -> dict[str, float]:
    names = ["packed", "padded", *(f"trl{size}" for size in TRL_SIZES if trl)]
    found = {name: in_own_process(name, repeats) for name in names}
    tokens = sum(len(sample.tokens) for sample in made_batch().samples)
    metrics = {"packed_over_padded": found["padded"]["seconds"] / found["packed"]["seconds"]}
    if trl:
        fastest = min(found[f"trl{size}"]["seconds"] for size in TRL_SIZES)
        metrics["step_over_trl"] = fastest / found["packed"]["seconds"]
    for name, each in found.items():
        metrics |= {f"{name}_tokens_per_second": tokens / each["seconds"], f"{name}_peak_bytes": each["peak_bytes"]}
    return metrics


if __name__ == "__main__":
    tell(compare(ARGUMENTS.repeats, not ARGUMENTS.without_trl), ARGUMENTS.json)
