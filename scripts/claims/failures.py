"""Study: what failures cost 1,000 nodes, by their frequency, by checkpoints, hedges and warnings.

`python -m scripts.claims.failures [--quick] [--histories N] [--json FILE]`

Runs in virtual time with the production buffer (`scripts.simulation`): 1,000 actors, each on a node of its own, and a
learner on 64 more, which dies if one of them does. An answer takes 2 minutes, a train step 60 seconds, a batch in all
some 95; a checkpoint takes 20 seconds, a resume 5 minutes, another node is there after 2. Useful throughput counts each
trained sample once, over all seconds: train steps that are repeated, and the time until a resume, count against it.

Each point is the mean over histories, which differ in when what fails, with the least and the most of them.

In each run the ledger must close: what was admitted is trained, filtered, dropped at the end of the run, or the command
fails.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import mean
from typing import Any

from areal_like.config import run_config as configs

from ..analysis.intervals import markdown_table
from ..console.arguments import command, new_file, positive
from ..console.output import write_json
from ..simulation import costs
from ..simulation.run import Outcome, Simulation

HOUR = 3600.0
LEARNER_NODES = 64
INTERVALS = 1, 4, 16
MTBF = 100 * HOUR, 30 * HOUR, 15 * HOUR
"""Of a node. 1,064 nodes at 100 hours: one fails every six minutes."""
QUICK = 32, 6, 20.0
"""Nodes, train steps, and how many times as often a node fails."""
CONFIG = [
    *("configs/bench/modes.yaml", "sizing.group_size=4", "scheduler.max_staleness=8", "sampling.max_new_tokens=16384"),
    *("buffer.max_bytes=400000000000", "buffer.journal=fsync", "buffer.heartbeat_timeout=90", "partial_rollout=resume"),
    "launcher.ready_timeout=1000000",
]


class PromptLost(AssertionError):
    """The ledger of a run does not close."""


def run(
    nodes: int, steps: int, failures: costs.Failures, *words: str, slots: int = 2, hedges: bool = True, history: int = 0
) -> Outcome:
    """Raises PromptLost."""
    size = [f"actors.count={nodes}", f"groups_per_batch={nodes // 4}", f"run.steps={steps}"]
    config = configs.load([*CONFIG, *size, *words])
    cost = costs.Costs(
        engine=costs.Engine(base=0.02, per_sequence=1e-4, apply=2.0, slots=slots),
        answers=costs.Answers(6000, 0.4, 0.3, most=16384, prompt=200),
        learner=costs.LearnerCost(base=60.0, checkpoint=20.0),
        weights=costs.WeightsCost(encode=5.0, fetch=5.0),
        failures=failures,
        journal=costs.JournalCost(write=0.002),
        buffer=2e-5,
    )
    simulation = Simulation(config, cost, history=history)
    if not hedges:
        simulation.controller.deadlines.hedge = lambda now: None  # type: ignore[method-assign]
    outcome = simulation.run()
    ledger = outcome.report["ledger"]
    left = ledger["admitted"] - ledger["trained"] - sum(ledger["filtered"].values()) - sum(ledger["dropped"].values())
    if left or sum(outcome.staleness.values()) != nodes * steps:
        raise PromptLost(f"{words}, {failures}: {left} groups are missing in {ledger}")
    return outcome


def useful(outcome: Outcome) -> float:
    """Trained samples per second of the whole run."""
    return sum(outcome.staleness.values()) / outcome.seconds


@cache
def undisturbed(nodes: int, steps: int, *words: str, slots: int = 2) -> float:
    """Useful throughput without failures and checkpoints."""
    return useful(run(nodes, steps, costs.Failures(), "checkpoint.every=0", *words, slots=slots))


def checkpoints(nodes: int, steps: int, histories: int, often: float = 1.0) -> Iterator[dict[str, Any]]:
    """Useful throughput by MTBF and checkpoint interval, over that without failures and checkpoints. Here and below:
    nodes fail `often` times as often as the tables say."""
    steps, learner_nodes = 2 * steps, max(1, LEARNER_NODES * nodes // 1000)
    free = undisturbed(nodes, steps)
    for every in INTERVALS:
        found = run(nodes, steps, costs.Failures(learner=1e12), f"checkpoint.every={every}")
        yield {"mtbf": None, "every": every, **_shares([found], free)}
    for mtbf, every in itertools.product(MTBF, INTERVALS):
        failing = costs.Failures(mtbf=mtbf / often, restart=120.0, learner=mtbf / often / learner_nodes)
        runs = [run(nodes, steps, failing, f"checkpoint.every={every}", history=each) for each in range(histories)]
        yield {
            "mtbf": mtbf / HOUR,
            "every": every,
            **_shares(runs, free),
            "deaths": mean(each.deaths for each in runs),
            "crashes": mean(each.crashes for each in runs),
            "repeated": mean(each.repeated for each in runs),
            "best": math.sqrt(2 * 20.0 * mtbf / often / learner_nodes) * free / nodes,
        }


def _shares(runs: Sequence[Outcome], free: float) -> dict[str, float]:
    """Useful throughput over that of a run in which nothing fails: of all histories, the least, the most."""
    found = [useful(each) / free for each in runs]
    return {"share": mean(found), "least": min(found), "most": max(found)}


def unseen(nodes: int, steps: int, histories: int, often: float = 1.0) -> Iterator[dict[str, Any]]:
    """Failures that nobody reports, half silent and half hung, by the deadline of a lease and with hedges or not. At
    η = 1 and with room for a group in each actor: a hedge needs an actor that is idle and takes a whole group."""
    steps //= 2
    free = undisturbed(nodes, steps, "scheduler.max_staleness=1", slots=4)
    for deadline, hedges in itertools.product((120, 600), (True, False)):
        words = ["checkpoint.every=0", "scheduler.max_staleness=1", f"buffer.lease_timeout={deadline}"]
        failing = costs.Failures(mtbf=30 * HOUR / often, restart=120.0, silent=0.5, hangs=0.5, heartbeat=30.0)
        several = range(histories)
        runs = [run(nodes, steps, failing, *words, slots=4, hedges=hedges, history=each) for each in several]
        made = mean(each.report["rollout/hedges"] for each in runs)
        yield {"deadline": deadline, "hedges": hedges, **_shares(runs, free), "made": made}


def warned(nodes: int, steps: int, histories: int, often: float = 1.0) -> Iterator[dict[str, Any]]:
    """Spot nodes that are taken every 4 hours on average, for 10 minutes, by the warning."""
    free = undisturbed(nodes, steps)
    for warning in (0.0, 30.0, 120.0):
        failing = costs.Failures(spot=4 * HOUR / often, warning=warning, away=600.0)
        runs = [run(nodes, steps, failing, "checkpoint.every=0", history=each) for each in range(histories)]
        taken = mean(each.taken for each in runs)
        yield {"warning": warning, "taken": taken, **_shares(runs, free)}


def tables(found: dict[str, list[dict[str, Any]]]) -> str:
    first = []
    for mtbf in (None, *(each / HOUR for each in MTBF)):
        rows = [row for row in found["checkpoints"] if row["mtbf"] == mtbf]
        said = (
            [f"{mtbf:.0f} h", *(f"{_share(row)}{_crashes(row)}" for row in rows), f"{rows[0]['best']:.1f}"]
            if mtbf
            else []
        )
        first.append(said or ["none fails", *(_share(row) for row in rows), ""])
    second = [
        [f"{row['deadline']} s", "yes" if row["hedges"] else "no", _share(row), f"{row['made']:.0f}"]
        for row in found["unseen"]
    ]
    third = [[f"{row['warning']:.0f} s", f"{row['taken']:.0f}", _share(row)] for row in found["warned"]]
    head = ["MTBF of a node", *(f"every {n} steps" for n in INTERVALS), "sqrt(2 · cost · MTBF), steps"]
    return "\n".join(
        [
            markdown_table(head, first),
            markdown_table(["lease_timeout", "hedges", "useful throughput", "hedges made"], second),
            markdown_table(["warning", "nodes taken", "useful throughput"], third),
        ]
    )


def _share(row: dict[str, Any]) -> str:
    share, least, most = row["share"], row["least"], row["most"]
    return f"{share:.1%}" if least == most else f"{share:.1%} [{least:.1%} to {most:.1%}]"


def _crashes(row: dict[str, Any]) -> str:
    """Deaths of actors, crashes of the learner, train steps repeated."""
    return f" ({row['deaths']:.0f}, {row['crashes']:.0f}, {row['repeated']:.0f})"


def main(argv: list[str] | None = None) -> int:
    parser = command("claims.failures", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few nodes that fail often, few steps: shows that it works, no more"
    )
    parser.add_argument("--histories", type=positive, default=3, metavar="N", help="runs of each point (default: 3)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures to this file")
    args: argparse.Namespace = parser.parse_args(argv)
    nodes, steps, often = QUICK if args.quick else (1000, 24, 1.0)
    found = {each.__name__: list(each(nodes, steps, args.histories, often)) for each in (checkpoints, unseen, warned)}
    if args.quick:
        sys.stdout.write(f"Nodes fail {often:g} times as often as the tables say.\n\n")
    sys.stdout.write(tables(found))
    write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
