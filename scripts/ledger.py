"""Where every prompt of a run went: `python -m scripts.ledger RUN [--plot FILE]`.

Reads the run's journal: how many groups were trained, filtered, dropped (why), or are still active; and lengths and
rewards of those that were rolled out. If untrained groups are biased towards long or short answers, the ratio of mean
lengths shows it. A mixture of tasks has a table for each task as well. If the journal was cut at a checkpoint
(`buffer.keep_journal=false`), the counts are complete, and the distributions cover the time since then.

Below the table: how much shorter the trained responses are than all offered ones, including those that wait in a queue
or were cut (`scripts.analysis.offered` estimates the whole length of a cut one). `--steps N` looks at the first N train
steps only: with tail batching the queue holds the long prompts during a run, and is empty at its end.

Where prompts were drawn again, or groups were left out, two more tables show the bias of sampler and filter: draws by
the prompt's difficulty, against uniform draws, and groups by their own (`scripts.analysis.difficulty`).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from areal_like.run import checkpoints
from areal_like.wire.groups import Head
from buffer.events import Admit, Drop, Event, Filter, Finish, LeaveOut, Open, Snapshot
from buffer.journal import JournalError, Record, Recorded
from buffer.recovery import standing
from buffer.results import Results
from buffer.staleness import Bound
from buffer.store import Entry, Stage, Store

from .analysis import difficulty
from .analysis.offered import Offer, lengths
from .console import output
from .console.arguments import command, picture, refuse

TRAINED, ACTIVE = "trained", "active"
MOST_REASONS = 10


@dataclass
class Account:
    """One fate: `count` groups; lengths (tokens) and rewards of the samples of those that had been rolled out; samples
    that were `cut` because others were faster, and reasons why some were `redrawn`: crashes of their rewards or
    agents."""

    count: int = 0
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cut: int = 0
    redrawn: list[str] = field(default_factory=list)

    def add(self, head: Head | None, cut: int = 0, redrawn: Iterable[str] = ()) -> None:
        self.count += 1
        if head:
            self.lengths += head.lengths
            self.rewards += head.rewards
        self.cut += cut
        self.redrawn += redrawn


class Books:
    """The fates of all groups, from the records of a journal in order."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.tasks: dict[str, dict[str, Account]] = {}  # the same of each task of a mixture
        self.offers: list[Offer] = []
        self.admitted: list[tuple[int, int, int]] = []  # group, row of the task, samples that were started
        results = Results()
        self.difficulty = difficulty.Tally(results)
        self._store = Store(Bound(math.inf, 1), results=results)
        self._redrawn: dict[int, list[str]] = {}

    def read(self, records: Iterable[Record], steps: float = math.inf) -> dict[str, Account]:
        """All records (read twice), or those until this many batches were trained."""
        batches = 0
        for number, (event, _) in enumerate(standing(records)):
            if isinstance(event, Snapshot) and number:
                continue  # the journal also has the records before it
            self._enter(event)
            self._store.apply(event)
            batches += isinstance(event, Finish)
            if batches >= steps:
                break
        for entry in self._store.entries.values():
            self._close(ACTIVE, entry)
        return self.accounts

    def account(self, fate: str, task: str = "") -> Account:
        """The account of a fate: of all groups, or of those of a task."""
        return (self.tasks.setdefault(task, {}) if task else self.accounts).setdefault(fate, Account())

    def _enter(self, event: Event) -> None:
        """Count an event before it is applied."""
        entries = self._store.entries
        match event:
            case Admit():
                self.admitted.append((event.id, event.row, event.launch))
                self.difficulty.admitted(event)
            case Open():
                self.difficulty.opened()
            case LeaveOut():
                self._redrawn[event.id] = event.redrawn
            case Drop():
                self._close(f"dropped: {event.reason}", entries[event.id])
            case Filter():
                self._close(f"filtered: {event.reason}", entries[event.id])
            case Finish():
                for entry in self._store.of(Stage.SERVED):
                    if entry.batch == event.batch:
                        self._close(TRAINED, entry)
            case Snapshot():  # a journal may begin with one: its counts replace the events before it
                self._carry_over(event)

    def _carry_over(self, event: Snapshot) -> None:
        self.account(TRAINED).count = event.trained
        for kind, counts in (("filtered", event.filtered), ("dropped", event.dropped)):
            for reason, count in counts.items():
                self.account(f"{kind}: {reason}").count = count
        for task, fates in event.tasks.items():
            for fate in fates.keys() - {"admitted"}:
                self.account(fate, task).count = fates[fate]

    def _close(self, fate: str, entry: Entry) -> None:
        """Record a group's fate."""
        redrawn = self._redrawn.pop(entry.id, ())
        self.difficulty.left(entry, fate == TRAINED, fate.startswith("filtered"))
        for task in {"", entry.task}:
            self.account(fate, task).add(entry.head, len(entry.cut), redrawn)
        if entry.head:
            self.offers.append(Offer(entry.head.lengths, list(entry.cut)))
        elif entry.partial:
            pairs = list(zip(entry.partial.lengths.tokens, entry.partial.lengths.cut, strict=True))
            self.offers.append(Offer([n for n, cut in pairs if not cut], [n for n, cut in pairs if cut]))


