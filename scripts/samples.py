"""What the model wrote: `areal-like samples RUN [--step N] [--best | --worst] [--dropped | --held-out] ...`.

Shows samples of a run, also during the run, the newest first. Tokens are coloured by the age of the weights that made
them, in versions (green: 0, yellow, red); tokens that are not trained are dim. `--search` also finds the reason of a
dropped sample. The samples are in RUN/samples (`areal_like.run.samples`); `run.samples_bytes` bounds them.
"""

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

from areal_like.config.registry import ConfigError, build
from areal_like.config.run_config import from_tree, read_resolved
from areal_like.config.schema import OWN
from areal_like.run.run_folder import CONFIG
from areal_like.run.samples import DROPPED, FOLDER, HELDOUT, TRAINED, Fate, Kept, read
from areal_like.tasks.heldout import HeldoutSet, sets_of
from areal_like.types import Prompt
from buffer.prompts import PromptCursor, shares_of

from .console.arguments import command, json_file, refusing
from .console.output import console, shortened, visible, write_json

AGES = ("green", "yellow", "dark_orange", "red")
"""Colours of tokens that are 0, 1, 2 and more versions old."""


class Texts:
    """Text of token ids, by the run's task; the ids themselves if it has no text or cannot be built (`note`: why).
    Raises ConfigError for a damaged config."""

    def __init__(self, run: Path):
        self._tree = read_resolved(run / CONFIG)  # a full check would take longer than all the rest
        config, self.note = dict[str, Any](self._tree), ""
        self._codec = None
        try:
            self._task = build("task", config["task"], config["run"]["seed"])
            self._codec = self._task.prompt("train", 0).codec
            # One cursor for all prompts, because it knows an epoch's order.
            self._cursor = PromptCursor(shares_of(self._task), config["run"]["seed"])
        except Exception as error:  # the task is the user's code: it may raise anything
            self._task = None
            why = f"tokens are shown as numbers, because the task cannot be built: {' '.join(str(error).split())}"
            self.note = f"{why}; did you start this command in the folder where you started the run?"
        self.stops = self._task is None or bool(self._task.stop_tokens)

    def of(self, tokens: Sequence[int]) -> str:
        if self._codec:
            return self._codec.decode(np.array(tokens, np.int32))
        return "".join(f"{token} " for token in tokens)

    def prompt(self, record: Kept) -> str:
        """The prompt; "" where a group without an answer has lost it."""
        if record.prompt_length:
            return self.of(record.tokens[: record.prompt_length])
        found = self._prompt(record)
        return self.of(found.tokens.tolist()) if found else ""

    def wanted(self, record: Kept) -> str:
        """The answer that the task's verifier looks for; "" if the task cannot be built."""
        found = self._prompt(record)
        return str(found.answer) if found else ""

    def _prompt(self, record: Kept) -> Prompt | None:
        if self._task is None:
            return None
        if record.fate == HELDOUT and record.of != OWN:
            return self._sets[record.of].prompt(record.group)
        if record.fate == HELDOUT:
            return self._task.prompt(OWN, record.group)
        return self._task.prompt("train", self._cursor.at(record.group).row)

    @cached_property
    def _sets(self) -> dict[str, HeldoutSet]:
        return {each.name: each for each in sets_of(from_tree(self._tree), self._task)}


def select(records: Iterable[Kept], args: argparse.Namespace, texts: Texts) -> list[Kept]:
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


