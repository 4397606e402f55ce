"""Tokens per second of the embedded engine against transformers' batched `generate`, on the same model in one run.

    python -m scripts.bench.engine [--json FILE] [--repeats N] [--seed N]
    python -m scripts.bench.engine --model FOLDER [--threads N] [--answers MIN MAX] [--gguf FILE ...] [--only NAME ...]

Both sample at temperature 1 (the engine records logprobs as well), 64 sequences at once, one thread, Qwen2 of hidden
size 128 and 4 layers. "equal": all responses have the same length. "longtail": log-normal lengths (σ = 1), 256
requests; `generate` takes them 64 at a time and each batch waits for its longest. The contenders take turns and the
best of the repeats counts, so other load on the machine affects both. Only requested tokens count.

Metrics: `engine_over_generate`, `engine_over_generate_longtail` (ratios of tokens/s), `*_tokens_per_second`,
`engine_over_generate_greedy` (equal lengths, both greedy), `engine_over_padded_*` (the engine with torch's attention,
which reads all sequences to the longest one; "stream": log-normal lengths to 512, σ = .6 around 200),
`invariant_over_engine_*` (with `batch_invariant`), and `tiny_step_seconds`, `tiny_step_invariant_seconds`: one decode
step of 64 sequences of a model with hidden size 32 and 2 layers, all bookkeeping included.

`--model FOLDER` compares on that model instead, in float32 and bfloat16 (`scripts.bench.decoding`): this engine,
`generate` with a static cache and, where llama-cpp-python can be imported, llama.cpp with each `--gguf` file of the
same weights. On one thread in processor time, on more in wall-clock time. Metrics: `NAME_tokens_per_second`,
`NAME_first_token_seconds` (64 different prompts), and `logprobs_*`: the distance between the engine's and a learner's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like.types import Limits

from ..console.arguments import positive
from .figures import bench_parser, best_seconds, tell

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actors.engines.torch_engine import TorchEngine

SLOTS, VOCAB, PROMPT, EQUAL, REQUESTS, MEDIAN, LONGEST = 64, 1000, 32, 128, 256, 48, 512


def model() -> PreTrainedModel:
    """The same weights each time; an engine takes over its model, so each contender has its own."""
    from areal_like.models.causal_lm import qwen2  # takes seconds to import: not for `--help`

    return qwen2(0, VOCAB, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512).eval()


def run_generate(reference: Any, prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> None:
    """prompts [n, P]; each batch of SLOTS decodes as many tokens as its longest wants."""
    import torch

    mode = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for start in range(0, len(prompts), SLOTS):
        ids = torch.from_numpy(prompts[start : start + SLOTS])
        longest = int(lengths[start : start + SLOTS].max())
        count = {"max_new_tokens": longest, "min_new_tokens": longest}
        reference.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **count, **mode)


def run_engine(engine: TorchEngine, prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> None:
    async def sample_all() -> None:
        limits = [Limits(int(n), temperature=0.0 if greedy else 1.0, key=i) for i, n in enumerate(lengths)]
        await asyncio.gather(*map(engine.generate, prompts, limits))

    asyncio.get_event_loop().run_until_complete(sample_all())


def variants(suffix: str, lengths: np.ndarray, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    """What it gains that attention reads no padding, and what it costs that results depend on no other sequence."""
    from actors.engines.torch_engine import TorchEngine

    from .decoding import torchs_attention

    prompts, engine = rng.integers(0, VOCAB, (len(lengths), PROMPT)), TorchEngine(model(), slots=SLOTS)
    invariant = TorchEngine(model(), slots=SLOTS, batch_invariant=True)

    def padded() -> None:
        with torchs_attention():
            run_engine(engine, prompts, lengths, False)

    contenders = {
        "padded": padded,
        "engine": lambda: run_engine(engine, prompts, lengths, False),
        "invariant": lambda: run_engine(invariant, prompts, lengths, False),
    }
    seconds = best_seconds(contenders, repeats, perf_counter)
    for each in (engine, invariant):
        asyncio.get_event_loop().run_until_complete(each.close())
    return {
        f"engine_over_padded{suffix}": seconds["padded"] / seconds["engine"],
        f"invariant_over_engine{suffix}": seconds["engine"] / seconds["invariant"],
    }


def compare(suffix: str, lengths: np.ndarray, greedy: bool, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    from actors.engines.torch_engine import TorchEngine

    prompts = rng.integers(0, VOCAB, (len(lengths), PROMPT))
    reference, engine = model(), TorchEngine(model(), slots=SLOTS)
    seconds = best_seconds(
        {
            "generate": lambda: run_generate(reference, prompts, lengths, greedy),
            "engine": lambda: run_engine(engine, prompts, lengths, greedy),
        },
        repeats,
        perf_counter,
    )
    asyncio.get_event_loop().run_until_complete(engine.close())
    rates = {f"{name}{suffix}_tokens_per_second": float(lengths.sum()) / s for name, s in seconds.items()}
    return {f"engine_over_generate{suffix}": seconds["generate"] / seconds["engine"], **rates}


def tiny_step(repeats: int, rng: np.random.Generator, batch_invariant: bool = False) -> float:
    """Seconds per decode step at hidden size 32 × 2 layers: 64 sequences of 8 prompt and 8 response tokens."""
    from actors.engines.torch_engine import TorchEngine
    from areal_like.models.causal_lm import qwen2

    engine = TorchEngine(qwen2(0, 16), slots=SLOTS, batch_invariant=batch_invariant)
    prompts, lengths = rng.integers(0, 16, (SLOTS, 8)), np.full(SLOTS, 8)
    seconds = best_seconds({"engine": lambda: run_engine(engine, prompts, lengths, False)}, 10 * repeats, perf_counter)
    asyncio.get_event_loop().run_until_complete(engine.close())
    return seconds["engine"] / 8


def main() -> None:
    parser = bench_parser("engine", "embedded engine against transformers' generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="compare on this Hugging Face folder (examples/make_smollm2.py)")
    parser.add_argument("--threads", type=int, default=1, help="with --model")
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="the same weights for llama.cpp")
    parser.add_argument(
        "--answers", type=positive, nargs=2, default=(16, 64), metavar=("MIN", "MAX"), help="with --model: their tokens"
    )
    parser.add_argument("--only", action="append", help="with --model: engine_bfloat16, generate_float32 ...")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads if args.model else 1)
    asyncio.set_event_loop(asyncio.new_event_loop())
    rng = np.random.default_rng(args.seed)
    if args.model:
        from . import decoding

        makers = decoding.contenders_of(args.model, args.gguf, args.threads, args.answers[1])
        chosen = {name: make for name, make in makers.items() if not args.only or name in args.only}
        found = decoding.compare(args.model, chosen, args.threads, args.repeats, rng, tuple(args.answers))
        tell(found, args.json)
        return
    equal = np.full(SLOTS, EQUAL)
    tail, stream = (
        np.clip(np.rint(np.exp(rng.normal(np.log(median), sigma, REQUESTS))), 1, LONGEST).astype(int)
        for median, sigma in ((MEDIAN, 1.0), (200, 0.6))
    )
    metrics = {
        **compare("", equal, False, args.repeats, rng),
        **compare("_greedy", equal, True, args.repeats, rng),
        **compare("_longtail", tail, False, max(1, args.repeats // 2), rng),
        **variants("_equal", equal, args.repeats, rng),
        **variants("_longtail", tail, max(1, args.repeats // 2), rng),
        **variants("_stream", stream, max(1, args.repeats // 2), rng),
        "tiny_step_seconds": tiny_step(args.repeats, rng),
        "tiny_step_invariant_seconds": tiny_step(args.repeats, rng, batch_invariant=True),
    }
    tell(metrics, args.json)


if __name__ == "__main__":
    main()
