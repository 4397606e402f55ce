"""A run's numbers for Prometheus: `areal-like status RUN --prometheus 9400`. Needs the extra `prometheus`.

Every scrape asks the buffer once. Totals are counters, everything else is a gauge; all names begin with `areal_like_`.
If the buffer does not answer, `areal_like_up` is 0, and nothing else is exported."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

from areal_like.config.run_config import ConfigError

from .running import View

LOOK_SECONDS = 1.0
PREFIX = "areal_like_"
GAUGES = {
    "version": "version of the newest weights announced to the actors",
    "staleness_mean": "mean staleness of all samples served, in versions",
    "staleness_max": "largest staleness served, in versions",
    "staleness_bound": "bound of the staleness, in versions",
    "buffer/bytes": "payload bytes held",
    "rollout/tokens_per_second": "tokens pushed per second, between the last two batches",
    "rollout/idle_share": "share of their time in which the actors' engines were idle",
}
COUNTERS = {
    "steps": "train steps done",
    "duplicates": "groups that were pushed again",
    "refused": "messages refused",
    "rollout/tokens": "tokens pushed",
}
STAGES = ("queued", "running", "waiting", "served")


class Collector:
    """`prometheus_client` calls this at each scrape, possibly from several threads: they take turns."""

    def __init__(self, view: View):
        self.view, self._turn = view, threading.Lock()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        with self._turn:
            try:
                found = self.view.look()
            except ConfigError:
                found = None
        yield GaugeMetricFamily(f"{PREFIX}up", "whether the buffer answers", value=float(found is not None))
        if found:
            yield from _totals(found["report"])
            yield from _ledger(found["report"])
            yield from _actors(found["report"])
            yield from _step(found["step"])


def _totals(report: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for kinds, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for key, meaning in kinds.items():
            if report.get(key) is not None:
                yield family(PREFIX + key.replace("/", "_"), meaning, value=float(report[key]))
    stages = GaugeMetricFamily(f"{PREFIX}groups", "active groups", labels=["stage"])
    for stage in STAGES:
        stages.add_metric([stage], report.get(f"buffer/{stage}", 0))
    yield stages
    waits = "1 while a process waits for another one"
    yield GaugeMetricFamily(f"{PREFIX}waiting", waits, value=float(bool(report["waits"])))
    if report["evaluations"]:
        newest = float(report["evaluations"][-1]["reward"])
        yield GaugeMetricFamily(f"{PREFIX}held_out_reward", "the newest evaluation", value=newest)


def _ledger(report: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    ledger = report["ledger"]
    yield CounterMetricFamily(f"{PREFIX}groups_admitted", "groups admitted", value=ledger["admitted"])
    yield CounterMetricFamily(f"{PREFIX}groups_trained", "groups trained", value=ledger["trained"])
    for kind in ("filtered", "dropped"):
        family = CounterMetricFamily(f"{PREFIX}groups_{kind}", f"groups {kind}, by reason", labels=["reason"])
        for reason, count in ledger[kind].items():
            family.add_metric([reason], count)
        yield family
    if tasks := ledger.get("tasks"):
        family = CounterMetricFamily(f"{PREFIX}groups_of_task", "groups by task and fate", labels=["task", "fate"])
        for task, counts in tasks.items():
            for fate in ("admitted", "trained"):
                family.add_metric([task, fate], counts[fate])
            for kind in ("filtered", "dropped"):
                family.add_metric([task, kind], sum(counts[kind].values()))
        yield family


def _actors(report: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    meanings = {
        "version": "version of the weights that the actor has applied",
        "running": "groups that it works on",
        "silent_seconds": "seconds since its last message",
    }
    for key, meaning in meanings.items():
        family = GaugeMetricFamily(f"{PREFIX}actor_{key}", meaning, labels=["actor"])
        for name, actor in report["actors"].items():
            family.add_metric([name], float(actor[key]))
        yield family


def _step(row: dict[str, Any]) -> Iterator[Any]:
    """Every scalar of the last train step, by its own name."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"{PREFIX}train", "of the last train step", labels=["metric"])
    for key, value in row.items():
        if isinstance(value, int | float) and math.isfinite(value):
            family.add_metric([key], float(value))
    yield family


def serve(view: View, address: str, port: int) -> None:
    """Serve until the run ends. Raises ConfigError without prometheus_client, OSError if the port is taken."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError('--prometheus needs prometheus_client: pip install "areal_like[prometheus]"') from None
    registry = CollectorRegistry()
    registry.register(Collector(view))
    server, thread = start_http_server(port, addr=address, registry=registry)
    print(f"metrics are at http://{address}:{server.server_port}/metrics", flush=True)
    try:
        while view.running.rendezvous() == view.running.offered:
            time.sleep(LOOK_SECONDS)
    finally:
        server.shutdown()
        thread.join()
