"""What samplers and filters prefer, for `scripts.ledger`: draws and groups by difficulty, against uniform draws.

A prompt's difficulty when it is drawn follows from the results that the run had recorded by then, as a sampler sees
them (`buffer.results`); new: there was none. Uniform: what the same draws would have been if each prompt with a result
were equally likely. A group's own difficulty is that of its rewards; it shows what a filter leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.table import Table

from buffer.events import Admit
from buffer.results import CLASSES, EASY, HARD, NEW, RIGHT, Results, classes, pass_rates, rate_of
from buffer.store import Entry

from ..console import output

KNOWN = (HARD, RIGHT, EASY)
IN_WORDS = {HARD: "hard (pass rate up to .2)", RIGHT: "right", EASY: "easy (from .8)", NEW: "new (no result yet)"}


class Difficulty:
    """Counts of one task's groups, or of all. `drawn`, `trained`: groups by the difficulty that was known at the draw.
    `uniform`: draws of prompts with a result, if they had been uniform. `rolled_out`, `kept`: groups, and those of them
    that were trained, by their own difficulty. `filtered`: groups that a filter left out. `prompts`: row → draws."""

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        self.uniform: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.rolled_out: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.prompts: Counter[int] = Counter()
        self.filtered = 0

    def rows(self) -> list[dict[str, Any]]:
        """A row per difficulty, as plain data."""
        return [
            {
                "difficulty": name,
                **{kind: getattr(self, kind)[name] for kind in ("drawn", "trained", "rolled_out", "kept")},
                "uniform": round(float(self.uniform[name]), 2) if name in KNOWN else None,
            }
            for name in CLASSES
        ]

    @property
    def is_biased(self) -> bool:
        """Was there a choice: a prompt that was drawn again, or a group that a filter left out?"""
        return self.drawn.total() > self.drawn[NEW] or self.filtered > 0


class Tally:
    """Counts admissions and fates, for all groups ("") and by task of a mixture, from events in order."""

    def __init__(self, results: Results):
        self.of: dict[str, Difficulty] = {"": Difficulty()}
        self._results = results
        self._drawn: dict[int, str] = {}
        self._known: dict[str, tuple[dict[int, int], np.ndarray, np.ndarray]] = {}

    def opened(self) -> None:
        """A batch is about to be opened: results become visible."""
        self._known = {}

    def admitted(self, event: Admit) -> None:
        """Before the event is applied."""
        places, kinds, shares = self._known_of(event.task)
        place = places.get(event.row)
        kind = NEW if place is None else CLASSES[kinds[place]]
        self._drawn[event.id] = kind
        for task in {"", event.task}:
            found = self.of.setdefault(task, Difficulty())
            found.drawn[kind] += 1
            found.prompts[event.row] += 1
            if kind != NEW:
                for name, share in zip(KNOWN, shares, strict=True):
                    found.uniform[name] += share

    def left(self, entry: Entry, trained: bool, filtered: bool) -> None:
        """The group's fate is known."""
        kind = self._drawn.pop(entry.id, None)
        own = CLASSES[classes(np.array([rate_of(entry.head.rewards)]))[0]] if entry.head else ""
        for task in {"", entry.task}:
            found = self.of.setdefault(task, Difficulty())
            found.filtered += filtered
            if kind and trained:
                found.trained[kind] += 1
            if own:
                found.rolled_out[own] += 1
                found.kept[own] += trained

    def _known_of(self, task: str) -> tuple[dict[int, int], np.ndarray, np.ndarray]:
        """Rows with a result → place; their classes; the share of each of `KNOWN`."""
        if task not in self._known:
            known = self._results.known(task, 0)
            kinds = classes(pass_rates(known))
            measured = np.flatnonzero(kinds != CLASSES.index(NEW))
            counts = np.bincount(kinds[measured], minlength=len(KNOWN)) / max(1, len(measured))
            rows = known.rows[measured].tolist()
            self._known[task] = dict(zip(rows, range(len(rows)), strict=True)), kinds[measured], counts
        return self._known[task]


def drawn_table(found: Difficulty, title: str) -> Table:
    """Draws by what was known of the prompt."""
    made = output.table(title, "known when drawn", "drawn", "share", "uniform", "drawn / uniform", "trained")
    again = sum(found.drawn[name] for name in KNOWN)
    for name in CLASSES:
        cells = ["-"] * 3
        if again and name in KNOWN:
            uniform = found.uniform[name]
            cells = [f"{found.drawn[name] / again:.1%}", f"{uniform / again:.1%}"]
            cells.append(f"{found.drawn[name] / uniform:.2f}" if uniform else "-")
        made.add_row(IN_WORDS[name], str(found.drawn[name]), *cells, str(found.trained[name]))
    return made


def kept_table(found: Difficulty, title: str) -> Table:
    """Groups that were rolled out, by their own rewards, and how many of them were trained."""
    made = output.table(title, "the group's own", "rolled out", "share", "trained", "share", "trained / rolled out")
    for name in KNOWN:
        out, kept = found.rolled_out[name], found.kept[name]
        shares = f"{out / max(1, found.rolled_out.total()):.1%}", f"{kept / max(1, found.kept.total()):.1%}"
        made.add_row(IN_WORDS[name], str(out), shares[0], str(kept), shares[1], f"{kept / out:.2f}" if out else "-")
    return made


def concentration(found: Difficulty) -> str:
    """How unequally prompts were drawn, in words."""
    counts = sorted(found.prompts.values(), reverse=True)
    tenth = counts[: -(-len(counts) // 10)]
    return (
        f"{len(counts)} prompts were drawn {sum(counts)} times, one of them {counts[0]} times; "
        f"the tenth that was drawn most has {sum(tenth) / sum(counts):.1%} of the draws"
    )


def tables(of: Mapping[str, Difficulty]) -> Iterable[Table | str]:
    """What there is to show: nothing where no prompt was chosen and no group left out."""
    for task, found in sorted(of.items()):
        if found.is_biased:
            name = f" of {task}" if task else ""
            if found.drawn.total() > found.drawn[NEW]:
                yield drawn_table(found, f"draws{name} by difficulty")
            yield kept_table(found, f"groups{name} by difficulty")
            yield concentration(found)
