"""Write the prompts of configs/smollm2 to data/sums: `python -m examples.smollm2.make_sums [FOLDER]`.

Sums in words, one {"prompt", "answer"} per line, as SET-train.jsonl and SET-heldout.jsonl; the same ones each time.
SET is one-digit (all sums of 1 to 9 in four wordings; held out are 20 sums such as 7 + 2, whose swap is trained) or
two-digit (held out are 400 sums of two two-digit numbers, which are trained in neither order).
"""

import json
import random
import sys
from pathlib import Path

WORDINGS = (
    "What is {a} + {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "What is the sum of {a} and {b}? Answer with the number only.",
    "{a} plus {b} equals what? Answer with the number only.",
)
SMALL, LARGE = range(1, 10), range(10, 100)
HELDOUT_SWAPS, HELDOUT_SUMS, SEED = 20, 400, 20_250_101


def one_digit() -> dict[str, list[tuple[int, int, str]]]:
    """Split → sums with their wording."""
    rng = random.Random(SEED)
    swaps = rng.sample([(a, b) for a in SMALL for b in SMALL if a < b], HELDOUT_SWAPS)
    heldout = {rng.choice([(a, b), (b, a)]) for a, b in swaps}
    split = {"train": {(a, b) for a in SMALL for b in SMALL} - heldout, "heldout": heldout}
    return {name: [(a, b, w) for a, b in sorted(sums) for w in WORDINGS] for name, sums in split.items()}


def two_digit() -> dict[str, list[tuple[int, int, str]]]:
    """Split → sums with their wording. Half of the trained ones have a one-digit number."""
    rng = random.Random(SEED + 1)
    sums = [(a, b) for a in LARGE for b in LARGE if a <= b]
    rng.shuffle(sums)
    mixed = sorted({order for a in SMALL for b in LARGE for order in ((a, b), (b, a))})
    large = sorted({order for a, b in sums[HELDOUT_SUMS:] for order in ((a, b), (b, a))})
    train = mixed + rng.sample(large, len(mixed))
    orders = [rng.choice([(a, b), (b, a)]) for a, b in sums[:HELDOUT_SUMS]]
    heldout = [(a, b, WORDINGS[i % len(WORDINGS)]) for i, (a, b) in enumerate(orders)]
    return {"train": [(a, b, rng.choice(WORDINGS)) for a, b in train], "heldout": heldout}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, splits in (("one-digit", one_digit()), ("two-digit", two_digit())):
        for split, sums in splits.items():
            rows = [{"prompt": wording.format(a=a, b=b), "answer": str(a + b)} for a, b, wording in sums]
            (folder / f"{name}-{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "data/sums"))
