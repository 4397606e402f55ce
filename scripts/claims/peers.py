"""Study: what AReaL, verl and RollPacker report, in simulation: `python -m scripts.claims.peers [--json FILE]`.

The production buffer in virtual time (`scripts.simulation`), with the settings that the sources tell. What they do not
tell is assumed, and a range is given over it; nothing is fitted to a speed-up. Sources, and what they tell:

AReaL: arXiv 2505.24298, and inclusionAI/AReaL, blog/AReaL_v0_3.md. R1-Distill-Qwen-1.5B on 16 nodes of 8 H800, 1,000
steps in 41.0 hours (sync) and 14.8 (async): 2.77; 7B on 24 nodes, 57.7 and 25.4: 2.27. Three quarters of the GPUs
generate. Tokens per second at η = 0, 1, 2, 4: 128.7, 269.3, 356.6, 356.6 thousand (so 2.09, 2.77, 2.77). Assumed: 512
prompts × 16 answers, costs of public figures, lengths.

verl: docs/advance/fully_async.md. Qwen2.5-Math-7B, H20, answers of up to 28k, 512 × 16 per weight update in 4 parts,
staleness_threshold .5, partial rollouts, half of the GPUs train. Seconds of a step and of its parts for 32, 64 and 128
GPUs: VERL; by total time 1.70 to 2.67. (1.55 to 1.60, with tools on 32 H20, come without seconds: not simulated.)
Assumed: η = 1, lengths, the shape of a decode step; its scale makes the sync rollout take the seconds told.

RollPacker: arXiv 2509.21009. 7B, 14B, 32B with answers of up to 8k, 16k, 32k on up to 128 H800. Tail batching of 1.25 ×
1.25 alone is 1.30, 1.48, 2.21 times veRL, everything 2.03, 2.22, 2.56. Seconds of a plain rollout and of one with tail
batching: 82, 277, 673 and 47, 88, 170. A rollout is about 70 % of a step. The artifact has 64 prompts × 8 answers.
Assumed: p99 / p50 of lengths (the paper has plots only), 16, 16 and 32 engines; scale of a decode step as above.

AReaL and verl have an eighth of the GPUs and of the batch here: the same per GPU. An engine has 256 places.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from areal_like.config import run_config as configs

from ..analysis.intervals import markdown_table
from ..console.arguments import command, new_file
from ..console.output import write_json
from ..simulation import costs, roofline
from ..simulation.planning import scaled
from ..simulation.run import Simulation

CONFIG = ["configs/bench/modes.yaml", "buffer.max_bytes=400000000000", "launcher.ready_timeout=1000000"]
EFFICIENCY = 0.9
SHARE = 8
"""Of the GPUs and the batch of AReaL and verl, one in so many is simulated."""
MODELS = {"1.5B": (1.54e9, 28 * 2 * 256), "7B": (7.6e9, 28 * 2 * 512), "14B": (14.8e9, 48 * 2 * 1024)}
MODELS["32B"] = 32.8e9, 64 * 2 * 1024
"""Qwen2.5's parameters, and elements of keys and values per token."""
LENGTHS = {
    "short, p99/p50 = 6": costs.Answers(1500, 0.586, 0.5, prompt=200),
    "long, p99/p50 = 6": costs.Answers(6000, 0.586, 0.5, prompt=200),
    "short, p99/p50 = 12": costs.Answers(1500, 0.944, 0.5, prompt=200),
    "long, p99/p50 = 12": costs.Answers(6000, 0.944, 0.5, prompt=200),
}


@dataclass(frozen=True)
class Verl:
    """Seconds of a sync step, of its rollout, and of the async step and its update, as told for so many GPUs."""

    gpus: int
    step: float
    rollout: float
    update: float
    asynchronous: float
    its_update: float


VERL = [
    Verl(32, 790.10, 357.41, 313.81, 294.77, 269.80),
    Verl(64, 365.28, 150.72, 133.41, 189.26, 156.98),
    Verl(128, 356.30, 177.85, 113.81, 150.63, 113.16),
]


@dataclass
class Comparison:
    """`simulated`: what was assumed → how many times as fast as sync."""

    name: str
    claimed: float
    simulated: dict[str, float] = field(default_factory=dict)


def of(model: str, gpu: str, each: int = 1) -> costs.Costs:
    """By public figures: an engine on `each` GPUs, and a learner on one."""
    count, kept = MODELS[model]
    sizes = SimpleNamespace(count=count, kv=lambda each: kept * each)
    return roofline.on(gpu, cast(Any, sizes), each, costs.Costs())


