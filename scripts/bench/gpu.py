"""What one GPU shows of this project: correctness first, then figures. For an hour in which one can be borrowed.

    python -m scripts.bench.gpu --minutes 8
    python -m scripts.bench.gpu --device cpu --tiny                (a look without a GPU)

Each item runs in a process of its own and has a time limit: one that fails or hangs becomes a row with its error, and
the next one runs. FILE (gpu.json) and the table beside it (gpu.md) are written after every item. Called again with the
same FILE, the command continues: items without a row first, then those that failed. Exit code 1 if a row has failed.

It downloads nothing: all models have random weights. Beside torch, transformers, numpy, numba, msgpack, rich it needs
packages of 7 MB in all, which can travel as wheels (docs/gpu.md):

    pip install pyzmq omegaconf antlr4-python3-runtime msgspec xxhash zstandard setproctitle
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..console.arguments import refuse
from ..console.output import write_json
from .figures import bench_parser

LEAST_SECONDS = 5.0
"""Time that must be left for an item to begin."""
LOG_CHARACTERS = 2000
LIMITS = {
    "machine": 60,
    "losses": 60,
    "train_steps": 90,
    "attention": 60,
    "tree": 60,
    "engine": 90,
    "delta": 60,
    "replay": 60,
    "mfu_0.5b": 60,
    "mfu_1.5b": 60,
    "mfu_7b": 90,
    "decode_0.5b": 120,
    "decode_1.5b": 120,
    "decode_7b": 150,
    "update": 120,
    "one_card": 200,
    "memory": 60,
}
"""Item → seconds that it may take, in the order in which they run."""
Row = dict[str, Any]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = bench_parser("gpu", __doc__)
    parser.epilog = (
        "needs: pip install pyzmq omegaconf msgspec xxhash zstandard setproctitle (beside torch, transformers, numba)"
    )
    parser.set_defaults(json=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="for all items (default: 8)")
    parser.add_argument("--only", nargs="+", choices=list(LIMITS), metavar="NAME", help="these items, also once more")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Bench:
    """The rows so far, in a file."""

    file: Path
    of: dict[str, Any]
    rows: dict[str, Row]

    @classmethod
    def continued(cls, file: Path, of: dict[str, Any]) -> Bench:
        """From the file, if there is one. Refuses one of another device."""
        if not file.exists():
            return cls(file, of, {})
        found = json.loads(file.read_text())
        if found.get("of") != of:
            refuse(f"{file} has rows of {found.get('of')}, not {of}; name another file by --json, or remove it")
        return cls(file, of, found["items"])

    def due(self, only: list[str] | None) -> list[str]:
        """Items to run, in order."""
        if only:
            return only
        failed = [name for name in LIMITS if name in self.rows and self.rows[name]["status"] != "ok"]
        return [name for name in LIMITS if name not in self.rows] + failed

    def note(self, name: str, row: Row) -> None:
        self.rows[name] = row
        new = self.file.with_suffix(".part")
        write_json(new, {"of": self.of, "items": {n: self.rows[n] for n in LIMITS if n in self.rows}})
        new.replace(self.file)  # a cut here must not lose what is there
        self.file.with_suffix(".md").write_text(self.table())

    def table(self) -> str:
        """Markdown: a line per item."""
        lines = ["| item | status | seconds | found |", "|---|---|---|---|"]
        for name in LIMITS:
            row = self.rows.get(name, {"status": "not run yet", "seconds": 0, "found": {}})
            found = " · ".join(f"{key} {shown(value)}" for key, value in row["found"].items())
            error = f"**{row['error']}** " if row.get("error") else ""
            lines.append(f"| {name} | {row['status']} | {row['seconds']:.0f} | {(error + found).replace('|', '/')} |")
        return "\n".join([*lines, ""])


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


# One item, in its own process


def items() -> dict[str, Callable[[Any], Iterator[dict[str, float | str]]]]:
    """Name → what runs it. Imports torch, and does not touch CUDA: each item's process begins with it anew."""
    from . import gpu_checks as checks
    from . import gpu_figures as figures

    found = {name: getattr(checks, name) for name in ("losses", "train_steps", "attention", "tree")}
    found |= {name: getattr(checks, name) for name in ("engine", "delta", "replay")}
    for size in ("0.5b", "1.5b", "7b"):
        found |= {f"mfu_{size}": partial(figures.mfu, size=size), f"decode_{size}": partial(figures.decode, size=size)}
    found |= {"machine": machine, "one_card": figures.one_card}
    return found | {name: partial(getattr(figures, name), size="0.5b") for name in ("update", "memory")}


def machine(place: Any) -> Iterator[dict[str, float | str]]:
    """What this is measured on."""
    import torch
    import transformers

    yield {"torch": torch.__version__, "transformers": transformers.__version__, "cores": float(os.cpu_count() or 0)}
    if place.gpu:
        properties = torch.cuda.get_device_properties(0)
        yield {"device": properties.name, "gib": properties.total_memory / 2**30, "cuda": str(torch.version.cuda)}


def attempt(name: str, run: Callable[[Any], Any], args: argparse.Namespace, seconds: float) -> Row:
    """Run an item for so many seconds at most."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as made:
        folder = Path(made)
        process = multiprocessing.get_context("fork").Process(target=_child, args=(run, args, folder))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with its children
        process.join()
        found = json.loads((folder / "found.json").read_text()) if (folder / "found.json").exists() else {}
        row: Row = {"status": "ok", "seconds": time.monotonic() - begin, "found": found}
        if late:
            row |= {"status": "cut", "error": f"not done in {seconds:.0f} s"}
        elif process.exitcode:
            error = folder / "error"
            row |= {"status": "failed", "error": error.read_text() if error.exists() else f"exit {process.exitcode}"}
        if row["status"] != "ok":
            row["log"] = (folder / "log").read_text(errors="replace")[-LOG_CHARACTERS:]
    return row


def _child(run: Callable[[Any], Any], args: argparse.Namespace, folder: Path) -> None:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    import torch

    from .gpu_shapes import Place

    found: dict[str, float | str] = {}
    try:
        if args.device != "cpu":
            torch.cuda.set_device(torch.device(args.device).index or 0)
        for some in run(Place(args.device, args.tiny, folder)):
            found |= some
            (folder / "found.part").write_text(json.dumps(found))
            (folder / "found.part").replace(folder / "found.json")
    except BaseException as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        (folder / "error").write_text(f"{type(error).__name__}: {first}"[:300])
        sys.exit(1)


def main() -> None:
    args = parse(sys.argv[1:])
    end = time.monotonic() + 60 * args.minutes
    bench = Bench.continued(args.json, {"device": args.device.partition(":")[0], "tiny": args.tiny})
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for a GPU must not begin CUDA before the fork
    known = items()
    for name in bench.due(args.only):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"no time is left for {name} and what follows: call this again", flush=True)
            break
        row = attempt(name, known[name], args, min(LIMITS[name], left))
        bench.note(name, row)
        print(f"{name:14s} {row['status']:7s} {row['seconds']:6.1f} s  {row.get('error', '')}", flush=True)
    print(bench.table())
    sys.exit(any(row["status"] != "ok" for row in bench.rows.values()))


if __name__ == "__main__":
    main()
