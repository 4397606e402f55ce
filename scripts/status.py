"""Show the status of a run, from anywhere: `areal-like status RUN`, live; `--json FILE`: once, as JSON.

Shows waiting processes, staleness, the ledger, each actor's version and work, and the metrics of the last train step.
Any number of these may run at once; nothing in the run waits for them. For a finished run it shows the summary.
"""

import argparse
import contextlib
import sys
import time
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from areal_like.run.run_folder import is_going_on, summary_of
from areal_like.wire.link import BusError

from .console import output
from .console.arguments import command, json_file, refusing
from .following.display import ledger_lines, print_summary
from .following.running import Running, add_arguments

REFRESH_SECONDS = 1.0
STOPPING = {"": "", "now": ", stopping", "drain": ", draining"}


def render(found: dict[str, Any], steps: int) -> Group:
    """The status as text. `steps`: number of steps of the whole run."""
    report, row = found["report"], found["step"]
    bound = "no bound" if report["staleness_bound"] is None else f"bound {report['staleness_bound']}"
    since = f" since the resume at step {report['since_step']}" * bool(report["since_step"])
    facts = {
        "step": f"{report['steps']}/{steps}, version {report['version']}, {report['seconds']:.0f} s"
        f"{STOPPING[report['stopping']]}",
        "waits": "\n".join(report["waits"]) or "nothing waits",
        "left out": ", ".join(f"{name} ({how})" for name, how in report["left_out"].items()),
        "staleness": f"max {report['staleness_max']}, {bound}; mean {report['staleness_mean']:.2f}{since}",
        **ledger_lines(report["ledger"]),
        "buffer": f"{report['buffer/waiting']} wait, {report['buffer/running']} run, {report['buffer/queued']} queued, "
        f"{report['buffer/bytes'] / 1e6:.1f} MB; {report['duplicates']} duplicates, {report['refused']} refused{since}",
    }
    if report["evaluations"]:
        newest = report["evaluations"][-1]
        facts["held-out"] = f"{newest['reward']:.3f} (version {newest['version']})"
    if row:
        idle = f"learner {row['train/idle_share']:.0%}, actors {row.get('rollout/idle_share', 0.0):.0%}"
        facts["last step"] = f"reward {row.get('reward/mean', float('nan')):.3f}, idle: {idle}"
    return Group(output.facts(facts), "", _actors(report))


def _actors(report: dict[str, Any]) -> Table:
    columns = ("actor", "version", "behind", "groups", "sequences", "tokens", "busy", "heard of")
    table = output.table("", *columns)
    for name, actor in sorted(report["actors"].items()):
        stats, version = actor["stats"], actor["version"]
        wall = stats.get("whole:rollout/idle_share", 0.0)  # since the first lease
        busy = f"{1.0 - stats.get('part:rollout/idle_share', 0.0) / wall:.0%}" if wall else "-"
        table.add_row(
            f"{name} ({actor['timed_out']} leases timed out)" if actor["timed_out"] else name,
            str(version) if version >= 0 else "none",
            str(report["version"] - version) if version >= 0 else "-",
            str(actor["running"]),
            f"{stats.get('now:rollout/running', 0):.0f}",
            f"{stats.get('sum:rollout/sampled_tokens', 0):,.0f}",
            busy if actor["engine"] == "serving" else actor["engine"],
            f"{actor['silent_seconds']:.1f} s ago",
        )
    return table


def follow(running: Running, args: argparse.Namespace) -> None:
    """Show or write the status as asked: once, or until the run ends."""
    console, steps = output.console(), running.config.run.steps
    if args.json:
        output.write_json(args.json, running.look())
    elif not console.is_terminal:
        console.print(render(running.look(), steps), markup=False)
    else:
        with Live(console=console, auto_refresh=False) as live:
            while running.is_there():
                live.update(render(running.look(), steps), refresh=True)
                time.sleep(REFRESH_SECONDS)


def main(argv: list[str] | None = None) -> int:
    parser = command("status", "Shows waiting processes and the progress of a run.")
    add_arguments(parser)
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for the status, once (-: standard output)")
    args = parser.parse_args(argv)
    with refusing(BusError), contextlib.suppress(KeyboardInterrupt):
        if is_going_on(args.run) or not (summary := summary_of(args.run)):
            with contextlib.closing(Running(args.run, args.keys)) as running:
                follow(running, args)
        elif args.json:
            output.write_json(args.json, summary)
        else:
            print_summary(summary, args.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
