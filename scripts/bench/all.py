"""Measure on the CPU and write the rows into docs/results.md: `python -m scripts.bench.all [--quick] [--only NAME]`.

One after the other, each bench runs three times, in separate processes; a figure is the mean with the range.
docs/data/bench.json keeps all metrics. A bench that fails leaves its rows as they are, and the exit code is 1.
`--quick`: smaller benches, about ten minutes on two cores. Rows older than the code that they measure are listed
at the end; `--check` does no more than that, with exit code 1 if there are any.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_like.machine import cores
from areal_like.places import REPOSITORY

from ..analysis.intervals import bootstrap, markdown_table
from ..console.arguments import command
from ..console.output import write_json
from .figures import ended

BENCHES = {
    "modes": ("--scenario longtail --modes async1 async4", "", "buffer scripts/simulation configs/bench"),
    "buffer": ("--without-ray --rounds 1", "--without-ray", "buffer areal_like/wire"),
    "delta": ("--millions 30 --repeats 2", "", "areal_like/weights"),
    "learner": ("--without-trl --repeats 1", "--without-trl", "learners areal_like/models"),
    "engine": ("--repeats 1", "", "actors/engines areal_like/models"),
}
"""Bench → arguments with `--quick` and without, code that it measures."""
CLAIMS = (
    ("modes", "async1_over_sync_longtail", "Async η = 1 over sync, long-tailed lengths, samples per second"),
    ("modes", "async4_over_sync_longtail", "Async η = 4 over sync"),
    ("modes", "samples_error_max", "Largest error of the simulator's samples per second, relative"),
    ("buffer", "tcp_over_raw_zmq", "**Goal missed** (0.7): buffer over raw ZeroMQ proxy, samples per second"),
    ("buffer", "tcp_over_mp_queue", "**Goal missed** (2): over `multiprocessing.Queue`"),
    ("buffer", "fsync_over_off", "`journal=fsync` over none (goal 0.6)"),
    ("buffer", "ack_p99_ms", "Push to acknowledgement under full load, p99, ms"),
    ("delta", "ratio_1pct", "Whole weights over a delta, 1 % changed, bytes"),
    ("delta", "ratio_01pct", "The same, 0.1 % changed"),
    ("delta", "encode_over_memcpy", "Encoding 1 % with its digest over copying, processor time"),
    ("delta", "apply_over_memcpy", "Applying it over copying"),
    ("learner", "packed_over_padded", "Train step packed over padded, tokens per second (goal 2)"),
    ("engine", "engine_over_generate", "Engine over `generate`, equal lengths, tokens per second"),
    ("engine", "engine_over_generate_longtail", "The same, log-normal lengths"),
    ("engine", "invariant_over_engine", "`batch_invariant` over the engine without it"),
)  # fmt: skip
"""Bench, metric, claim."""
RUNS, BEGIN, END = 3, "<!-- bench.all: begin -->\n", "<!-- bench.all: end -->"


def measured(name: str, arguments: str) -> dict[str, list[float]]:
    """Metrics of all runs. Raises RuntimeError if one fails, or has no figure for a claim."""
    found: dict[str, list[float]] = {metric: [] for bench, metric, _ in CLAIMS if bench == name}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for _ in range(RUNS):
            file = Path(folder) / "metrics"
            ended([sys.executable, "-m", f"scripts.bench.{name}", *arguments.split(), "--json", str(file)])
            for metric, value in json.loads(file.read_bytes()).items():
                found.setdefault(metric, []).append(float(f"{value:.6g}"))
    if lacking := [metric for metric, values in found.items() if len(values) < RUNS]:
        raise RuntimeError(f"{name}: got {', '.join(lacking)} in fewer than {RUNS} runs")
    return found


def write_rows(records: Mapping[str, Any], page: Path) -> None:
    """Replace what is between the marks of the page. Command and origin are in a bench's first row."""
    rows, above = list[list[Any]](), ""
    for name, metric, claim in CLAIMS:
        if record := records.get(name):
            used = f"`scripts.bench.{name} {record['arguments']}`".replace(" `", "`")
            origin = ["", ""] if name == above else [used, "{date}, {commit}, {machine}".format(**record)]
            rows.append([claim, bootstrap(record["metrics"][metric]), *origin])
            above = name
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    made = markdown_table(["claim", "figure", "command", "date, commit, machine"], rows)
    page.write_text(f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}", encoding="utf-8")


def outdated(records: Mapping[str, Any], root: Path) -> dict[str, list[str]]:
    """Bench → commits since its record that changed the code it measures, the newest first."""
    since = {name: f"{record['commit']}..HEAD" for name, record in records.items()}
    found = {name: git(root, "log", "--format=%h", each, "--", *code(name)).split() for name, each in since.items()}
    return {name: commits for name, commits in found.items() if commits}


def code(name: str) -> list[str]:
    return [f"scripts/bench/{name}.py", *BENCHES[name][-1].split()]


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout.strip()


def origin(name: str) -> dict[str, str]:
    """Raises RuntimeError if the code is not the commit's."""
    if changed := git(REPOSITORY, "diff", "--name-only", "HEAD", "--", *code(name)).split():
        raise RuntimeError(f"{name}: got changes in {', '.join(changed)}, expected none; commit them first")
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    machine = f"{cores()} × {re.sub(r'[(]R[)]| Processor| CPU', '', model[1]) if model else 'an unknown CPU'}"
    commit = git(REPOSITORY, "rev-parse", "--short=8", "HEAD")
    return {"date": f"{datetime.now(UTC):%m-%d}", "commit": commit, "machine": machine}


def main() -> int:
    parser = command("bench.all", __doc__)
    parser.add_argument("--quick", action="store_true", help="smaller benches, about ten minutes")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--check", action="store_true", help="only list rows older than the code that they measure")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    data, failed = REPOSITORY / "docs/data/bench.json", False
    records = json.loads(data.read_bytes()) if data.exists() else {}
    for number, name in enumerate(() if args.check else args.only, 1):
        arguments = BENCHES[name][0 if args.quick else 1]
        print(f"{number}/{len(args.only)} {name} {arguments}", flush=True)
        try:
            records[name] = origin(name) | {"arguments": arguments, "metrics": measured(name, arguments)}
        except RuntimeError as error:
            failed = True
            print(f"{name} has failed, and its rows stay as they are: {error}", flush=True)
        else:
            write_json(data, records)
            write_rows(records, REPOSITORY / "docs/results.md")
    for name, commits in (old := outdated(records, REPOSITORY)).items():
        print(f"{name}: measured at {records[name]['commit']}; {len(commits)} commits changed its code: {commits[0]}")
    return int(failed or (args.check and bool(old)))


if __name__ == "__main__":
    sys.exit(main())
