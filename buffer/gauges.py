"""What the buffer measures about the flow of groups: for the metrics of each train step and for the final report."""

import logging
import math
from collections import Counter, defaultdict

import numpy as np

from buffer.entries import Entry
from buffer.evaluation import RoundResult
from buffer.peers import Peers
from buffer.sizing import GroupLengths
from buffer.store import Store

log = logging.getLogger(__name__)
RATE_SECONDS = 1.0
MANY_DROPPED = 8
"""Finished groups that leave untrained between two train steps and are worth a warning, in batches."""
KEYS = {"filtered": "filter", "stale": "max_staleness or staleness_policy", "untrainable": "learner"}
"""Reason → the config's keys that decide about it."""


class Gauges:
    """Rates are measured between the batches of two train steps; means run over all samples served. A resume restarts
    these counts and those of the actors; `since_step`, reported with them, is the step at which it did."""

    def __init__(self) -> None:
        self.since_step = 0
        self.evaluations: list[RoundResult] = []
        self.trained_seconds: float | None = None
        self.tokens_pushed = 0
        self.refused = 0  # groups
        self._dropped, self._dropped_since = Counter[str](), 0  # finished groups, since that train step
        self._many_dropped = ""  # a diagnosis
        self.lease_timeouts = 0  # leases revoked because they made no progress
        self.reported = 0  # evaluations that batches carried
        self._staleness_sum = self._staleness_count = self._rate_tokens = 0
        self.rate_at = 0.0  # when the present rates began
        self.rates: dict[str, float] = {}
        self.measures_lengths = False  # for a scheduler that chooses sizes
        self.seen: list[GroupLengths] = []  # groups that ended or were broken off since the last batch was opened
        self.decisions: defaultdict[int, dict[str, float]] = defaultdict(dict)  # batch → metrics that explain it

    def levels(self, peers: Peers, store: Store, now: float) -> dict[str, object]:
        """The present counts and rates, for the metrics of a train step."""
        fleet, bound = peers.fleet, store.bound.max_staleness
        found: dict[str, object] = {**fleet.totals.metrics(actor.stats for actor in fleet)}
        found |= store.entries.levels() | store.counts.metrics(len(store.entries)) | self.rates
        found |= {"rollout/refused": self.refused, "rollout/lease_timeouts": self.lease_timeouts}
        found["rollout/tokens"] = self.tokens_pushed
        found |= {"rollout/actors": len(fleet), "seconds": peers.age(now), "buffer/bytes": store.bytes}
        return found | ({"staleness/bound": int(bound)} if math.isfinite(bound) else {})

    def note_evaluation(self, result: RoundResult | None, seconds: float) -> None:
        """A round of held-out prompts has ended with `result`, `seconds` after the first lease (None: it has not)."""
        if result:
            result["seconds"] = seconds
            log.info("held-out reward %.3f at version %d", result["reward"], result["version"])
            self.evaluations.append(result)

    def note_dropped(self, why: str, step: int, per_batch: int) -> None:
        """Count a finished group that leaves untrained after `step` steps, for `why` ("stale: detail", or "filtered:
        reason"). Warns of many (batches of `per_batch`)."""
        if self._dropped_since != step:
            self._dropped, self._dropped_since, self._many_dropped = Counter(), step, ""
        kind = why.partition(":")[0]
        self._dropped[why if kind == "filtered" else kind] += 1
        many, rest = divmod(self._dropped.total(), MANY_DROPPED * per_batch)
        if not rest and many:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._dropped.most_common(3))
            keys = " or ".join(key for kind, key in KEYS.items() if kind in counts)
            hint = f"; see {keys}" if keys else ""
            self._many_dropped = f"no batch since step {step}, and finished groups were left out ({counts}){hint}"
            if many.bit_count() == 1:
                log.warning("%s", self._many_dropped)

    def many_dropped(self, step: int) -> str:
        """Why no batch comes after `step` steps, although groups finish; "" where few were left out."""
        return self._many_dropped if self._dropped_since == step else ""

    @property
    def staleness_mean(self) -> float:
        return self._staleness_sum / max(1, self._staleness_count)

    def batch_info(self, entries: list[Entry], version: int, allowed: int, now: float) -> dict[str, object]:
        """Facts about a batch that only the buffer knows, and evaluations that ended since the last batch. Staleness
        counts only trained tokens: versions `allowed` or newer, published while a sample was in flight, or waited."""
        flight = queue = samples = 0
        for entry in entries:
            assert entry.head is not None
            for oldest, count in entry.head.oldest_tokens(allowed).items():
                flight += (entry.version_at_push - oldest) * count
                queue += (version - entry.version_at_push) * count
                samples += count
        self._staleness_sum += flight + queue
        self._staleness_count += samples
        fresh, self.reported = self.evaluations[self.reported :], len(self.evaluations)
        return {
            "evaluations": fresh,
            "staleness/in_flight_mean": flight / max(1, samples),
            "staleness/in_queue_mean": queue / max(1, samples),
            "buffer/flight_seconds": sum(e.pushed_at - e.admitted_at for e in entries) / len(entries),
            "buffer/queue_seconds": sum(now - e.pushed_at for e in entries) / len(entries),
            **by_task(entries),
        }

    def measure_rates(self, now: float) -> None:
        """Tokens per second pushed since an earlier call, at least RATE_SECONDS ago: batches come in bursts."""
        if self.rates and now - self.rate_at < RATE_SECONDS:
            return
        rate = (self.tokens_pushed - self._rate_tokens) / max(1e-9, now - self.rate_at)
        self.rate_at, self._rate_tokens = now, self.tokens_pushed
        self.rates = {"rollout/since_step": self.since_step, "rollout/tokens_per_second": rate}


def by_task(entries: list[Entry]) -> dict[str, float]:
    """For each task of a mixture: its groups in a batch, their mean reward and mean length (tokens)."""
    found: dict[str, float] = {}
    for task in sorted({entry.task for entry in entries if entry.task}):
        heads = [entry.head for entry in entries if entry.task == task and entry.head]
        found[f"groups/{task}"] = len(heads)
        found[f"reward/{task}"] = float(np.mean([reward for head in heads for reward in head.rewards]))
        found[f"response_length/{task}"] = float(np.mean([length for head in heads for length in head.lengths]))
    return found
