"""Who worked and who waited: `python -m scripts.timeline RUN [--plot F] [--trace F] [--begin S] [--end S]`.

Prints each process's share of time for each activity, and for waiting. `--plot` draws it; `--trace` writes trace events
for https://ui.perfetto.dev. Works during a run, too. It does not align the clocks of several hosts.

An actor generates, evaluates (held-out prompts), or has an update of its weights; a learner trains, takes gradients of
groups while others still run (`learner.stream`), publishes, or writes a checkpoint. The rest is waiting: for another
process, or for the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_like.run.spans import Span, read

from .console import output
from .console.arguments import command, new_file, picture, refuse
from .plotting.plot import Plot
from .plotting.timelines import ACTIVITIES

WAITS = "waits"
Timeline = dict[str, list[Span]]
"""Role → spans, in seconds since the first of them, in order."""


def timeline(run: Path, begin: float = 0.0, end: float = math.inf) -> Timeline:
    """The recorded spans of a run between two times. Raises ValueError if there are none."""
    found = {role: spans for role, spans in read(run).items() if spans}
    if not found:
        raise ValueError(f"{run} has no spans: is this a run folder, and has the run started?")
    first = min(spans[0].begin for spans in found.values())
    cut = {role: [_cut(span, first, begin, end) for span in spans] for role, spans in found.items()}
    return {role: [span for span in spans if span.end > span.begin] for role, spans in sorted(cut.items(), key=_place)}


def _cut(span: Span, first: float, begin: float, end: float) -> Span:
    return Span(span.name, max(span.begin - first, begin), min(span.end - first, end))


def _place(entry: tuple[str, Any]) -> tuple[bool, int, str]:
    """Actors by number, then the others."""
    role = entry[0]
    number = role.rpartition("-")[2]
    return not role.startswith("actor"), int(number) if number.isdigit() else 0, role


def window(found: Timeline) -> tuple[float, float]:
    """Begin and end of all spans."""
    spans = [span for spans in found.values() for span in spans]
    return min((span.begin for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def shares(found: Timeline) -> dict[str, dict[str, float]]:
    """Role → activity → share of the time between the first begin and the last end; `waits`: in no span at all."""
    begin, end = window(found)
    total = max(end - begin, 1e-9)
    table = {}
    for role, spans in found.items():
        row = {name: sum(s.end - s.begin for s in spans if s.name == name) / total for name in {s.name for s in spans}}
        row[WAITS] = 1.0 - _covered(spans) / total
        table[role] = row
    return table


def _covered(spans: list[Span]) -> float:
    """Seconds covered by at least one span. `spans` are ordered by their begin."""
    covered, until = 0.0, -math.inf
    for span in spans:
        covered += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return covered


def as_plot(found: Mapping[str, Timeline], title: str, note: str = "") -> Plot:
    """A panel per run. Times to a tenth of a millisecond, which is more than a picture shows."""
    panels = {
        name: {
            role: [(span.name, round(span.begin, 4), round(span.end, 4)) for span in spans]
            for role, spans in one.items()
        }
        for name, one in found.items()
    }
    return Plot("timelines", title, panels, x="seconds", note=note)


def trace_events(found: Timeline) -> list[dict[str, Any]]:
    """In the Trace Event Format: complete events ("X") with times in microseconds, a process per role, a thread per
    activity. Events of one thread may be nested, but must not overlap otherwise."""
    events: list[dict[str, Any]] = []
    for number, (role, spans) in enumerate(found.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": role}})
        threads = {name: thread for thread, name in enumerate(dict.fromkeys([*ACTIVITIES, *(s.name for s in spans)]))}
        for name in {span.name for span in spans}:
            place = {"pid": number, "tid": threads[name]}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        for span in spans:
            times = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
            events.append({"ph": "X", "name": span.name, "pid": number, "tid": threads[span.name], **times})
    return events


def show(found: Timeline, console: Console) -> None:
    names = [name for name in ACTIVITIES if any(span.name == name for spans in found.values() for span in spans)]
    begin, end = window(found)
    table = output.table(f"{end - begin:.1f} s: share of the time", "", *names, WAITS)
    for role, row in shares(found).items():
        cells = [f"{row[name]:.0%}" if name in row else "" for name in (*names, WAITS)]
        table.add_row(role, *cells)
    console.print(table)


def main() -> None:
    parser = command("timeline", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--plot", type=picture, help="draw the timeline here (png, pdf, svg)")
    parser.add_argument("--trace", type=new_file, help="write trace events here (json), for https://ui.perfetto.dev")
    parser.add_argument("--begin", type=float, default=0.0, help="seconds after the first span (default: 0)")
    parser.add_argument("--end", type=float, default=math.inf, help="seconds after the first span (default: the last)")
    args = parser.parse_args()
    try:
        found = timeline(args.run, args.begin, args.end)
    except ValueError as error:
        refuse(error)
    show(found, output.console())
    if args.plot:
        from .plotting.drawing import picture as draw

        draw(as_plot({"": found}, f"Who worked and who waited: {args.run.name}"), args.plot)
    if args.trace:
        args.trace.write_text(json.dumps({"traceEvents": trace_events(found)}) + "\n")


if __name__ == "__main__":
    main()
