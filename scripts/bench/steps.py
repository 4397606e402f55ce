"""Decode steps of the embedded engine at the same load, again and again: `python -m scripts.bench.steps [--json FILE]`.

    lockstep   sequences begin together and are equally long, as in a round of sync
    stream     sequences of very different lengths, the next begins where one ends, as in async

With as many sequences and tokens a step should take as long in both, and as long each time: what is left is the
machine. The model is the quickstart's; one thread. Metrics, by number of slots: `stream_over_lockstep_N` (the median
over repeats, per sequence and token held: see `cost`) and `slowest_over_fastest_N` of all steps' means.
"""

from __future__ import annotations

import asyncio
from statistics import median

import numpy as np

from ..console.arguments import positive
from .figures import bench_parser, tell

PROMPT, SHORTEST, LONGEST = 9, 420, 820
BASE, PER_SEQUENCE, PER_TOKEN = 1.03, 6.5e-3, 7.3e-5
"""Milliseconds of a step, as `scripts.calibrate` fitted them to a run of sync: they take out what differs in load."""


def cost(sequences: float, tokens: float) -> float:
    """Milliseconds that a step of so many sequences, which hold so many tokens, took in that run."""
    return BASE + PER_SEQUENCE * sequences + PER_TOKEN * tokens


async def steps(slots: int, total: int, stream: bool, longest: int) -> float:
    """Mean duration of a step with most slots taken, over what it costs by `cost`."""
    from actors.engines.torch_engine import TorchEngine
    from areal_like.models.causal_lm import qwen2
    from areal_like.types import Limits

    engine, places, made = TorchEngine(qwen2(0, 16), slots=slots), asyncio.Semaphore(slots), np.random.default_rng(0)
    shortest = longest * SHORTEST // LONGEST
    lengths = made.integers(shortest, longest, total) if stream else np.full(total, (shortest + longest) // 2)

    async def one(number: int) -> None:
        async with places:
            await engine.generate(np.zeros(PROMPT, np.int32), Limits(int(lengths[number]), key=number))

    await asyncio.gather(*map(one, range(total)))
    await engine.close()
    count, sequences, tokens, seconds = engine.step_costs.decode[(slots - 1).bit_length()][0]
    return float(1e3 * seconds / count / cost(sequences / count, tokens / count))


def main() -> None:
    parser = bench_parser("steps", __doc__)
    parser.add_argument("--slots", type=positive, nargs="+", default=[16, 64], metavar="N")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--longest", type=positive, default=LONGEST, help="tokens of the longest answer")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for slots in args.slots:
        took = [
            [asyncio.run(steps(slots, 6 * slots, stream, args.longest)) for stream in (False, True)]
            for _ in range(args.repeats)
        ]
        every = [each for pair in took for each in pair]
        found[f"stream_over_lockstep_{slots}"] = median(stream / lockstep for lockstep, stream in took)
        found[f"slowest_over_fastest_{slots}"] = max(every) / min(every)
    tell(found, args.json)


if __name__ == "__main__":
    main()
