"""How many small faults in the core do its tests notice? `python -m scripts.verify.mutants [--sample N]`.

Puts one fault at a time (`scripts.verify.mutations`) into `buffer/`, `learners/losses/` and `areal_like/weights/`, in a
copy of the clone, and runs the tests that reach its line, until one fails. A fault is killed when a test fails, when
collecting the tests fails, or when they take too long or too much memory. It survives when all pass, or when no test
reaches its line. Prints every survivor, and the share of killed faults by room.

`--sample N` draws N faults by `--seed`; without it all are tried, which takes hours. `--results FILE` keeps each
outcome, one JSON object per line: the same command with the same file goes on where it was broken off. Constants that
only tune are left alone (`scripts.verify.mutations.TUNING`, with the reasons). Tests that start processes are left out:
their processes would need the fault, too. Needs `coverage` (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from xxhash import xxh3_64_hexdigest

from areal_like.places import REPOSITORY

from ..console.arguments import command, new_file, positive, refuse
from .mutations import TUNING, Mutant, mutants

ROOMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "buffer": ("tests/buffer", "tests/tasks/test_mixture.py"),
        "learners/losses": ("tests/learners/losses", "tests/learners/test_learner_losses.py"),
        "areal_like/weights": (
            "tests/areal_like/weights",
            "tests/integration/test_weights.py",
            "tests/integration/test_weight_parts.py",
            "tests/learners/test_published_parts.py",
        ),
    }
)
"""Folder of the code → its tests."""
PAGE = "tests/scripts/test_config_reference.py::test_the_page_is_current"
"""Holds the defaults of all knobs against `docs/config.md`; it reads them, so no line of theirs runs."""
COMPILED: Mapping[str, str] = MappingProxyType({"areal_like/weights/kernels.py": "areal_like/weights/compiled.py"})
"""Files that run compiled, where `coverage` sees nothing → the file through which all calls go."""
BEFOREHAND = ("numpy", "torch", "transformers", "numba", "msgspec", "zmq.asyncio", "omegaconf", "hypothesis", "pytest")
"""Imported once, before processes are forked for the tests."""
SETTLING_SECONDS, PATIENCE = 20.0, 5.0
"""Time limit of a fault's tests: these seconds, plus this many times the time that they take without the fault."""


MOST_BYTES = 6 << 30
"""Memory of a fault's tests: one that makes a loop endless must not fill the machine before its time is over."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("verify.mutants", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only these, such as buffer/store.py (default: all)")
    parser.add_argument("--sample", type=positive, metavar="N", help="draw N faults (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--results", type=new_file, metavar="FILE", help="add each outcome to this file; skip those in it"
    )
    return parser.parse_args(argv)


def room_of(path: str) -> str:
    """Raises ValueError for a file of another room."""
    for room in ROOMS:
        if path.startswith(f"{room}/"):
            return room
    raise ValueError(f"{path} is in none of {', '.join(ROOMS)}")


def files(given: Sequence[str]) -> list[str]:
    """Raises ValueError."""
    found = list(given) or [str(f.relative_to(REPOSITORY)) for room in ROOMS for f in (REPOSITORY / room).glob("*.py")]
    for path in found:
        room_of(path)
        if not (REPOSITORY / path).is_file():
            raise ValueError(f"{path}: there is no such file")
    return sorted(found)


def drawn(found: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """A sample in which each fault has the same chance, in the order of the files."""
    if count is None or count >= len(found):
        return list(found)
    places = sorted(random.Random(seed).sample(range(len(found)), count))
    return [found[place] for place in places]


# Which tests reach which line


class Reach:
    """Which tests run a line, and how long each takes."""

    def __init__(self, copy: Path):
        self.copy = copy
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}

    def learn(self, room: str) -> None:
        """Run a room's tests under `coverage`. Raises RuntimeError if they fail without any fault."""
        data, report = self.copy / ".coverage", self.copy / "tests.xml"
        settings = self.copy / "coverage.ini"
        settings.write_text(f"[run]\ndynamic_context = test_function\nsource = {room}\ndata_file = {data}\n")
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *ROOMS[room]]
        arguments = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *pytest]
        done = subprocess.run(arguments, cwd=self.copy, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the tests of {room} fail as they are:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        names = self._times(report)
        from coverage import CoverageData

        found = CoverageData(str(data))
        found.read()
        for path in found.measured_files():
            for line, contexts in found.contexts_by_lineno(path).items():
                here = str(Path(path).relative_to(self.copy))
                self.by_line[here, line] |= {name for each in contexts for name in names.get(each, ())}

    def _times(self, report: Path) -> dict[str, list[str]]:
        """Name of a test's function as `coverage` says it → the test as pytest says it."""
        names: dict[str, list[str]] = defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):
            where, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
            place = f"{_node(self.copy, where)}::{name}"
            self.seconds[place] = self.seconds.get(place, 0.0) + float(case.attrib["time"])
            if place not in names[f"{where}.{name}"]:
                names[f"{where}.{name}"].append(place)
        return names

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The quickest first. A line that runs on import alone is tested by all that reach its file."""
        if mutant.path in COMPILED:
            found = self._reaching(COMPILED[mutant.path])
        elif not (found := self.by_line.get((mutant.path, mutant.line), set())):
            at_import = (mutant.path, mutant.line) in self.by_line
            found = self._reaching(mutant.path) if at_import else set()
        named = [PAGE] if found and mutant.is_default else []
        return sorted(found, key=lambda test: (self.seconds.get(test, 0.0), test)) + named

    def _reaching(self, file: str) -> set[str]:
        return set().union(*(tests for (path, _), tests in self.by_line.items() if path == file))


def _node(copy: Path, dotted: str) -> str:
    """`tests.buffer.test_shares.TestX` → `tests/buffer/test_shares.py::TestX`."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        file = Path(*parts[:end]).with_suffix(".py")
        if (copy / file).is_file():
            return "::".join([str(file), *parts[end:]])
    raise ValueError(f"{dotted}: a test of no file")


