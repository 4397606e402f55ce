"""Write the prompts of `configs/smollm2/`: `python -m scripts.sums [FOLDER]`.

Sums in words, as `{"prompt", "answer"}` per line, in four wordings that each end with "Answer with the number only."
Two sets of files, SET-train.jsonl and SET-heldout.jsonl:

one-digit   all sums of two numbers from 1 to 9; held out are 20 sums such as 7 + 2, whose swap (2 + 7) is trained
two-digit   sums of numbers of up to two digits, for a model that has learned the others; held out are sums of two
            two-digit numbers

Sums are held out, not rows: training has no wording of a held-out sum, nor, in the second set, of its swap. (There are
only 45 one-digit sums without their swaps: with 11 of those held out a model of 135M parameters learned ten of them.)
The files are the same each time; existing ones are overwritten.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from .console.arguments import command

FOLDER = "data/sums"
WORDINGS = (
    "What is {a} + {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "What is the sum of {a} and {b}? Answer with the number only.",
    "{a} plus {b} equals what? Answer with the number only.",
)
HELDOUT_SWAPS = 20
"""Sums of one-digit numbers that are held out in one of their two orders."""
HELDOUT_SUMS = 400
"""Held-out sums of two-digit numbers; each is asked once."""
SMALL, LARGE = range(1, 10), range(10, 100)
SEED = 20_250_101

Sum = tuple[int, int]


def pairs(first: Iterable[int], second: Iterable[int]) -> list[Sum]:
    """Each sum once: 3 + 4 and 4 + 3 are the same one."""
    second = list(second)
    return sorted({(min(a, b), max(a, b)) for a in first for b in second})


def both_orders(sums: Iterable[Sum]) -> list[Sum]:
    return sorted({order for a, b in sums for order in ((a, b), (b, a))})


def row(a: int, b: int, wording: str) -> dict[str, str]:
    return {"prompt": wording.format(a=a, b=b), "answer": str(a + b)}


def one_digit() -> dict[str, list[dict[str, str]]]:
    """Split → rows: every sum in every wording."""
    rng = random.Random(SEED)
    sums = pairs(SMALL, SMALL)
    swaps = rng.sample([(a, b) for a, b in sums if a != b], HELDOUT_SWAPS)
    heldout = {rng.choice([(a, b), (b, a)]) for a, b in swaps}
    split = {"train": sorted(set(both_orders(sums)) - heldout), "heldout": sorted(heldout)}
    return {name: [row(a, b, w) for a, b in part for w in WORDINGS] for name, part in split.items()}


def two_digit() -> dict[str, list[dict[str, str]]]:
    """Split → rows; training rows are half sums of a two-digit and a one-digit number, half of two two-digit ones, each
    in one wording."""
    rng = random.Random(SEED + 1)
    sums = pairs(LARGE, LARGE)
    rng.shuffle(sums)
    mixed = both_orders(pairs(SMALL, LARGE))
    large = both_orders(sums[HELDOUT_SUMS:])
    train = mixed + rng.sample(large, len(mixed))
    orders = [rng.choice([(a, b), (b, a)]) for a, b in sums[:HELDOUT_SUMS]]
    return {
        "train": [row(a, b, rng.choice(WORDINGS)) for a, b in train],
        "heldout": [row(a, b, WORDINGS[i % len(WORDINGS)]) for i, (a, b) in enumerate(orders)],
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, splits in (("one-digit", one_digit()), ("two-digit", two_digit())):
        for split, rows in splits.items():
            path = folder / f"{name}-{split}.jsonl"
            path.write_text("".join(json.dumps(each) + "\n" for each in rows))
            print(f"{path}: {len(rows)} prompts")


def main(argv: list[str] | None = None) -> int:
    parser = command("sums", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(FOLDER), help=f"output folder (default: {FOLDER})")
    args = parser.parse_args(argv)
    try:
        write(args.folder)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
