"""Simulate a run in virtual time: `python -m scripts.simulate CONFIG [key=value ...] [--costs FILE] [--run FOLDER]`.

The buffer is the production code (admission, scheduler, staleness, evaluation); actors and learner are modelled. What
they cost comes from the config where engine and learner are timed, else from `--costs`. Prints what the run would come
to; `--run` writes a run folder that `scripts.timeline`, `scripts.compare` and `scripts.report` read. `--against RUN`
compares with a real run of the same config, or with one that was simulated. `--histories N` simulates N runs that
differ as real ones do, by jitter and failures, and prints mean, least and most of each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.run.run_folder import CONFIG, SUMMARY
from areal_like.wire.link import BusError
from buffer.checks import RolloutsFail

from .console.arguments import command, interrupted, new_file, positive, refuse
from .console.output import console, table, write_json
from .simulation import results, roofline
from .simulation.costs import Costs
from .simulation.run import Outcome, Simulation, Stuck


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("simulate", __doc__)
    parser.add_argument("config", help="a yaml file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="what things cost (default: the timed parts' own)")
    parser.add_argument(
        "--hardware", choices=roofline.GPUS, help="costs by public figures; of --costs only the lengths"
    )
    parser.add_argument(
        "--gpus-per-actor", type=positive, default=1, metavar="N", help="of one engine, with --hardware (default: 1)"
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="write a run folder: metrics, spans, summary")
    parser.add_argument("--against", type=Path, metavar="RUN", help="compare with this run's folder")
    parser.add_argument(
        "--histories", type=positive, default=1, metavar="N", help="runs that differ in what chance decides"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures to this file")
    return parser.parse_intermixed_args(argv)


def _terminated(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def whole_folder(folder: Path | None) -> Iterator[Path | None]:
    """A place beside the folder, which is renamed to it at the end: nothing is left of what fails or is interrupted
    (SIGTERM, too). Raises FileExistsError for a folder that is there."""
    if folder is None:
        yield None
        return
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
            made = Path(place) / folder.name
            made.mkdir()
            yield made
            made.rename(folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def simulate(config: Config, cost: Costs, histories: int, run: Path | None) -> list[Outcome]:
    """The first history writes the run folder, if one is named."""
    with whole_folder(run) as folder:
        outcomes = [Simulation(config, cost, None if number else folder, number).run() for number in range(histories)]
        if folder:
            configs.save(config, folder / CONFIG)
            (folder / SUMMARY).write_text(json.dumps(results.summary(outcomes[0]), indent=2) + "\n")
    return outcomes


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        return _main(args)
    except KeyboardInterrupt:
        return interrupted("nothing is kept")


def _main(args: argparse.Namespace) -> int:
    out = console()
    try:
        config = configs.load([args.config, *args.overrides])
        if args.gpus_per_actor > 1 and not args.hardware:
            raise ConfigError("--gpus-per-actor: a file has the costs of one engine as it is. Set --hardware, too")
        cost = roofline.known(config, args.costs, args.hardware, args.gpus_per_actor)
        measured = results.of_run(args.against) if args.against else None
        begin = time.perf_counter()
        outcomes = simulate(config, cost, args.histories, args.run)
    except (BusError, ConfigError, UserError, OSError, ValueError, RolloutsFail, Stuck) as error:
        refuse(error)
    several = [results.figures(outcome) for outcome in outcomes]
    found = {name: mean(each[name] for each in several) for name in several[0]}
    columns = ["mean", "least", "most"] if args.histories > 1 else ["simulated"]
    rows = table(f"simulated: costs from {cost.source}", "", *columns, *(["measured", "error"] if measured else []))
    for name, value in found.items():
        cells = [results.shown(name, value)]
        if args.histories > 1:
            figures = [each[name] for each in several]
            cells += [results.shown(name, min(figures)), results.shown(name, max(figures))]
        if measured:
            there = measured.get(name)
            cells += ["", ""] if there is None else [results.shown(name, there), results.error(name, value, there)]
        rows.add_row(name, *cells)
    out.print(rows)
    seconds = time.perf_counter() - begin
    run, events, turns = (sum(getattr(each, name) for each in outcomes) for name in ("seconds", "events", "turns"))
    out.print(f"{run:.1f} s of the run took {seconds:.1f} s: {events} events, {turns} turns")
    told = found if args.histories == 1 else {"mean": found, "histories": several}
    write_json(args.json, told if measured is None else {"simulated": told, "measured": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
