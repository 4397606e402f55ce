"""Write problems in the form of GSM8K to data/problems: `python -m examples.gsm8k.make_problems [FOLDER]`.

One {"question", "answer"} per line, as train.jsonl and test.jsonl; the answer ends in `#### NUMBER`. All problems
differ, and are the same ones each time.
"""

import json
import random
import sys
from pathlib import Path

PROBLEMS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "+"),
    ("{name} had {a} {things} and gave away {b}. How many {things} are left?", "-"),
    ("{name} fills {a} boxes with {b} {things} each. How many {things} is that?", "*"),
)
NAMES, THINGS = ("Ann", "Ben", "Eva", "Tom"), ("apples", "books", "coins", "stamps")
SIZES, SEED = {"train": 1000, "test": 200}, 20_250_102


def problems() -> list[dict[str, str]]:
    """All of them, in a random order."""
    rows = []
    for text, sign in PROBLEMS:
        for a, b in ((a, b) for a in range(2, 13) for b in range(2, 13) if sign != "-" or b < a):
            result = {"+": a + b, "-": a - b, "*": a * b}[sign]
            solution = f"{a} {sign} {b} = <<{a}{sign}{b}={result}>>{result}\n#### {result}"
            for name, things in zip(NAMES, THINGS, strict=True):
                rows.append({"question": text.format(name=name, things=things, a=a, b=b), "answer": solution})
    random.Random(SEED).shuffle(rows)
    return rows


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows, begin = problems(), 0
    for split, size in SIZES.items():
        lines = [json.dumps(row) + "\n" for row in rows[begin : begin + size]]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        begin += size


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "data/problems"))
