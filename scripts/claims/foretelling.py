"""Which number foretells a collapse? ROC over all learners of some studies, those with bad learning rates included.

At each look at a learner that has learned something and has not fallen, its signs (`lagging.SIGNS`) are held against
what comes: does its held-out reward fall later on?

    area      the chance that a look before a fall has the larger sign than one that is not (.5: no information), turned
              so that it is at least .5
    within    the same of looks under one condition only (age, mismatch, bug), so that no sign earns by telling the
              condition
    caught    share of the learners that fall which raised an alarm before; of those that stand, one in ten raises one
    first     share of the learners that fall where no other sign raised its alarm earlier
    lead      median train steps from a learner's first alarm to its fall
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from ..analysis.intervals import Estimate, markdown_table
from ..plotting.plot import Plot
from .lagging import SIGNS

LEARNED, FALL, STANDING = 0.4, 0.15, 0.05
"""Reward that counts as learned; loss of reward, below the best so far, that counts as a fall; what still stands."""
FEWEST = 5
"""Learners that fall, below which nothing is said."""
FALSE_ALARMS = 0.1
"""Share of the learners that stand which may raise an alarm, at `caught`, `first` and `lead`."""
NAMES = ("batch reward", *SIGNS)
DRAWN = ("batch reward", "kl", "ess", "chi2", "ratio_max", "entropy", "cosine")
"""As many as there are colours."""
RESAMPLES = 200
PLACES = 21
"""Points of a ROC curve."""
CurveOf = Sequence[Sequence[float]]
"""As `lagging.train` returns it."""
Span = tuple[float, float, float]
"""A number and its 95 % interval, over learners."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """A sign, whether it is large or small before a fall, and how well it tells (above). `hits`: share of the looks
    before a fall that it tells, at false alarms of 0 … 1."""

    sign: str
    before: str
    area: Span
    within: Span
    caught: float
    first: float
    lead: float
    learners: int
    fallen: int
    hits: tuple[float, ...]


def collapsed(curve: CurveOf, fall: float = FALL) -> bool:
    """Whether the reward at the end is this far below the largest on the way."""
    rewards = [entry[1] for entry in curve]
    return max(rewards) - rewards[-1] > fall


@dataclass(frozen=True, slots=True)
class Seen:
    """The looks at one learner: steps [n], signs [n, NAMES]; and the step of its first fall, None if it stands."""

    condition: str
    steps: np.ndarray
    signs: np.ndarray
    fell_at: float | None

    @property
    def falls(self) -> np.ndarray:
        return np.full(len(self.steps), self.fell_at is not None)


def looks(curve: CurveOf, condition: str = "") -> Seen | None:
    """The looks before the first fall at what has learned and stands; None without any. The last one has no future."""
    best, found, fell_at = 0.0, [], None
    for step, reward, *signs in curve:
        best = max(best, reward)
        if best >= LEARNED and reward < best - FALL:
            fell_at = float(step)
            break
        if best >= LEARNED and reward >= best - STANDING and step < curve[-1][0]:
            found.append((step, signs))
    if not found:
        return None
    known = np.nan_to_num(np.array([signs for _, signs in found], np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    return Seen(condition, np.array([step for step, _ in found], np.float64), known, fell_at)


def auc(falls: np.ndarray, values: np.ndarray) -> float:
    """Area under the ROC curve of `values` [N] for `falls` bool [N]; NaN with one kind only."""
    yes = int(falls.sum())
    no = len(falls) - yes
    if not yes or not no:
        return float("nan")
    return float((rankdata(values)[falls].sum() - yes * (yes + 1) / 2) / (yes * no))


def auc_within(falls: np.ndarray, values: np.ndarray, groups: np.ndarray) -> float:
    """The area over pairs of one group alone, groups int [N]; NaN without such pairs."""
    total, pairs = 0.0, 0
    for group in np.unique(groups):
        here = groups == group
        weight = int(falls[here].sum()) * int((~falls[here]).sum())
        if weight:
            total, pairs = total + weight * auc(falls[here], values[here]), pairs + weight
    return total / pairs if pairs else float("nan")


def foretold(curves: Iterable[tuple[str, CurveOf]]) -> list[Foretold]:
    """Every sign, the best first, from (condition, curve) of learners; none if too few fall. A learner that is in
    several studies counts once. Learners are resampled, not looks."""
    once = {(condition, repr(curve)): curve for condition, curve in curves}
    learners = [seen for (condition, _), curve in once.items() if (seen := looks(curve, condition))]
    fallen = sum(one.fell_at is not None for one in learners)
    if fallen < FEWEST or fallen == len(learners):
        return []
    falls = np.concatenate([one.falls for one in learners])
    signs = np.concatenate([one.signs for one in learners])
    turns = np.array([1.0 if auc(falls, column) >= 0.5 else -1.0 for column in signs.T])
    areas = _areas(learners, falls, signs * turns)
    alarms = _alarms(learners, turns)
    earliest = np.nanmin(np.where(np.isnan(alarms), np.inf, alarms), axis=1)
    fell = np.array([one.fell_at for one in learners if one.fell_at is not None])
    found = []
    for place, name in enumerate(NAMES):
        mine = alarms[:, place]
        caught = ~np.isnan(mine)
        lead = float(np.median((fell - mine)[caught])) if caught.any() else float("nan")
        share = float((caught & (mine == earliest)).mean())
        hits = _hits(falls, (signs * turns)[:, place])
        area, within = (_span(values) for values in areas[:, :, place])
        before = "large" if turns[place] > 0 else "small"
        counts = len(learners), fallen
        found.append(Foretold(name, before, area, within, float(caught.mean()), share, lead, *counts, hits))
    return sorted(found, key=lambda one: -one.area[0])


def _span(values: Sequence[float]) -> Span:
    mean, low, high = (float(value) for value in values)
    return mean, low, high


def _areas(learners: Sequence[Seen], falls: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Area and area within, each with low and high: [2, 3, NAMES]."""
    names = list(dict.fromkeys(one.condition for one in learners))
    groups = np.concatenate([np.full(len(one.falls), names.index(one.condition)) for one in learners])
    ends = np.cumsum([len(one.falls) for one in learners])
    rows = [np.arange(end - len(one.falls), end) for end, one in zip(ends, learners, strict=True)]
    draws = np.random.default_rng(0).integers(len(learners), size=(RESAMPLES, len(learners)))
    samples = [np.arange(len(falls)), *(np.concatenate([rows[i] for i in draw]) for draw in draws)]
    both = np.array([
        [[auc(falls[s], column[s]), auc_within(falls[s], column[s], groups[s])] for column in signs.T] for s in samples
    ])  # fmt: skip
    low, high = np.nanquantile(both[1:], [0.025, 0.975], axis=0)
    return np.stack([both[0], low, high]).transpose(2, 0, 1)


