"""Shared prefixes against plain packing: `python -m scripts.bench.prefixes [--model FOLDER] [--json FILE]`.

Train steps on `--samples` random samples in groups of 4, 8 and 16, at several ratios of prompt to answer, and on
two-turn conversations with a tool whose first turn is shared by pairs. Each batch is trained in three modes, in turns:
packed plainly, with all shared prefixes, and as `learners.prefixes.WORTH` decides. Seconds are processor time, the
least of `--repeats` steps. FLOPs are those of the model's matrices, forward and backward: 6 per weight and token, the
those of the head only for trained tokens; attention's are left out. Without `--model` the model is a small one of
SmolLM2-135M's widths, from random weights. With it, `--precision` instead compares logprobs of the model's own answers
with those in float32.
"""

from __future__ import annotations

import argparse
from time import process_time
from typing import Any

from .figures import bench_parser, tell

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("prefixes", __doc__)
    parser.add_argument("--model", help="a Hugging Face model folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="compute_dtype")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64, help="a batch: a multiple of 16")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed, of which the fastest counts")
    parser.add_argument("--precision", action="store_true", help="measure logprobs against those in float32")
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from areal_like.models.causal_lm import folder, qwen2
from areal_like.types import Batch, Group, Sample
from learners import prefixes
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.prefixes import WORTH

