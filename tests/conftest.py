"""For all tests: hypothesis has no deadline (a busy machine fails nothing); all processes are forked from one that has
imported torch, also with several workers.

It also lists the slow files. `scripts/test.sh --fast` leaves those out.
"""

import gc
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from areal_like.launch import forks
from areal_like.launch.outcome import nothing

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

TESTS = Path(__file__).parent
SLOW_IN = {
    "actors/agents": "programs",
    "actors": "decode_steps group_rewards progress reward_pool tools",
    "areal_like": "forks keys launch",
    "areal_like/weights": "codec history server",
    "buffer": "histories",
    "learners": "learner objective learner_losses prefixes ranks real_models sharding",
    "tasks": "code generated length_trace sandbox verifiers",
}
SLOW = {f"{folder}/test_{name}.py" for folder, names in SLOW_IN.items() for name in names.split()}
"""Files that take more than three seconds: they train, compile, wait, or start processes. A new one belongs here."""

LONG = (
    "tests/slurm/",
    "tests/integration/test_documented_commands.py",
    "tests/integration/test_ray.py",
    "tests/scripts/test_bench.py",
    "tests/faults/",
    "tests/buffer/test_histories.py",
    "tests/integration/",
    "tests/learners/",
)
"""Where files take long, the longest first; those that mostly wait (Slurm, Ray, faults) beside those that compute."""
multiprocessing.set_forkserver_preload([*forks.LIBRARIES, "tests.warm"])


gc.disable()  # what test modules import and define stays: nothing to look through meanwhile


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the fork server that all workers share. It imports torch while they do."""
    forks._start(SimpleNamespace(start=forkserver.ensure_running), nothing)
    node.workerinput["fork_server"] = forkserver._forkserver._forkserver_address


def pytest_configure(config: pytest.Config) -> None:
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        server = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = address, os.pipe()[1]
        server.ensure_running = lambda: None


def pytest_collection_finish() -> None:
    """From here on collect garbage, but not among imported objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow files. With several workers long files begin first, so that no worker is left with one in the end."""
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        items.sort(key=_place_in_line)


def _place_in_line(item: pytest.Item) -> int:
    return next((number for number, folder in enumerate(LONG) if item.nodeid.startswith(folder)), len(LONG))
