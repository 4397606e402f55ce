"""A run's numbers for Prometheus: `areal-like status RUN --prometheus 9400`. Needs the extra `prometheus`.

Every scrape asks the buffer once. All names begin with `areal_like_`; if the buffer does not answer, `areal_like_up` is
0, and nothing else is exported."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from areal_like.config.run_config import ConfigError

from .running import Running

LOOK_SECONDS = 1.0
COUNTERS = ("steps", "duplicates", "refused", "rollout/tokens")
"""Numbers of a report that only rise; the others are gauges."""
OF_ACTORS = ("version", "running", "silent_seconds")

Sample = tuple[str, dict[str, str], float]
"""Name, labels, value."""


def numbers(found: dict[str, Any]) -> Iterator[Sample]:
    """All numbers of `Running.look`."""
    report, ledger = found["report"], found["report"]["ledger"]
    yield from ((key, {}, value) for key, value in report.items() if isinstance(value, int | float))
    if report["evaluations"]:
        yield "held_out_reward", {}, report["evaluations"][-1]["reward"]
    for fate in ("admitted", "trained"):
        yield f"groups_{fate}_total", {}, ledger[fate]
    for fate in ("filtered", "dropped"):
        yield from ((f"groups_{fate}_total", {"reason": why}, count) for why, count in ledger[fate].items())
    for name, actor in report["actors"].items():
        yield from ((f"actor_{key}", {"actor": name}, actor[key]) for key in OF_ACTORS)
    for key, value in found["step"].items():
        if isinstance(value, int | float):
            yield "train", {"metric": key}, value


class Collector:
    """`prometheus_client` calls this at each scrape, possibly from several threads: they take turns."""

    def __init__(self, running: Running):
        self.running, self._turn = running, threading.Lock()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._turn:
            try:
                found = [("up", {}, 1.0), *numbers(self.running.look())]
            except ConfigError:
                found = [("up", {}, 0.0)]
        families: dict[str, Any] = {}
        for name, labels, value in found:
            counts = name in COUNTERS or name.endswith("_total")
            full = f"areal_like_{name.replace('/', '_')}"
            if full not in families:
                kind = CounterMetricFamily if counts else GaugeMetricFamily
                families[full] = kind(full, f"{name} of the run", labels=list(labels))
            families[full].add_metric(list(labels.values()), float(value))
        yield from families.values()


def serve(running: Running, address: str, port: int) -> None:
    """Serve until the run ends. Raises ConfigError without prometheus_client, OSError if the port is taken."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError('--prometheus needs prometheus_client: pip install "areal_like[prometheus]"') from None
    registry = CollectorRegistry()
    registry.register(Collector(running))
    server, thread = start_http_server(port, addr=address, registry=registry)
    print(f"metrics are at http://{address}:{server.server_port}/metrics", flush=True)
    try:
        while running.is_there():
            time.sleep(LOOK_SECONDS)
    finally:
        server.shutdown()
        thread.join()