def heading(record: Kept, stops: bool = True) -> str:
    """One line about a sample; `stops`: its task lets an answer end before its limit."""
    parts = [f"step {record.step}", f"{'row' if record.fate == HELDOUT else 'group'} {record.group}"]
    if not record.tokens:
        parts.append("no answer")
    else:
        parts[-1] += f", sample {record.index}" * (record.fate != HELDOUT)
        parts.append("no reward" if record.reward is None else f"reward {record.reward:g}")
        if known := [each for each in record.numbers.get("advantage", ()) if each is not None]:
            parts.append(f"advantage {min(known):+.3f}" + f" to {max(known):+.3f}" * (min(known) != max(known)))
        ended = "length (cut at its limit)" if record.finish == "length" and stops else record.finish
        parts.append(f"{len(record.response)} tokens, {ended}")
        if len(record.turns) > 1:
            lengths = ", ".join(str(last - first) for first, last in record.turns)
            parts.append(f"{len(record.turns)} turns ({lengths}), {1 + len(record.forks)} contexts")
        parts.append(f"{record.staleness} version{'s' * (record.staleness != 1)} old")
    return " · ".join([*parts, record.why] if record.why else parts)


def coloured(record: Kept, texts: Texts) -> Text:
    """The response. Neighbouring tokens of one colour are decoded together. Each context is on lines of its own."""
    ages = [record.version - version for version, count in record.runs for _ in range(count)]
    styles = [AGES[min(max(age, 0), len(AGES) - 1)] for age in ages]
    for place in record.masked:
        styles[place] = "dim"
    found, tokens = Text(), record.response
    for first, end in itertools.pairwise([0, *record.forks, len(tokens)]):
        if first:
            found.append("\n── the chat template rewrites the text before:\n", "bold")
        for style, places in itertools.groupby(range(first, end), key=styles.__getitem__):
            found.append(visible(texts.of([tokens[place] for place in places])), style=style)
    return found


def show(out: Console, record: Kept, texts: Texts) -> None:
    lines = [Text(f"── {visible(heading(record, texts.stops))}", "bold"), Text(visible(texts.prompt(record)), "dim")]
    lines += [coloured(record, texts)] if record.tokens else []
    if wanted := texts.wanted(record):
        lines.append(Text(f"wanted: {visible(shortened(wanted))}", "italic"))
    if record.parts:
        lines.append(Text(", ".join(f"{name} {part:g}" for name, part in record.parts.items()), "italic"))
    if record.turn_rewards:
        lines.append(Text(f"turns earned {', '.join(f'{earned:g}' for _, earned in record.turn_rewards)}", "italic"))
    for line in lines:
        out.print(line, soft_wrap=True)


def as_data(record: Kept, texts: Texts) -> dict[str, Any]:
    """The record, with `prompt`, `text` and `wanted` beside its tokens; `turns` as texts."""
    return {
        "prompt": texts.prompt(record),
        "text": texts.of(record.response),
        **msgspec.to_builtins(record),
        "turns": [texts.of(record.response[first:last]) for first, last in record.turns],
        "wanted": texts.wanted(record),
    }


def main(argv: list[str] | None = None) -> int:
    parser = command("samples", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dropped", action="store_const", dest="fate", const=DROPPED, help="what was not trained")
    which.add_argument("--held-out", action="store_const", dest="fate", const=HELDOUT, help="held-out answers")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    parser.add_argument("--step", type=int, help="train step of the samples (default: any)")
    parser.add_argument("--search", metavar="TEXT", help="text in prompt, response or reason (default: any)")
    parser.add_argument("--count", type=int, default=5, help="samples to show; 0: all (default: 5)")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for the samples (-: standard output)")
    args = parser.parse_args(argv)
    fate: Fate = args.fate or TRAINED
    with refusing():
        if not (args.run / CONFIG).is_file():
            raise ConfigError(f"{args.run}: no run folder ({CONFIG} is missing)")
        if not (args.run / FOLDER).is_dir():
            raise ConfigError(f"{args.run}: no samples yet ({FOLDER} is missing), or run.samples_bytes=0")
        texts, records = Texts(args.run), list(read(args.run, [fate]))
        found = select(records, args, texts)
    if texts.note:
        print(f"note: {texts.note}", file=sys.stderr)
    write_json(args.json, [as_data(record, texts) for record in found] if args.json else None)
    if args.json != Path("-"):
        out = console()
        for record in found:
            show(out, record, texts)
        if not found:
            print(f"no such samples: none of {len(records)} {fate} samples fits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