def _alarms(learners: Sequence[Seen], turns: np.ndarray) -> np.ndarray:
    """Step of the first alarm of each learner that falls, by sign: [learners, NAMES]; NaN for none."""
    standing = np.array([(one.signs * turns).max(0) for one in learners if one.fell_at is None])
    limits = np.quantile(standing, 1 - FALSE_ALARMS, axis=0, method="higher")
    found = []
    for one in learners:
        if one.fell_at is not None:
            raised = one.signs * turns > limits
            found.append(np.where(raised.any(0), one.steps[raised.argmax(0)], np.nan))
    return np.array(found, np.float64)


def _hits(falls: np.ndarray, values: np.ndarray) -> tuple[float, ...]:
    """Share of looks before a fall above the limit that so many of the others pass."""
    order = np.argsort(-values, kind="stable")
    told, wrong = np.cumsum(falls[order]) / falls.sum(), np.cumsum(~falls[order]) / (~falls).sum()
    last = np.append(np.diff(values[order]) != 0, True)  # equal values pass a limit together
    places = np.linspace(0, 1, PLACES)
    return tuple(np.interp(places, np.append(0, wrong[last]), np.append(0, told[last])).round(4).tolist())


# What is written

ENDS = ("", " low", " high")
COLUMNS = (
    *("sign", "before", *(f"area{end}" for end in ENDS), *(f"within{end}" for end in ENDS)),
    *("caught", "first", "lead", "learners", "fallen"),
    *(f"hits {place / (PLACES - 1):.2f}" for place in range(PLACES)),
)


def write_csv(path: Path, found: Sequence[Foretold]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in found:
            numbers = (*one.area, *one.within, one.caught, one.first, one.lead)
            rounded = (f"{number:.4g}" for number in numbers)
            writer.writerow([one.sign, one.before, *rounded, one.learners, one.fallen, *one.hits])


def read_csv(path: Path) -> list[Foretold]:
    """Raises OSError, ValueError."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    if tuple(head) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}; got {', '.join(head)}")
    found = []
    for sign, before, *cells in rows:
        numbers, hits = [float(cell) for cell in cells[:9]], tuple(float(cell) for cell in cells[11:])
        area, within, (caught, first, lead) = _span(numbers[:3]), _span(numbers[3:6]), numbers[6:]
        counts = int(cells[9]), int(cells[10])
        found.append(Foretold(sign, before, area, within, caught, first, lead, *counts, hits))
    return found


def table(found: Sequence[Foretold]) -> str:
    if not found:
        return "Too few learners fell to say what foretells it.\n"
    rows = []
    for one in found:
        spans = (Estimate(*span, one.learners, one.learners).text(2) for span in (one.area, one.within))
        rows.append([one.sign, one.before, *spans, f"{one.caught:.2f}", f"{one.first:.2f}", f"{one.lead:.0f}"])
    head = ["sign", "before a fall it is", "area under the ROC curve", "within a condition", "caught", "first", "lead"]
    return markdown_table(head, rows)


def figure(found: Sequence[Foretold], title: str) -> Plot:
    """The ROC curves of looks, of some signs."""
    places = np.linspace(0, 1, PLACES).round(4).tolist()
    panel = {one.sign: [(places, list(one.hits))] for one in found if one.sign in DRAWN}
    note = f"{found[0].learners} small learners that had learned something, {found[0].fallen} of them fall later"
    x, y = "false alarms, share of the looks at what stands", "share of the looks before a fall that it tells"
    return Plot("curves", title, {"": panel}, x=x, y=y, note=note)