def seconds(cost: costs.Costs, actors: int, groups: int, size: int, steps: int, *words: str) -> float:
    """Of a train step, after the pipeline is full."""
    shape = [f"actors.count={actors}", f"groups_per_batch={groups}", f"sizing.group_size={size}"]
    config = configs.load([*CONFIG, *shape, f"run.steps={steps}", *words])
    outcome = Simulation(config, cost).run(warmup=steps // 3)
    return groups * size / outcome.samples_per_second


def fitted(cost: costs.Costs, rollout: float, actors: int, groups: int, size: int) -> costs.Costs:
    """The same with decode steps scaled so that a plain rollout takes so many seconds."""
    found = copy.deepcopy(cost)
    found.learner, found.weights = costs.LearnerCost(), costs.WeightsCost()
    factor = rollout / seconds(found, actors, groups, size, 6, "mode=sync")
    for name in ("base", "per_sequence", "per_token", "prefill", "apply"):
        setattr(found.engine, name, getattr(found.engine, name) * factor)
    return found


def areal() -> Iterator[Comparison]:
    for model, gpus, claims in (("1.5B", 128, {1: 2.09, 2: 2.77, 4: 2.77}), ("7B", 192, {4: 2.27})):
        found = {bound: Comparison(f"AReaL, {model}, η = {bound}", claim) for bound, claim in claims.items()}
        for name, answers in LENGTHS.items():
            cost = of(model, "H800")
            cost.answers = costs.Answers(answers.median, answers.sigma, answers.noise, most=27_648, prompt=200)
            shape = (512 // SHARE, 16, 12)
            every = gpus // SHARE
            plain = seconds(scaled(cost, every, EFFICIENCY), every, *shape, "mode=sync")
            ours = scaled(cost, every // 4, EFFICIENCY)
            for bound, comparison in found.items():
                words = f"scheduler.max_staleness={bound}"
                comparison.simulated[name] = plain / seconds(ours, every * 3 // 4, *shape, words)
        yield from found.values()


def verl() -> Iterator[Comparison]:
    for told in VERL:
        speed = told.step / told.asynchronous
        measured = Comparison(f"verl, {told.gpus} GPUs, its own update times", speed)
        halved = Comparison(f"verl, {told.gpus} GPUs, an update on half the GPUs takes twice as long", speed)
        for name, answers in LENGTHS.items():
            cost = of("7B", "H20")
            cost.answers = costs.Answers(answers.median, answers.sigma, answers.noise, most=28_672, prompt=200)
            shape, samples = (512 // SHARE, 16), 8192 / SHARE
            cost = fitted(cost, told.rollout, told.gpus // SHARE, *shape)
            cost.learner = costs.LearnerCost(per_sample=(told.step - told.rollout) / samples)
            plain = seconds(cost, told.gpus // SHARE, *shape, 8, "mode=sync")
            for comparison, update in ((measured, told.its_update), (halved, 2 * told.update)):
                cost.learner = costs.LearnerCost(per_sample=update / samples)
                words = ["scheduler.max_staleness=1", "learner.stream=true"]
                taken = seconds(cost, told.gpus // SHARE // 2, *shape, 12, *words)
                comparison.simulated[name] = plain / taken
        yield from (measured, halved)


def rollpacker() -> Iterator[Comparison]:
    tail = ["mode=sync", "scheduler.oversample_prompts=1.25", "scheduler.oversample_responses=1.25"]
    told = (("7B", 8, 16, 1, 82, 47, 1.30, 2.03), ("14B", 16, 16, 2, 277, 88, 1.48, 2.22))
    for model, most, actors, each, plain, short, alone, all_ in (*told, ("32B", 32, 32, 4, 673, 170, 2.21, 2.56)):
        rollout = Comparison(f"RollPacker, {model}, rollout with tail batching", plain / short)
        batching = Comparison(f"RollPacker, {model}, tail batching alone", alone)
        streaming = Comparison(f"RollPacker, {model}, all (here: and a stream trainer)", all_)
        for ratio in (4.0, 6.0, 9.0, 12.0, 20.0):
            sigma = math.sqrt((math.log(ratio) / 2.326) ** 2 - 0.5**2)
            cost, shape = of(model, "H800", each), (64, 8)
            cost.answers = costs.Answers(64.0 * most, sigma, 0.5, most=1024 * most, prompt=512)
            cost = fitted(cost, plain, actors, *shape)
            decoded = seconds(cost, actors, *shape, 20, "mode=sync")
            name = f"p99/p50 = {ratio:.0f}"
            rollout.simulated[name] = decoded / seconds(cost, actors, *shape, 20, *tail)
            cost.learner = costs.LearnerCost(per_sample=decoded * 3 / 7 / 512)
            whole = seconds(cost, actors, *shape, 20, "mode=sync")
            batching.simulated[name] = whole / seconds(cost, actors, *shape, 20, *tail)
            streaming.simulated[name] = whole / seconds(cost, actors, *shape, 20, *tail, "learner.stream=true")
        yield from (rollout, batching, streaming)


STUDIES: dict[str, Callable[[], Iterator[Comparison]]] = {"areal": areal, "verl": verl, "rollpacker": rollpacker}


def table(found: list[Comparison]) -> str:
    lines = []
    for each in found:
        least, most = (pick(each.simulated, key=each.simulated.__getitem__) for pick in (min, max))
        low, high = each.simulated[least], each.simulated[most]
        within = "yes" if low <= each.claimed <= high else "above" if each.claimed > high else "below"
        lines.append([each.name, f"{each.claimed:.2f}", f"{low:.2f} ({least})", f"{high:.2f} ({most})", within])
    return markdown_table(["", "claimed", "simulated, least", "simulated, most", "claim within"], lines)


def main(argv: list[str] | None = None) -> int:
    parser = command("claims.peers", __doc__)
    parser.add_argument("--only", choices=STUDIES, help="only this one's claims")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures to this file")
    args: argparse.Namespace = parser.parse_args(argv)
    found = [each for name, study in STUDIES.items() if args.only in (None, name) for each in study()]
    sys.stdout.write(table(found))
    write_json(args.json, {each.name: {"claimed": each.claimed, "simulated": each.simulated} for each in found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