def table(accounts: dict[str, Account], title: str = "ledger") -> Table:
    """A row per fate; the last row is the sum: the number of groups admitted."""
    more = [name for name in ("cut", "redrawn") if any(getattr(account, name) for account in accounts.values())]
    found = output.table(
        title, "fate", "groups", "samples", *more, "length mean", "p50", "p95", "reward mean", "length / trained"
    )
    trained = np.mean(accounts[TRAINED].lengths) if accounts.get(TRAINED, Account()).lengths else np.nan
    for fate, account in sorted(accounts.items(), key=lambda item: -item[1].count):
        cells = ["-"] * 5
        if account.lengths:
            mean, quantiles = np.mean(account.lengths), np.quantile(account.lengths, [0.5, 0.95])
            cells = [f"{mean:.1f}", *(f"{q:.0f}" for q in quantiles), f"{np.mean(account.rewards):.3f}"]
            cells.append("-" if np.isnan(trained) else f"{mean / trained:.2f}")
        counts = [str(account.cut if name == "cut" else len(account.redrawn)) for name in more]
        found.add_row(fate, str(account.count), str(len(account.lengths)), *counts, *cells)
    found.add_row("admitted", str(sum(account.count for account in accounts.values())), *[""] * (6 + len(more)))
    return found


def reasons(accounts: dict[str, Account]) -> list[str]:
    """Why samples were drawn again, most frequent first, a line for each."""
    told = Counter(reason for account in accounts.values() for reason in account.redrawn)
    lines = [f"  {count} × {reason}" for reason, count in told.most_common(MOST_REASONS)]
    return [*lines, f"  and {len(told) - MOST_REASONS} other reasons"] if len(told) > MOST_REASONS else lines


def bias(accounts: dict[str, Account], offers: list[Offer]) -> float:
    """Mean length of the trained responses over that of all offered ones, minus 1; NaN without any."""
    trained, offered = accounts.get(TRAINED, Account()).lengths, lengths(offers)
    return float(np.mean(trained) / offered.mean() - 1) if len(trained) and len(offered) else math.nan


def plot(accounts: dict[str, Account], offers: list[Offer], path: Path) -> None:
    """Histograms of length and reward, one line per fate, and one of the lengths of all offered responses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for axis, values in ((left, "lengths"), (right, "rewards")):
        known = {fate: getattr(account, values) for fate, account in accounts.items() if account.lengths}
        edges = np.histogram_bin_edges(np.concatenate([*known.values(), [0]]), bins=40)
        for fate, numbers in known.items():
            axis.hist(numbers, bins=edges, density=True, histtype="step", label=f"{fate} ({accounts[fate].count})")
    if any(offer.cut for offer in offers):
        whole = lengths(offers)
        left.hist(whole, bins=np.histogram_bin_edges(whole, bins=40), density=True, color="0.85", label="offered")
    left.set_xlabel("response length (tokens)")
    left.set_ylabel("density of samples")
    right.set_xlabel("reward")
    left.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = command("ledger", __doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--steps", type=int, help="only the first N train steps")
    parser.add_argument("--plot", type=picture, help="write a picture of the distributions here")
    args = parser.parse_args()
    try:
        records = Recorded(args.run / "journal", whole=True)
        first = next(iter(records), None)
        if first is None:
            refuse(f"{args.run} has no journal (buffer.journal=off, or no run folder)")
        books = Books()
        accounts = books.read(records, args.steps or math.inf)
    except (JournalError, OSError) as error:
        refuse(error)
    console = output.console()
    console.print(table(accounts))
    for task, of_task in sorted(books.tasks.items()):
        console.print(table(of_task, f"ledger of {task}"))
    for each in difficulty.tables(books.difficulty.of):
        console.print(each, highlight=False)
    if told := reasons(accounts):
        console.print("samples drawn again, because")
        console.print("\n".join(told), highlight=False, markup=False)
    shorter = bias(accounts, books.offers)
    if not math.isnan(shorter):
        console.print(f"length of trained responses, against all that were rolled out: {shorter:+.1%}", highlight=False)
    if isinstance(first.event, Snapshot):
        step = checkpoints.latest(args.run)
        since = f"samples, lengths and rewards since step {step[0] if step else '?'} only"
        console.print(f"{since}; buffer.keep_journal keeps all")
    if args.plot:
        plot(accounts, books.offers, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
