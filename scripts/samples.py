"""What the model wrote: `areal-like samples RUN [--step N] [--best | --worst] [--dropped | --held-out] ...`.

Shows samples of a run, also during the run: prompt and response as text, tool calls, reward, advantage, age, and fate.
Tokens are coloured by the age of the weights that made them, in versions (green: 0, yellow, red), or by another number
(`--colour advantage`, or any name under `numbers` in the files); tokens that are not trained are dim. Without
`--dropped` or `--held-out` it shows trained samples, the newest first. A dropped sample has a reason, which `--search`
finds, too: `--dropped --search stale`.

The samples are in RUN/samples as lines of JSON (`areal_like.run.samples`); `run.samples_bytes` bounds them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from areal_like.config.registry import ConfigError, bind, build, nearest
from areal_like.config.run_config import from_tree, read_resolved
from areal_like.config.schema import OWN
from areal_like.run.run_folder import CONFIG
from areal_like.run.samples import DROPPED, FOLDER, HELDOUT, TRAINED, Fate, Kept, read
from areal_like.tasks.heldout import HeldoutSet, sets_of
from areal_like.types import Prompt
from buffer.events import Admit, Snapshot
from buffer.journal import Recorded
from buffer.prompts import PromptCursor, shares_of
from buffer.samplers import needs_results

from .console.arguments import command, json_file, refuse
from .console.output import console, shortened, visible, write_json
from .following.tool_calls import Call, calls_of, marks_of

AGES = ("green", "yellow", "dark_orange", "red")
"""Colours of tokens that are 0, 1, 2 and more versions old."""
LOW, HIGH = "red", "green"
"""Of numbers below and above 0."""
WIDEST = 160
"""Characters of a tool call, and of its result."""
PENALTY = "penalty/"
"""Prefix of numbers that the learner subtracted from the reward."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("samples", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dropped", action="store_const", dest="fate", const=DROPPED, help="what was not trained")
    which.add_argument("--held-out", action="store_const", dest="fate", const=HELDOUT, help="held-out answers")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    parser.add_argument("--step", type=int, help="only samples of this train step")
    parser.add_argument("--search", metavar="TEXT", help="only those with this text in prompt, response or reason")
    parser.add_argument("--count", type=int, default=5, help="samples to show (default: 5; 0: all)")
    parser.add_argument("--colour", default="age", metavar="NAME", help="age (default), or a number per token")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the samples here (-: standard output)")
    return parser.parse_args(argv)


class Texts:
    """Text of token ids, by the run's task; the ids themselves if it has no text."""

    def __init__(self, run: Path):
        self._tree = read_resolved(run / CONFIG)  # a full check would take longer than all the rest
        config, self._sets = dict[str, Any](self._tree), dict[str, HeldoutSet]()
        seed, self._marks = config["run"]["seed"], marks_of(config["workflow"])
        self._task = build("task", config["task"], seed)
        self.stops = bool(self._task.stop_tokens)
        self._codec = self._task.prompt("train", 0).codec
        self._cursor = PromptCursor(shares_of(self._task), seed)  # shared, because it knows an epoch's order
        self._journal = run / "journal" if needs_results(bind("sampler", config["sampler"])) else None

    def of(self, tokens: Sequence[int]) -> str:
        if self._codec:
            return self._codec.decode(np.array(tokens, np.int32))
        return "".join(f"{token} " for token in tokens)

    def prompt(self, record: Kept) -> str:
        if record.prompt_length:
            return self.of(record.tokens[: record.prompt_length])
        try:
            return self.of(self._prompt(record).tokens.tolist())  # its group was not rolled out
        except LookupError:
            return ""

    def wanted(self, record: Kept) -> str:
        """What the task's verifier looks for; "" if the journal no longer has its prompt."""
        try:
            return str(self._prompt(record).answer)
        except LookupError:
            return ""

    def _prompt(self, record: Kept) -> Prompt:
        if record.fate == HELDOUT:
            return self._prompt_of_set(record.of, record.group)
        return self._task.prompt("train", self._row(record.group))

    def _row(self, group_id: int) -> int:
        """The row of a group: of the seed's order or, with a sampler, as the journal has it. Raises LookupError."""
        if self._journal is None:
            return self._cursor.at(group_id).row
        return self._admitted[group_id]

    @cached_property
    def _admitted(self) -> dict[int, int]:
        found: dict[int, int] = {}
        assert self._journal
        for event, _ in Recorded(self._journal, whole=True):
            if isinstance(event, Admit):
                found[event.id] = event.row
            elif isinstance(event, Snapshot):
                found.update((held.id, held.row) for held in event.groups)
        return found

    def _prompt_of_set(self, name: str, place: int) -> Prompt:
        if name == OWN:
            return self._task.prompt(OWN, place)
        if not self._sets:
            self._sets = {each.name: each for each in sets_of(from_tree(self._tree), self._task)}
        return self._sets[name].prompt(place)

    def calls(self, record: Kept) -> list[Call]:
        """The tool calls of a sample."""
        if not self._marks:
            return []
        edges = [*(first for first, _ in record.turns[1:]), len(record.response)]
        turns = zip(record.turns, edges, strict=True) if record.turns else ()
        said = ((self.of(record.response[a:b]), self.of(record.response[b:end])) for (a, b), end in turns)
        return calls_of(said, self._marks)