# Trying one


def outcome(copy: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> str:
    """survived | killed | too long | unreached."""
    if not tests:
        return "unreached"
    file = copy / mutant.path
    whole, times = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return _tried(copy, tests, SETTLING_SECONDS + PATIENCE * seconds)
    finally:
        file.write_text(whole, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # what numba has compiled of it stays valid


def _tried(copy: Path, tests: Sequence[str], most: float) -> str:
    child = os.fork()
    if child == 0:
        _test(copy, tests)
    deadline = time.monotonic() + most
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "survived" if status == 0 else "killed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too long"


def _test(copy: Path, tests: Sequence[str]) -> None:
    """In a process of its own: does not return."""
    os.setpgid(0, 0)
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        os.chdir(copy)
        sys.dont_write_bytecode = True  # of the faulty file; that of the others is there
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    finally:
        os._exit(code)


def _fresh_copy(folder: Path) -> Path:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := REPOSITORY / name).is_file() and not name.startswith("docs/plots/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def summary(outcomes: Iterable[tuple[Mutant, str]]) -> dict[str, dict[str, int]]:
    """Room → outcome → count."""
    counts: dict[str, dict[str, int]] = {}
    for mutant, result in outcomes:
        room = counts.setdefault(room_of(mutant.path), {})
        room[result] = room.get(result, 0) + 1
    return counts


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        paths = files(args.files)
        importlib.import_module("coverage")
    except ImportError:
        refuse("coverage is missing: pip install -e '.[dev]' -c constraints.txt")
    except ValueError as error:
        refuse(error)
    with tempfile.TemporaryDirectory(prefix="areal-like-mutants-") as folder:
        copy = _fresh_copy(Path(folder))
        reach = Reach(copy)
        for room in dict.fromkeys(map(room_of, paths)):
            print(f"the tests of {room} run, to see which lines they reach", flush=True)
            reach.learn(room)
        every = [each for path in paths for each in mutants(path, (copy / path).read_text(encoding="utf-8"))]
        chosen = drawn(every, args.sample, args.seed)
        print(f"{len(chosen)} of {len(every)} faults, seed {args.seed}", flush=True)
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(REPOSITORY)))]
        _forget_our_own()
        results = _try_all(copy, chosen, reach, Results(args.results))
    return _report(results)


def _forget_our_own() -> None:
    """Import what tests need from elsewhere, and nothing of this project: a fork must read it from the copy."""
    for name in BEFOREHAND:
        importlib.import_module(name)
    own = ("areal_like", "actors", "buffer", "learners", "tests")
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


class Results:
    """The outcomes in a file (None: kept nowhere), one JSON object per line."""

    def __init__(self, file: Path | None):
        self._file = file
        lines = file.read_text().splitlines() if file and file.exists() else []
        self._known = [json.loads(line) for line in lines]

    def of(self, mutant: Mutant) -> str | None:
        """What the file says of this fault, if anything."""
        fault = _row(mutant)
        return next((each["outcome"] for each in self._known if fault.items() <= each.items()), None)

    def add(self, mutant: Mutant, result: str) -> None:
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps(_row(mutant) | {"outcome": result}) + "\n")


def _row(mutant: Mutant) -> dict[str, str | int]:
    source = xxh3_64_hexdigest(mutant.source.encode())
    return {"path": mutant.path, "line": mutant.line, "what": mutant.what, "source": source}


def _try_all(copy: Path, chosen: Sequence[Mutant], reach: Reach, kept: Results) -> list[tuple[Mutant, str]]:
    found = []
    for number, mutant in enumerate(chosen, 1):
        result = kept.of(mutant)
        if result is None:
            tests = reach.tests_of(mutant)
            result = outcome(copy, mutant, tests, sum(reach.seconds.get(test, 0.0) for test in tests))
            kept.add(mutant, result)
        found.append((mutant, result))
        if result in ("survived", "unreached"):
            print(f"{result}: {mutant}", flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(chosen)}", flush=True)
    return found


def _report(results: Sequence[tuple[Mutant, str]]) -> int:
    killed = 0
    for room, counts in summary(results).items():
        dead = counts.get("killed", 0) + counts.get("too long", 0)
        killed += dead
        print(f"{room}: {dead} of {sum(counts.values())} killed {json.dumps(counts)}")
    print(f"all: {killed} of {len(results)} killed, {killed / max(1, len(results)):.1%}")
    print("left alone:")
    for path in sorted({mutant.path for mutant, _ in results} & TUNING.keys()):
        for name, reason in TUNING[path].items():
            print(f"  {path} {name}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
