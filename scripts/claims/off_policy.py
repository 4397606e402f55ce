"""Studies off policy: which loss and which correction hold when actors are inexact, stale, or broken.

`python -m scripts.claims.off_policy STUDY [--quick] [--out FOLDER] [--publish] [--model FOLDER]`

| study | question |
|---|---|
| mismatch | number formats and noise of actors × corrections: reward, collapses, which metric foretells them |
| offpolicy | age of the batches × losses |
| grid | age × mismatch × losses and their corrections, each at its own rate and bonus |
| corrections | age and mismatch together × corrections, of decoupled PPO, REINFORCE and DG |
| dg_fair | bonus, own knob and rate of each loss tuned on the same budget: fresh, stale, and with a broken actor |
| successes | behind silently broken actors: is it DG, or that successes alone are trained? |
| pretrained | age and mismatch for a pretrained model on sums of reasoning_gym: fewer methods, rates and seeds |
| collapse | which sign sees a fall first, over the learners of all of these that are kept in the folder |
| page | nothing is trained: tables and pictures of docs/off-policy.md from the published `results.csv` |

`page` also makes tables of docs/results.md: rewards against staleness, `claims.cut_responses` and
`claims.curriculum`, from the numbers of runs in docs/data.

Hundreds of small learners train side by side (`lagging`), a seed of each method from the same start on the same draws.
Every method is tuned under each condition, on the same number of candidates and on seeds of its own. Tables show means
of fresh seeds with 95 % bootstrap intervals, and over all conditions interquartile means with stratified ones
(`scripts.analysis.aggregates`). Differences are paired by seed: a permutation test, with Holm's correction. "At equal
compute" reads each learner where it has spent what the cheapest method spends in all (`lagging.passes`). Killed, the
command continues with the condition that it was at. `--conditions NAME ...` measures some conditions; those that have
no rows yet are left out of tables and pictures. `--publish` copies `results.csv` to docs/data/off_policy, from which
`page` makes everything that is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ..pretrained import FOLDER
from .studies import argument_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = argument_parser(__doc__, "off_policy")
    studies = ("mismatch", "offpolicy", "corrections", "dg_fair", "successes", "grid", "pretrained")
    parser.add_argument("study", choices=(*studies, "collapse", "page"))
    parser.add_argument("--publish", action="store_true", help="keep the results for the page of the documentation")
    only = "measure these conditions alone; of the others the published rows stay"
    parser.add_argument("--conditions", nargs="+", metavar="NAME", help=only)
    parser.add_argument("--model", type=Path, default=Path(FOLDER), help=f"of `pretrained` (default: {FOLDER})")
    OPTIONS = parser.parse_args()

from areal_like.errors import UserError
from areal_like.places import REPOSITORY

from ..ablation.results import of_file
from ..ablation.study import load
from ..plotting.drawing import keep, picture
from ..plotting.plot import Plot
from . import arithmetic, curriculum, cut_responses, foretelling, kept
from .designs import DESIGNS, Design
from .found import Found, numbers_of, read_csv, write_csv
from .lagging import GATED, Actor, Policy, train
from .page import by_place, refreshed
from .studies import Measure, Row, Study, best_rates, one_by_one, prepare, tell

COLLAPSE, PAGE = "collapse", "page"
OTHERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "cut_responses": cut_responses.tables,
    "curriculum": curriculum.tables,
}
"""Studies whose tables are in docs/results.md, made from docs/data/claims."""
Tables = dict[str, dict[str, str]]
"""Study → title → table."""
RESULTS, DATA = Path("docs/data/off_policy"), Path("docs/data")
ABLATIONS = DATA / "ablation"
"""Results of `configs/ablation`, of the whole machine."""
WHOLE_MACHINE = Path("docs/results.md")
PICTURES, DOCUMENT = Path("docs/plots"), Path("docs/off-policy.md")
COLLAPSE_TITLE = "Before a fall the distance from the behaviour policy is large; no sign is an alarm to rely on"


def measured(design: Design, options: argparse.Namespace) -> list[Row]:
    """Rows of tuning and of fresh seeds, of every condition; `family` is a method's, or that of its variants."""
    rows: list[Row] = []
    folder = options.out / options.study
    methods = {name: method for family in design.families.values() for name, method in family.items()}
    policy: Policy = arithmetic.pretrained(options.model, folder) if design.pretrained else GATED
    learner = partial(train, methods=methods, policy=policy, steps=design.steps, every=design.every, task=design.task)
    for label, actor in reversed(wanted(design, options.conditions).items()):  # the hardest first
        measure: Measure = partial(learner, actor=actor)
        settings = {"actor": repr(actor), "methods": repr(methods), "steps": design.steps, "every": design.every}
        if design.pretrained:
            settings |= {"task": repr(design.task), "questions": arithmetic.TRAINED, "layers": arithmetic.UPPER}
            alike = {name: said for name, said in settings.items() if name != "methods"}
            measure = one_by_one(measure, folder / "cells" / label, alike, methods)
        tuning = Study(folder, tuple(methods), design.rates, design.tuning, (), tuned_by="error")
        tried = tuning.run(f"{label}, tuning", measure, settings)
        rates = best_rates(tried, "error")
        chosen = {family: best_variant(tried, names, rates) for family, names in design.families.items()}
        fresh = replace(tuning, algorithms=tuple(chosen.values()), fresh_seeds=design.fresh)
        of = {name: family for family, names in design.families.items() for name in names}
        rows += [row | {"condition": label, "family": of[row["algorithm"]]} for row in tried]
        families = {name: family for family, name in chosen.items()}
        for row in fresh.run(label, measure, settings, {name: rates[name] for name in chosen.values()}):
            rows.append(row | {"family": families[row["algorithm"]]})
    return rows


