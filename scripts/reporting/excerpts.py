"""Which samples a page shows: spread over the run, with the best and the worst, within a number of bytes.

Sample files may have many times the bytes that a page may have. They are read twice: once to choose, once to take what
was chosen. Each excerpt has its tokens as pieces of text, with the numbers that the learner kept of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.run.samples import DROPPED, HELDOUT, TRAINED, Fate, Kept, read

from ..samples import Numbers, Texts
from .series import short

PER_GROUP = 4
"""Samples of a group that are shown: the best, the worst, and others between them."""
ROWS = 8
"""Held-out prompts shown at every evaluation; the last evaluation shows four times as many."""
MOST_TOKENS = 1200
"""Most tokens shown of a response: a longer one loses its middle."""
MOST_LETTERS = 4000
"""Most characters shown of a prompt, likewise."""
MOST_CALLS, MOST_OF_CALL = 40, 600
"""Tool calls of a sample, and letters of the arguments and of the result of each."""
WINDOW = 4
"""Tokens that are decoded together: the text of one may depend on those before it."""
LEAST_BYTES = 300
"""Fewest bytes of an excerpt: bounds how many are looked at."""
MOST = 2000
"""Most excerpts of a run."""
Excerpt = dict[str, Any]


class Mark(NamedTuple):
    """What the choice depends on."""

    place: int
    step: int
    group: int
    reward: float
    why: str = ""


def excerpts(run: Path, texts: Texts | Numbers, most_bytes: int) -> list[Excerpt]:
    """The excerpts of a run, in the order of the files."""
    chosen = {fate: list(_chosen(fate, run)) for fate in (TRAINED, HELDOUT, DROPPED)}
    in_turn = [(fate, mark.place) for fate, mark in _in_turn(chosen)]
    in_turn = in_turn[: min(MOST, most_bytes // LEAST_BYTES + 1)]
    made = _made(run, texts, in_turn)
    found: dict[tuple[Fate, int], Excerpt] = {}
    used = 0
    for key in in_turn:
        if key in made:
            used += len(json.dumps(made[key]))
            if used > most_bytes and found:
                break
            found[key] = made[key]
    return [found[key] for key in sorted(found)]


def _in_turn(chosen: dict[Fate, list[Mark]]) -> Iterator[tuple[Fate, Mark]]:
    """The marks by importance: two trained samples for each held-out answer and each dropped sample."""
    trained = chosen[TRAINED]
    columns = [trained[::2], trained[1::2], chosen[HELDOUT], chosen[DROPPED]]
    fates: list[Fate] = [TRAINED, TRAINED, HELDOUT, DROPPED]
    for row in zip_longest(*columns):
        yield from ((fate, mark) for fate, mark in zip(fates, row, strict=True) if mark)


def _chosen(fate: Fate, run: Path) -> Iterator[Mark]:
    """Samples of a file, the most telling first."""
    by_step: dict[int, list[Mark]] = {}
    for place, record in enumerate(read(run, [fate])):
        mark = Mark(place, record.step, record.group, record.reward or 0.0, record.why.partition(":")[0])
        by_step.setdefault(record.step, []).append(mark)
    steps = [by_step[step] for step in sorted(by_step)]
    if not steps:
        return
    rounds = [_of_step(fate, marks, last=marks is steps[-1]) for marks in spread(steps)]
    first = {mark.why: mark for marks in steps for mark in reversed(marks)} if fate == DROPPED else {}
    yield from first.values()  # one of each reason, however rare
    yield from (mark for mark in chain.from_iterable(rounds) if first.get(mark.why) is not mark)


def _of_step(fate: Fate, marks: list[Mark], last: bool) -> list[Mark]:
    if fate == HELDOUT:  # the same prompts at each evaluation
        return sorted(marks, key=lambda mark: mark.group)[: ROWS * (4 if last else 1)]
    ranked = sorted(marks, key=lambda mark: mark.reward)
    return [ranked[place] for place in _ends_first(len(ranked))][:PER_GROUP]


def _ends_first(count: int) -> list[int]:
    """The places of a ranking: last, first, then what halves the gaps."""
    return spread(range(count))


def spread(items: Sequence[Any]) -> list[Any]:
    """The last, the first, and then always the one farthest from all before, so that any beginning is spread evenly."""
    count = len(items)
    if count < 2:
        return list(items)
    bits = (count - 1).bit_length()
    middle = sorted(range(1, count - 1), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [items[place] for place in (count - 1, 0, *middle)]


def _made(run: Path, texts: Texts | Numbers, keys: Iterable[tuple[Fate, int]]) -> dict[tuple[Fate, int], Excerpt]:
    wanted: dict[Fate, set[int]] = {}
    for fate, place in keys:
        wanted.setdefault(fate, set()).add(place)
    return {
        (fate, place): excerpt(record, texts)
        for fate, places in wanted.items()
        for place, record in enumerate(read(run, [fate]))
        if place in places
    }


def excerpt(record: Kept, texts: Texts | Numbers) -> Excerpt:
    """A sample as the page has it. `tokens`: pieces of text; `versions` (runs of version and count), `numbers` and
    `masked` go with them. `gap`: (tokens before it, tokens left out)."""
    response = record.response
    places = list(range(len(response)))
    gap = None
    if len(places) > MOST_TOKENS:
        half = MOST_TOKENS // 2
        gap = [half, len(places) - 2 * half]
        places = [*places[:half], *places[-half:]]
    shown = pieces(response[: gap[0]] if gap else response, texts)
    if gap:
        shown += pieces(response[-gap[0] :], texts)
    made_by = [version for version, count in record.runs for _ in range(count)]
    made_by += [record.version] * (len(response) - len(made_by))
    masked = set(record.masked)
    found: Excerpt = {
        "fate": record.fate,
        "step": record.step,
        "version": record.version,
        "group": record.group,
        "index": record.index,
        "reward": None if record.reward is None else short(record.reward),
        "finish": record.finish,
        "cut": record.finish == "length" and texts.stops,
        "why": record.why,
        "actor": record.actor,
        "length": len(response),
        "staleness": record.staleness,
        "prompt": _without_middle(texts.prompt(record)),
        "wanted": _without_middle(texts.wanted(record)),
        "tokens": shown,
        "versions": _runs([made_by[place] for place in places]),
        "masked": [at for at, place in enumerate(places) if place in masked],
        "numbers": {name: [_digits(values[place]) for place in places] for name, values in record.numbers.items()},
    }
    if gap:
        found["gap"] = gap
    if calls := texts.calls(record):
        cut = [call._replace(arguments=_without_middle(call.arguments, MOST_OF_CALL)) for call in calls[:MOST_CALLS]]
        found["calls"] = [
            [
                call.turn,
                call.name,
                call.arguments,
                call.result and _without_middle(call.result, MOST_OF_CALL),
                call.failed,
            ]
            for call in cut
        ]
    if record.turn_rewards:
        found["turns"] = [[at, short(earned)] for at, earned in record.turn_rewards]
    return found


def _digits(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _runs(values: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def _without_middle(text: str, most: int = MOST_LETTERS) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n… {len(text) - 2 * half} letters …\n{text[-half:]}"


def pieces(tokens: Sequence[int], texts: Texts | Numbers) -> list[str]:
    """The text that each token adds. One that ends within a letter adds nothing; the next whole one adds all."""
    found, done = [], 0
    for end in range(1, len(tokens) + 1):
        begin = max(0, done - WINDOW)
        before, now = texts.of(tokens[begin:done]), texts.of(tokens[begin:end])
        torn = now.endswith("\ufffd") and end < len(tokens) and end - done < WINDOW
        if torn:
            found.append("")
        else:
            found.append(now[len(before) :] if now.startswith(before) else texts.of(tokens[done:end]))
            done = end
    return found
