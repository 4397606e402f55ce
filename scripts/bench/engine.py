"""Tokens per second of the embedded engine against transformers' batched `generate`, on the same model in one run.

    python -m scripts.bench.engine [--json FILE] [--repeats N]

64 sequences at once, one thread, a small Qwen2, temperature 1. "longtail": 256 requests of log-normal lengths;
`generate` takes them 64 at a time, and each batch waits for its longest. Metrics, the latter with `_longtail`:
`engine_over_generate`; `invariant_over_engine` (`batch_invariant`); `*_tokens_per_second`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like.types import Limits

from .figures import bench_parser, best_seconds, tell

if TYPE_CHECKING:
    from actors.engines.torch_engine import TorchEngine

SLOTS, VOCAB, PROMPT, EQUAL, REQUESTS, MEDIAN, LONGEST = 64, 1000, 32, 128, 256, 48, 512


def run_generate(reference: Any, prompts: np.ndarray, lengths: np.ndarray, **mode: Any) -> None:
    """prompts [n, P]; each batch of SLOTS decodes as many tokens as its longest response. `mode`: of `generate`."""
    import torch

    mode |= {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for start in range(0, len(prompts), SLOTS):
        ids = torch.from_numpy(prompts[start : start + SLOTS].astype(np.int64)).to(reference.device)
        longest = int(lengths[start : start + SLOTS].max())
        count = {"max_new_tokens": longest, "min_new_tokens": longest}
        reference.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **count, **mode)


def run_engine(engine: TorchEngine, prompts: np.ndarray, lengths: np.ndarray) -> None:
    async def sample_all() -> None:
        limits = [Limits(int(n), key=i) for i, n in enumerate(lengths)]
        await asyncio.gather(*map(engine.generate, prompts, limits))

    asyncio.get_event_loop().run_until_complete(sample_all())


def compare(suffix: str, lengths: np.ndarray, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    from actors.engines.torch_engine import TorchEngine
    from areal_like.models.causal_lm import qwen2

    shape: dict[str, Any] = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    reference, *own = (qwen2(0, VOCAB, **shape).eval() for _ in range(3))  # an engine takes over its model
    prompts = rng.integers(0, VOCAB, (len(lengths), PROMPT))
    engine, invariant = (TorchEngine(own[each], slots=SLOTS, batch_invariant=bool(each)) for each in (0, 1))
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: run_generate(reference, prompts, lengths),
        "engine": lambda: run_engine(engine, prompts, lengths),
        "invariant": lambda: run_engine(invariant, prompts, lengths),
    }
    warmup = 0 if suffix == "_longtail" else 1  # the process is warm by then, and a round takes long
    seconds = best_seconds(calls, repeats, perf_counter, warmup)
    for each in (engine, invariant):
        asyncio.get_event_loop().run_until_complete(each.close())
    found = {f"engine_over_generate{suffix}": seconds["generate"] / seconds["engine"]}
    found |= {f"{name}{suffix}_tokens_per_second": float(lengths.sum()) / spent for name, spent in seconds.items()}
    return found | {f"invariant_over_engine{suffix}": seconds["engine"] / seconds["invariant"]}


def main() -> None:
    parser = bench_parser("engine", "embedded engine against transformers' generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short answers; the numbers mean little")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    asyncio.set_event_loop(asyncio.new_event_loop())
    rng = np.random.default_rng(0)
    equal = np.full(SLOTS, 4 if args.quick else EQUAL)
    tail = np.clip(np.rint(np.exp(rng.normal(np.log(MEDIAN), 1.0, REQUESTS))), 1, LONGEST).astype(int)
    tail = np.minimum(tail[:SLOTS], 8) if args.quick else tail
    tell(compare("", equal, args.repeats, rng) | compare("_longtail", tail, max(1, args.repeats // 2), rng), args.json)


if __name__ == "__main__":
    main()