def wanted(design: Design, names: Sequence[str] | None) -> dict[str, Actor]:
    """The conditions of these names, or all. Raises UserError."""
    if unknown := [name for name in names or () if name not in design.conditions]:
        raise UserError(f"--conditions {unknown[0]!r}: the study has {', '.join(map(repr, design.conditions))}")
    return {name: actor for name, actor in design.conditions.items() if not names or name in names}


def with_published(rows: Sequence[Row], published: Path) -> list[Row]:
    """And the published rows of other conditions. Raises OSError, ValueError."""
    here = {row["condition"] for row in rows}
    return [*rows, *(row for row in read_csv(published) if row["condition"] not in here)]


def best_variant(tried: Sequence[Row], names: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    """Of the methods `names` that with the least mean error in tuning, at its best rate; of equal ones the first."""

    def error(name: str) -> float:
        return fmean(r["error"] for r in tried if r["algorithm"] == name and r["rate"] == rates[name])

    return min(names, key=error)


def learners(folder: Path) -> Iterator[tuple[str, list[list[float]]]]:
    """(what its actors were like, curve) of every learner of every study that is kept there."""
    for file in sorted(folder.glob("*/*.json")):
        study = json.loads(file.read_text(encoding="utf-8"))
        for row in study["rows"]:
            yield study["settings"]["actor"], row["curve"]


def report(study: str, results: Path) -> tuple[dict[str, str], dict[str, Plot]]:
    """Tables by title and pictures by name, of a study's `results.csv`. Raises OSError, ValueError."""
    if study == COLLAPSE:
        signs = foretelling.read_csv(results)
        tables = {"What sees a collapse": foretelling.table(signs)}
        return tables, {COLLAPSE: foretelling.figure(signs, COLLAPSE_TITLE)} if signs else {}
    found = Found(DESIGNS[study], read_csv(results))
    return found.tables(), {study: found.figure(), f"{study}-profiles": found.profiles()}


def page(root: Path) -> None:
    """Write tables and pictures of the published studies anew. Raises OSError, ValueError."""
    for place, made in ((DOCUMENT, published), (WHOLE_MACHINE, of_whole_machine)):
        document = root / place
        text = document.read_text(encoding="utf-8")
        tables, plots = made(root, text)
        for name, plot in plots.items():
            (root / DATA / f"{name}.json").write_text(plot.as_json(), encoding="utf-8")
            picture(plot, root / PICTURES / f"{name}.png")
        document.write_text(refreshed(text, tables), encoding="utf-8")


def published(root: Path, text: str) -> tuple[Tables, dict[str, Plot]]:
    """Of the studies whose results are kept: study → title → table, and the plots that the text of a page shows.
    Raises OSError, ValueError."""
    tables, plots = of_ablations(root, text)
    for results in sorted((root / RESULTS).glob("*.csv")):
        tables[results.stem], drawn = report(results.stem, results)
        plots |= drawn
    return tables, {name: plot for name, plot in plots.items() if f"(plots/{name}.png)" in text}


def of_ablations(root: Path, text: str) -> tuple[Tables, dict[str, Plot]]:
    """Of the studies of `configs/ablation` that a page shows: called `ablation-NAME`, as is the plot of their first
    measure. Raises OSError, ValueError."""
    tables, plots = Tables(), dict[str, Plot]()
    for results in sorted((root / ABLATIONS).glob("*.csv")):
        name = f"ablation-{results.stem}"
        if f"<!-- table: {name}," in text:
            study = load(root / "configs" / "ablation" / f"{results.stem}.yaml", check=False)
            tables[name], drawn = of_file(study, results)
            plots[name] = next(plot for file, plot in drawn.items() if file.startswith("measure-"))
    return tables, {name: plot for name, plot in plots.items() if f"(plots/{name}.png)" in text}


def of_whole_machine(root: Path, text: str) -> tuple[Tables, dict[str, Plot]]:
    """The tables of docs/results.md whose runs' numbers are kept, with their plots (`configs/ablation/staleness.yaml`)
    or as a `results.csv` (`OTHERS`, `of_ablations`). Raises OSError, ValueError."""
    files = {name: root / DATA / f"{name}.json" for name in ("staleness-reward", "staleness-mean")}
    kept_plots = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    found = {name: {"By age": by_place(plot, "η")} for name, plot in kept_plots.items()}
    found |= {name: made(root / kept.PUBLISHED / f"{name}.csv") for name, made in OTHERS.items()}
    tables, plots = of_ablations(root, text)
    return found | tables, plots


def main(options: argparse.Namespace) -> None:
    if options.study == PAGE:
        return page(REPOSITORY)
    folder = options.out / options.study
    results = folder / "results.csv"
    prepare()
    if options.study == COLLAPSE:
        foretelling.write_csv(results, foretelling.foretold(learners(options.out)))
    else:
        design = DESIGNS[options.study]
        if options.quick:
            design = replace(design, steps=20, every=5, tuning=design.tuning[:1], fresh=design.fresh[:2])
        methods = {name: method for family in design.families.values() for name, method in family.items()}
        rows = numbers_of(measured(design, options), methods)
        if options.conditions:
            rows = with_published(rows, REPOSITORY / RESULTS / f"{options.study}.csv")
        write_csv(results, rows)
    tables, plots = report(options.study, results)
    tell(folder, *(f"{title}\n\n{table}" for title, table in tables.items()))
    for name, plot in plots.items():
        keep(plot, options.out / f"{name}.png")
    if options.publish:
        (REPOSITORY / RESULTS).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(results, REPOSITORY / RESULTS / f"{options.study}.csv")


if __name__ == "__main__":
    main(OPTIONS)
