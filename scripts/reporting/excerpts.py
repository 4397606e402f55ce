"""Which samples a page shows: spread over the run, with the best and the worst, within a number of bytes.

Sample files may be many times larger than a page. They are read twice: to choose, and to take the chosen ones.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.run.samples import DROPPED, HELDOUT, TRAINED, Fate, Kept, read

from ..samples import Texts

PER_GROUP = 4
"""Samples of a train step that are shown: the best, the worst, and others between them."""
ROWS = 8
"""Held-out prompts shown at every evaluation; the last evaluation shows four times as many."""
MOST_TOKENS = 1200
"""Most tokens shown of a response: a longer one loses its middle."""
MOST_LETTERS = 4000
"""Most characters shown of a prompt, likewise."""
WINDOW = 4
"""Tokens that are decoded together: the text of one may depend on those before it."""
MOST = 2000
"""Most excerpts of a run."""


class Mark(NamedTuple):
    """A sample to choose. `place`: of the sample in its file."""

    place: int
    group: int
    reward: float
    why: str


def excerpts(run: Path, texts: Texts, most_bytes: int) -> list[dict[str, Any]]:
    trained, heldout, dropped = (list(_chosen(fate, run)) for fate in (TRAINED, HELDOUT, DROPPED))
    fates: tuple[Fate, ...] = (TRAINED, TRAINED, HELDOUT, DROPPED)
    rows = zip_longest(trained[::2], trained[1::2], heldout, dropped)  # by importance
    turns = [(fate, mark.place) for row in rows for fate, mark in zip(fates, row, strict=True) if mark][:MOST]
    wanted, made = set(turns), dict[tuple[Fate, int], dict[str, Any]]()
    for fate in (TRAINED, HELDOUT, DROPPED):
        for place, record in enumerate(read(run, [fate])):
            if (fate, place) in wanted:
                made[fate, place] = excerpt(record, texts)
    ends = [*accumulate(len(json.dumps(made.get(key))) for key in turns)]
    found = {key for key, end in zip(turns, ends, strict=True) if end <= most_bytes} or set(turns[:1])
    return [made[key] for key in sorted(found & made.keys())]


def _chosen(fate: Fate, run: Path) -> Iterator[Mark]:
    """Samples of a file, the most telling first."""
    by_step: dict[int, list[Mark]] = {}
    for place, record in enumerate(read(run, [fate])):
        mark = Mark(place, record.group, record.reward or 0.0, record.why.partition(":")[0])
        by_step.setdefault(record.step, []).append(mark)
    steps = [by_step[step] for step in sorted(by_step)]
    first = {mark.why: mark for marks in steps for mark in reversed(marks)} if fate == DROPPED else {}
    yield from first.values()  # one of each reason, however rare
    for marks in spread(steps):
        if fate == HELDOUT:  # the same prompts at each evaluation
            yield from sorted(marks, key=lambda mark: mark.group)[: ROWS * (4 if marks is steps[-1] else 1)]
        else:
            best = spread(sorted(marks, key=lambda mark: mark.reward))[:PER_GROUP]
            yield from (mark for mark in best if first.get(mark.why) is not mark)


def spread(items: Sequence[Any]) -> list[Any]:
    """The last, the first, and then always the one farthest from all before, so that any beginning is spread evenly."""
    count = len(items)
    if count < 2:
        return list(items)
    bits = (count - 1).bit_length()
    middle = sorted(range(1, count - 1), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [items[place] for place in (count - 1, 0, *middle)]


def excerpt(record: Kept, texts: Texts) -> dict[str, Any]:
    """A sample as the page has it. `tokens`: pieces of text; `versions` ([version, count]), `numbers` and `masked` go
    with them. `gap`: [tokens before it, tokens left out]."""
    response, half = record.response, MOST_TOKENS // 2
    places, gap, shown = list(range(len(response))), None, [response]
    if len(places) > MOST_TOKENS:
        gap, places = [half, len(places) - 2 * half], [*places[:half], *places[-half:]]
        shown = [response[:half], response[-half:]]
    made_by = [version for version, count in record.runs for _ in range(count)]
    made_by += [record.version] * (len(response) - len(made_by))
    masked, digits = set(record.masked), lambda value: None if value is None else round(value, 3)
    names = ("fate", "step", "version", "group", "index", "finish", "why", "actor", "staleness")
    return {
        **{name: getattr(record, name) for name in names},
        "reward": None if record.reward is None else short(record.reward),
        "length": len(response),
        "cut": record.finish == "length" and texts.stops,
        "prompt": _without_middle(texts.prompt(record)),
        "wanted": _without_middle(texts.wanted(record)),
        "tokens": [piece for part in shown for piece in pieces(part, texts)],
        "versions": [[version, len(list(run))] for version, run in groupby(made_by[place] for place in places)],
        "masked": [at for at, place in enumerate(places) if place in masked],
        "numbers": {name: [digits(values[place]) for place in places] for name, values in record.numbers.items()},
        "gap": gap,
        "parts": {name: short(part) for name, part in record.parts.items()},
        "turns": [[at, short(earned)] for at, earned in record.turn_rewards],
    }


def short(value: float) -> float | None:
    """With five significant digits; None for what JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _without_middle(text: str) -> str:
    half = MOST_LETTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n… {len(text) - 2 * half} letters …\n{text[-half:]}"


def pieces(tokens: Sequence[int], texts: Texts) -> list[str]:
    """The text that each token adds. One that ends within a letter adds nothing; the next whole one adds all."""
    found, done = [], 0
    for end in range(1, len(tokens) + 1):
        begin = max(0, done - WINDOW)
        before, now = texts.of(tokens[begin:done]), texts.of(tokens[begin:end])
        if now.endswith("\ufffd") and end < len(tokens) and end - done < WINDOW:
            found.append("")
        else:
            found.append(now[len(before) :] if now.startswith(before) else texts.of(tokens[done:end]))
            done = end
    return found
