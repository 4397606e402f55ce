"""Words for what a run has done: faults, the ledger, the summary."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

EXPECTED = ("end of run", "stale")
"""Reasons to drop a group that are not faults."""
FAULTS = {
    "train/nonfinite_steps": "train steps without a finite loss or gradient",
    "served/alarms": "alarms: an engine computes other logprobs than the learner",
    "rewards/timeouts": "verifier time-outs (they earn 0)",
    "rewards/errors": "errors of verifiers",
    "rewards/resamples": "samples drawn again after their reward crashed",
}


def faults(row: dict[str, Any]) -> str:
    """Faults so far, from a row of metrics or a status; empty if none."""
    found = [f"{row[key]:.0f} {text}" for key, text in FAULTS.items() if row.get(key)]
    for key, count in row.items():
        kind, _, reason = key.rpartition("/")
        if kind == "refused":
            found.append(f"{count} groups refused ({reason})")
        elif kind == "ledger/dropped" and reason not in EXPECTED:
            found.append(f"{count} groups dropped ({reason})")
    return ", ".join(found)


def number(row: dict[str, Any], key: str, form: str) -> str:
    """A number of a row in the form of `str.format`; "-" if it is not there."""
    return "-" if row.get(key) is None else form.format(row[key])


def ledger_line(ledger: dict[str, Any]) -> str:
    """`admitted 336 = trained 320 + dropped 16 (end of run)`."""
    parts = [f"trained {ledger['trained']}"]
    for kind in ("filtered", "dropped"):
        parts += [f"{kind} {count} ({reason})" for reason, count in ledger[kind].items()]
    parts += [f"active {ledger['active']}"] if ledger["active"] else []
    return f"admitted {ledger['admitted']} = {' + '.join(parts)}"


def ledger_lines(ledger: dict[str, Any]) -> dict[str, str]:
    """`ledger_line` under "groups", and under "groups of NAME" for each task of a mixture."""
    tasks = {f"groups of {task}": ledger_line(each) for task, each in ledger.get("tasks", {}).items()}
    return {"groups": ledger_line(ledger), **tasks}


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The summary for a person: one line per fact, never cut, so that paths can be copied."""
    show = lambda key, form: number(summary, key, form)  # noqa: E731
    steps = f"{show('steps', '{}')} in {show('seconds', '{:.1f}')} s"
    trained = f"{show('trained_tokens_per_second', '{:,.0f}')} trained"
    if "loss_after" in summary:
        lines = {
            "held-out loss": f"{show('loss_before', '{:.3f}')} before, {show('loss_after', '{:.3f}')} after, in nats",
            "train steps": steps,
            "tokens per second": trained,
        }
    else:
        since = f" since the resume at step {summary['since_step']}" if summary.get("since_step") else ""
        lines = {
            "held-out reward": f"{show('reward_before', '{:.3f}')} before, {show('reward_after', '{:.3f}')} after",
            "train steps": steps,
            "staleness": f"mean {show('staleness_mean', '{:.2f}')}, max {show('staleness_max', '{}')}, "
            f"bound {show('staleness_bound', '{}')}",
            "tokens per second": f"{show('tokens_per_second', '{:,.0f}')} rolled out{since}, {trained}",
            "idle share": f"actors {show('actor_idle_share', '{:.0%}')}{since}, "
            f"learner {show('learner_idle_share', '{:.0%}')}",
            **(ledger_lines(summary["ledger"]) if "ledger" in summary else {}),
            "actor restarts": str(summary.get("restarts", 0)),
            **{f"{name} was left out": words.splitlines()[0] for name, words in summary.get("left_out", {}).items()},
        }
    lines |= {
        "faults": faults(summary.get("faults", {})),
        "logs": str(folder / "logs"),
        "report": f"areal-like report {shlex.quote(str(folder))}",
        "model": str(folder / "checkpoints" / "final"),
    }
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"\nfinished: {show('stopped_because', '{}')}", style="bold", markup=False)
    for name, text in lines.items():
        if text:
            console.print(f"  {name:<18}{text}", markup=False)