class Numbers:
    """Token ids instead of text, if the run's task cannot be built here."""

    stops = True

    def of(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def prompt(self, record: Kept) -> str:
        return self.of(record.tokens[: record.prompt_length])

    def wanted(self, record: Kept) -> str:
        return ""

    def calls(self, record: Kept) -> list[Call]:
        return []


def texts_of(run: Path) -> tuple[Texts | Numbers, str]:
    """The texts of a run and, if its task cannot be built, the reason for numbers instead. Raises
    ConfigError for a damaged config."""
    read_resolved(run / CONFIG)
    try:
        return Texts(run), ""
    except Exception as error:  # the task is the user's code: it may raise anything
        why = f"tokens are shown as numbers, because the task cannot be built: {' '.join(str(error).split())}"
        return Numbers(), f"{why}; did you start this command in the folder where you started the run?"


def select(records: Iterable[Kept], args: argparse.Namespace, texts: Texts | Numbers) -> list[Kept]:
    """The wanted samples, in the order shown: the newest first, also among equal rewards."""
    wanted, found = (args.search or "").casefold(), []
    for record in records:
        if args.step in (None, record.step):
            text = f"{texts.prompt(record)}\n{texts.of(record.response)}\n{record.why}" if wanted else ""
            if wanted in text.casefold():
                found.append(record)
    found.reverse()
    if args.best or args.worst:
        found = [record for record in found if record.reward is not None]
        found.sort(key=lambda record: record.reward or 0.0, reverse=args.best)
    return found[: args.count] if args.count > 0 else found


def check_colour(name: str, records: Sequence[Kept]) -> None:
    """Raises ConfigError for numbers that no sample has."""
    known = {number: None for record in records for number in record.numbers}
    if name != "age" and records and name not in known:
        there = ", ".join(("age", *known))
        raise ConfigError(f"--colour: got {name!r}, expected one of {there}.{nearest(name, known)}")


# ---- showing --------------------------------------------------------------------------------------------------------


def heading(record: Kept, stops: bool = True, calls: Sequence[Call] = ()) -> str:
    """One line about a sample; `stops`: its task lets an answer end before its limit. `calls`: of tools."""
    parts = [f"step {record.step}"]
    if record.fate == HELDOUT:
        parts.append(f"row {record.group}")
    else:
        parts.append(f"group {record.group}" + (f", sample {record.index}" if record.tokens else ""))
    if record.tokens:
        parts.append("no reward" if record.reward is None else f"reward {record.reward:g}")
        for name, values in record.numbers.items():
            known = [each for each in values if each is not None]
            if known and name.startswith(PENALTY):  # the learner subtracted it from the reward
                parts.append(f"{name} {sum(known):.3g}")
            elif known and name == "advantage":
                parts.append(f"advantage {min(known):+.3f}" + f" to {max(known):+.3f}" * (min(known) != max(known)))
        ended = "length (cut at its limit)" if record.finish == "length" and stops else record.finish
        parts.append(f"{len(record.response)} tokens, {ended}")
        if len(record.turns) > 1:
            lengths = ", ".join(str(last - first) for first, last in record.turns)
            parts.append(f"{len(record.turns)} turns ({lengths}), {1 + len(record.forks)} contexts")
        parts.append(f"{record.staleness} versions old")
    else:
        parts.append("no answer")
    if calls:
        parts.append(f"{len(calls)} tool calls, {sum(call.failed for call in calls)} failed")
    return " · ".join([*parts, record.why] if record.why else parts)


def call_line(call: Call) -> Text:
    """A tool call on a line."""
    line = Text(f"turn {call.turn}: {visible(shortened(str(call), WIDEST))} → ", "cyan")
    if call.result is None:
        return line.append("not answered", "red")
    return line.append(visible(shortened(call.result, WIDEST)), "red" if call.failed else "")


def colours(record: Kept, by: str) -> list[str]:
    """A style per token of the response."""
    if by == "age":
        ages = [record.version - version for version, count in record.runs for _ in range(count)]
        styles = [AGES[min(max(age, 0), len(AGES) - 1)] for age in ages]
    else:
        values = record.numbers.get(by) or [None] * len(record.response)
        styles = [(HIGH if value > 0 else LOW) if value else "" for value in values]
    for place in record.masked:
        styles[place] = "dim"
    return styles


def coloured(record: Kept, texts: Texts | Numbers, by: str) -> Text:
    """The response. Neighbouring tokens of one colour are decoded together. Each context is on lines of its own."""
    found, styles, tokens = Text(), colours(record, by), record.response
    for first, end in itertools.pairwise([0, *record.forks, len(tokens)]):
        if first:
            found.append("\n── the chat template rewrites the text before:\n", "bold")
        for style, places in itertools.groupby(range(first, end), key=lambda place: styles[place]):
            found.append(visible(texts.of([tokens[place] for place in places])), style=style)
    return found


def show(out: Console, record: Kept, texts: Texts | Numbers, by: str) -> None:
    calls = texts.calls(record)
    lines = [
        Text(f"── {visible(heading(record, texts.stops, calls))}", "bold"),
        Text(visible(texts.prompt(record)), "dim"),
    ]
    lines += [coloured(record, texts, by)] if record.tokens else []
    lines += [call_line(call) for call in calls]
    if wanted := texts.wanted(record):
        lines.append(Text(f"wanted: {visible(shortened(wanted))}", "italic"))
    if record.turn_rewards:
        lines.append(Text(f"turns earned {', '.join(f'{earned:g}' for _, earned in record.turn_rewards)}", "italic"))
    for line in lines:
        out.print(line, soft_wrap=True)


def as_data(record: Kept, texts: Texts | Numbers) -> dict[str, Any]:
    """The record, with `prompt`, `text`, `wanted` and tool `calls` beside its tokens; `turns` as texts."""
    return {
        "prompt": texts.prompt(record),
        "text": texts.of(record.response),
        **msgspec.to_builtins(record),
        "turns": [texts.of(record.response[first:last]) for first, last in record.turns],
        "wanted": texts.wanted(record),
        "calls": [call._asdict() for call in texts.calls(record)],
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    fate: Fate = args.fate or TRAINED
    try:
        if not (args.run / CONFIG).is_file():
            raise ConfigError(f"{args.run}: no run folder ({CONFIG} is missing)")
        if not (args.run / FOLDER).is_dir():
            raise ConfigError(f"{args.run}: no samples yet ({FOLDER} is missing), or run.samples_bytes=0")
        texts, note = texts_of(args.run)
        records = list(read(args.run, [fate]))
        check_colour(args.colour, records)
        found = select(records, args, texts)
    except (ValueError, OSError) as error:
        refuse(error)
    if note:
        print(f"note: {note}", file=sys.stderr)
    write_json(args.json, [as_data(record, texts) for record in found] if args.json else None)
    if args.json != Path("-"):
        out = console()
        for record in found:
            show(out, record, texts, args.colour)
        if not found:
            print(f"no such samples: none of {len(records)} {fate} samples fits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
