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
SLOW = {
    "actors/agents/test_programs.py": "starts programs",
    "actors/test_openenv.py": "starts servers",
    "actors/test_batch_invariant.py": "compares many decodes",
    "actors/test_judge.py": "waits for judges",
    "actors/test_progress.py": "waits",
    "actors/test_ragged_attention.py": "compiles",
    "actors/test_reward_pool.py": "starts processes",
    "actors/test_tools.py": "starts processes",
    "areal_like/test_forks.py": "starts processes",
    "areal_like/test_keys.py": "waits for sockets",
    "areal_like/test_launch.py": "starts processes",
    "areal_like/test_ray_cluster.py": "starts processes",
    "areal_like/weights/test_history.py": "many histories",
    "areal_like/weights/test_hostile.py": "many changed bytes",
    "areal_like/weights/test_server.py": "waits",
    "buffer/test_hostile_peers.py": "many messages",
    "buffer/test_histories.py": "many histories",
    "learners/test_distillation.py": "starts servers",
    "learners/test_learner.py": "trains",
    "learners/test_learner_losses.py": "trains",
    "learners/test_loading.py": "starts processes",
    "learners/test_prefixes.py": "trains",
    "learners/test_published_parts.py": "starts processes",
    "learners/test_ranks.py": "starts processes",
    "learners/test_real_models.py": "trains",
    "learners/test_sharding.py": "starts processes",
    "tasks/test_code.py": "starts sandboxes",
    "tasks/test_generated.py": "many prompts",
    "tasks/test_length_trace.py": "starts processes",
    "tasks/test_reasoning_gym.py": "imports the package",
    "tasks/test_sandbox.py": "starts sandboxes",
    "tasks/test_verifiers.py": "imports the package",
}
"""Files that take more than three seconds → why. A new one that does belongs here."""

LONG = (
    "tests/slurm/",
    "tests/integration/test_documented_commands.py",
    "tests/integration/test_ray.py",
    "tests/integration/test_process_life.py",
    "tests/integration/test_live_runs.py",
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