RATIOS = {"1:16": (4, 64), "1:4": (16, 64), "1:1": (32, 32), "4:1": (64, 16), "16:1": (128, 8)}
"""Tokens of prompt and answer."""
SIZES = (4, 8, 16)
TURNS = (64, 24, 16, 16)
"""Tokens of a prompt, a call, what the tool returns, and the answer."""
MODES = {"plain": 0.0, "shared": 1.0, "rule": WORTH}
"""`WORTH` of each mode: the largest share of tokens left at which prefixes are shared."""
SMALL = {
    "hidden_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
QUESTIONS = ["What is {a} plus {b}?", "Name {a} animals.", "Tell me a story about the number {b}.", "Count to {b}."]
ANSWER, PER_QUESTION = 16, 4


def sample(tokens: np.ndarray, prompt: int, number: int, mask: np.ndarray | None = None) -> Sample:
    count = len(tokens) - prompt
    return Sample(
        tokens=tokens.astype(np.int32),
        prompt_length=prompt,
        logprobs=np.full(count, -5.0, np.float32),
        loss_mask=np.ones(count, bool) if mask is None else mask,
        runs=[(0, count)],
        reward=float(number % 2),
        finish="stop",
    )


def answers(rng: np.random.Generator, vocab: int, prompt: int, answer: int, size: int) -> list[Sample]:
    """A group of answers to one prompt."""
    begin = rng.integers(0, vocab, prompt)
    return [sample(np.concatenate([begin, rng.integers(0, vocab, answer)]), prompt, i) for i in range(size)]


def conversations(rng: np.random.Generator, vocab: int, size: int) -> list[Sample]:
    """A group of conversations of two turns, of which pairs share the first one."""
    prompt, call, result, answer = TURNS
    begin, mask = rng.integers(0, vocab, prompt), np.repeat([True, False, True], [call, result, answer])
    made = []
    for number in range(size):
        if number % 2 == 0:
            first = rng.integers(0, vocab, call + result)
        tokens = np.concatenate([begin, first, rng.integers(0, vocab, answer)])
        made.append(sample(tokens, prompt, number, mask))
    return made


def batches(vocab: int, samples: int) -> dict[str, Batch]:
    """Batches by name: `16:1 x4` has groups of 4 whose prompts are 16 times as long as their answers."""
    rng = np.random.default_rng(0)
    made = {}
    for size in SIZES:
        groups = range(samples // size)
        for ratio, (prompt, answer) in RATIOS.items():
            made[f"{ratio} x{size}"] = [Group(g, answers(rng, vocab, prompt, answer, size)) for g in groups]
        made[f"tool x{size}"] = [Group(g, conversations(rng, vocab, size)) for g in groups]
    return {name: Batch(0, 0, groups) for name, groups in made.items()}


def flops(model: PreTrainedModel, computed: int, trained: int) -> float:
    """FLOPs of the model's matrices, forward and backward."""
    head = model.get_output_embeddings().weight
    embedding = {id(model.get_input_embeddings().weight), id(head)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embedding)
    return 6.0 * (weights * computed + head.numel() * trained)


def measure(learner: TorchLearner, batch: Batch, repeats: int) -> dict[str, float]:
    """Processor seconds and FLOPs of a train step in each mode."""
    trained = sum(int(s.loss_mask.sum()) for s in batch.samples)
    found: dict[str, float] = {}
    for repeat in range(repeats + 1):  # the first one warms up
        for mode, prefixes.WORTH in MODES.items():
            begin = process_time()
            metrics = learner.train(batch)
            seconds = process_time() - begin
            if repeat:
                found[f"{mode}_seconds"] = min(seconds, found.get(f"{mode}_seconds", seconds))
            found[f"{mode}_flops"] = flops(learner.model, metrics["computed_tokens"], trained)
    return found


def learner_of(model: PreTrainedModel, dtype: str, threads: int) -> TorchLearner:
    return TorchLearner(model, decoupled_ppo, group, lr=1e-6, num_minibatches=1, compute_dtype=dtype, threads=threads)  # type: ignore[arg-type]


def compare(args: argparse.Namespace) -> dict[str, float]:
    model = folder(0, 0, path=args.model) if args.model else qwen2(0, 4096, **SMALL)  # type: ignore[arg-type]
    learner = learner_of(model, args.dtype, args.threads)
    metrics: dict[str, float] = {}
    print("prompt:answer  FLOPs left  plain s  shared s  by rule  speed-up")
    for name, batch in batches(model.config.vocab_size, args.samples).items():
        found = measure(learner, batch, args.repeats)
        left = found["shared_flops"] / found["plain_flops"]
        plain, shared, rule = (found[f"{mode}_seconds"] for mode in MODES)
        print(f"{name:>13s} {left:11.2f} {plain:8.3f} {shared:9.3f} {rule:8.3f} {plain / rule:9.2f}", flush=True)
        metrics |= {f"{name} {key}": value for key, value in found.items()}
        metrics |= {f"{name} flops_left": left, f"{name} rule_over_plain": rule / plain}
    metrics["slowest_rule_over_plain"] = max(v for k, v in metrics.items() if k.endswith("rule_over_plain"))
    return metrics


def own_answers(path: str) -> Batch:
    """The model's own answers to some questions: sampled tokens, as a learner gets them."""
    model: Any = folder(0, 0, path=path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    groups = []
    for g, (question, a) in enumerate((q, a) for a in (3, 5) for q in QUESTIONS):
        chat = [{"role": "user", "content": question.format(a=a, b=a + 4)}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        length = {"min_new_tokens": ANSWER, "max_new_tokens": ANSWER}
        found = model.generate(**ids, **length, do_sample=True, top_k=0, num_return_sequences=PER_QUESTION)
        prompt = ids["input_ids"].shape[1]
        groups.append(Group(g, [sample(tokens.numpy(), prompt, i) for i, tokens in enumerate(found)]))
    return Batch(0, 0, groups)


@torch.no_grad()
def precision(args: argparse.Namespace) -> dict[str, float]:
    """Differences of logprobs to float32."""
    batch, found = own_answers(args.model), {}
    for dtype in ("float32", args.dtype):
        learner = learner_of(folder(0, 0, path=args.model), dtype, args.threads)
        step = learner._begin(batch)
        logprobs = torch.zeros_like(step.behaviour)
        for part, values in learner._passes.logprobs(step.columns, [np.flatnonzero(step.columns.lengths)]):
            logprobs[part.trained] = values
        found[dtype] = logprobs
    differences = (found[args.dtype] - found["float32"]).abs()
    return {
        "tokens": float(len(differences)),
        "logprob_mean": float(found["float32"].mean()),
        "difference_mean": float(differences.mean()),
        "difference_max": float(differences.max()),
    }


def main(args: argparse.Namespace) -> None:
    if args.precision and not args.model:
        raise SystemExit("error: --precision needs --model: a folder as made by `examples/make_smollm2.py FOLDER`")
    torch.set_num_threads(args.threads)
    tell(precision(args) if args.precision else compare(args), args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
