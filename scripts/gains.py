"""Before and after training: `python -m scripts.gains RUN RUN ... [--json FILE] [--plot FILE]`.

Compares a run's first held-out answers with its last ones, as they were recorded: it answers nothing anew. Runs that
differ only in the seed share a row; the folder of an ablation stands for its finished runs. An answer is right from
`eval.right` on. Intervals are of 95 %, and p is of the test of `scripts.analysis.pairing`, over the prompts of all
runs: they speak of prompts of this kind. "each run" has the differences of the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.config.run_config import ConfigError
from areal_like.errors import UserError
from areal_like.estimates import interval
from areal_like.run.samples import HELDOUT, Kept, read

from .analysis.pairing import meaning_of_p, p_value, paired
from .console.arguments import command, new_file, picture, refuse
from .console.output import write_json

if TYPE_CHECKING:
    from .plotting.plot import Plot
    from .reporting.several import Member

Numbers = Mapping[int, float]
"""Place of a prompt in its set → its mean over the answers."""


@dataclass(frozen=True)
class Change:
    """A held-out set of one run, before and after: share of right answers and mean reward of each prompt, and the mean
    length of an answer in tokens."""

    right: tuple[Numbers, Numbers]
    reward: tuple[Numbers, Numbers]
    tokens: tuple[float, float]

    def shares(self) -> tuple[float, float]:
        """Of right answers."""
        before, after = (sum(each.values()) / len(each) for each in self.right)
        return before, after


@dataclass
class Row:
    """A setting and a held-out set: the changes of its runs."""

    setting: str
    name: str
    changes: list[Change] = field(default_factory=list)

    def sides(self, what: str) -> tuple[list[float], list[float]]:
        """Before and after: `what` (right, reward) of each prompt of all runs."""
        pairs = [getattr(change, what) for change in self.changes]
        before = [value for first, _ in pairs for value in first.values()]
        return before, [second[place] for first, second in pairs for place in first]

    def as_data(self) -> dict[str, Any]:
        sides = {what: self.sides(what) for what in ("right", "reward")}
        return {
            "setting": self.setting,
            "set": self.name,
            **{what: paired(*each)._asdict() for what, each in sides.items()},
            "intervals": {what: [interval(side) for side in each] for what, each in sides.items()},
            "runs": [change.shares() for change in self.changes],
            "tokens": [change.tokens for change in self.changes],
        }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("gains", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, or a folder of an ablation")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the table, and keep its data beside it")
    return parser.parse_args(argv)


def changes(run: Path, right: Mapping[str, float], otherwise: float) -> dict[str, Change]:
    """Set → what changed; `right`: set → least reward of a right answer. Raises ConfigError unless every prompt has
    answers of two rounds."""
    sides: tuple[dict[tuple[str, int, int], Kept], ...] = {}, {}
    for record in read(run, [HELDOUT]):
        place = record.of, record.group, record.index
        sides[0].setdefault(place, record)
        sides[1][place] = record
    before, after = sides
    if not before:
        raise ConfigError(f"{run}: it has recorded no held-out answers (run.samples_bytes, eval.prompts)")
    if once := [place for place in before if before[place].step == after[place].step]:
        raise ConfigError(f"{run}: {len(once)} held-out prompts were asked once only: the run has not ended")
    names = dict.fromkeys(name for name, _, _ in before)
    return {
        name: _change(
            [{p: record for p, record in side.items() if p[0] == name} for side in sides], right.get(name, otherwise)
        )
        for name in names
    }


def _change(sides: Sequence[Mapping[tuple[str, int, int], Kept]], right: float) -> Change:
    rights, rewards, tokens = [], [], []
    for side in sides:
        of: dict[int, list[Kept]] = defaultdict(list)
        for (_, place, _), record in side.items():
            of[place].append(record)
        rights.append({at: sum((r.reward or 0.0) >= right for r in found) / len(found) for at, found in of.items()})
        rewards.append({at: sum(r.reward or 0.0 for r in found) / len(found) for at, found in of.items()})
        tokens.append(sum(len(record.response) for record in side.values()) / len(side))
    return Change((rights[0], rights[1]), (rewards[0], rewards[1]), (tokens[0], tokens[1]))


def rows_of(members: Sequence[Member]) -> list[Row]:
    """A row per setting and held-out set. Raises ConfigError."""
    from areal_like.config import run_config as configs
    from areal_like.run.run_folder import CONFIG, SUMMARY

    rows: dict[tuple[str, str], Row] = {}
    for member in members:
        if not (member.run / SUMMARY).is_file():
            print(f"{member.run.name} is left out: it has not ended", file=sys.stderr)
            continue
        config = configs.load_resolved(member.run / CONFIG)
        setting, sets = ", ".join(member.labels.values()) or config.task["name"], configs.select(config, "eval.sets")
        right = {name: spec["right"] for name, spec in sets.items() if "right" in spec}
        for name, change in changes(member.run, right, config.eval.right).items():
            rows.setdefault((setting, name), Row(setting, name)).changes.append(change)
    if not rows:
        raise ConfigError("no run has ended")
    return list(rows.values())


def shown(rows: Sequence[Row]) -> str:
    """The table, in markdown."""
    from .analysis.intervals import markdown_table

    lines = []
    for row in rows:
        told, pair = row.as_data(), paired(*row.sides("right"))
        intervals = ("[{:.3f}, {:.3f}]".format(*each) for each in told["intervals"]["right"])
        each_run = ", ".join(f"{after - before:+.3f}" for before, after in told["runs"])
        tokens = (sum(side) / len(told["tokens"]) for side in zip(*told["tokens"], strict=True))
        lines.append([
            row.setting, row.name, pair.prompts,
            *(f"{mean:.3f} {span}" for mean, span in zip((pair.before, pair.after), intervals, strict=True)),
            f"{pair.difference:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]", each_run, pair.better, pair.worse,
            p_value(pair.p), "{before:.3f} → {after:.3f}".format(**told["reward"]), "{:.1f} → {:.1f}".format(*tokens),
        ])  # fmt: skip
    columns = ["prompts", "right before", "right after", "difference", "each run", "better", "worse", "p"]
    return markdown_table(["setting", "set", *columns, "reward", "tokens"], lines)


def plot_of(rows: Sequence[Row]) -> Plot:
    """Of one setting a row per held-out set; of several a panel per set, with a row per setting. A dot per seed."""
    from .plotting.plot import Plot, point

    panels: dict[str, dict[str, list[Any]]] = {}
    alone = len({row.setting for row in rows}) == 1
    for row in rows:
        panel = panels.setdefault("" if alone else row.name, {"before": [], "after": []})
        for side, name in enumerate(("before", "after")):
            shares = [change.shares()[side] for change in row.changes]
            panel[name].append(point(row.name if alone else row.setting, shares))
    return Plot("rows", "Right held-out answers before and after training", panels, x="share of right answers")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.plot and args.json == args.plot.with_suffix(".json"):
        refuse(f"{args.json} is where the data of the plot go: name another file for --json")
    from .reporting.several import members

    try:
        rows = rows_of(members(args.runs))
        if args.plot:
            from .plotting.drawing import keep

            keep(plot_of(rows), args.plot)
    except (ValueError, OSError, UserError) as error:
        refuse(error)
    sys.stdout.write(shown(rows))
    print(meaning_of_p(paired(*row.sides("right")) for row in rows))
    write_json(args.json, [row.as_data() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
