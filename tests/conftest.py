"""For all tests: hypothesis has no deadline (a busy machine fails nothing); runs share one process that imported torch.

It also lists the slow files. `scripts/test.sh --fast` leaves those out.
"""

import gc
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import settings

from areal_like.launch.forks import LIBRARIES

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

TESTS = Path(__file__).parent
SLOW_IN = {
    "actors/agents": "programs",
    "actors": "openenv batch_invariant judge progress ragged_attention reward_pool tools",
    "areal_like": "forks keys launch ray_cluster",
    "areal_like/weights": "history hostile server",
    "buffer": "hostile_peers histories",
    "learners": "distillation learner learner_losses loading prefixes published_parts ranks real_models sharding",
    "tasks": "code generated length_trace reasoning_gym sandbox verifiers",
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
multiprocessing.set_forkserver_preload([*LIBRARIES, "tests.warm"])  # one server per process that runs tests


gc.disable()  # what test modules import and define stays: nothing to look through meanwhile


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
