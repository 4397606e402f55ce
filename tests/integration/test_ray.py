"""Real Ray: a cluster of a few nodes on this machine, runs that `launcher=ray` places on it, and deaths of parts."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_like.launch.children import RestartLimits
from areal_like.launch.outcome import RunFailed
from areal_like.launch.plan import RoleSpec
from areal_like.launch.ray import RayLauncher
from scripts.ledger import audit
from tests.integration.living import Run, train
from tests.integration.runs import summary

pytestmark = pytest.mark.integration

TIMED = ["engine=timed", "learner=timed", "learner.base=0.2", "run.target_reward=null", "eval.prompts=4"]
TIMED += ["eval.every=0", "actors.count=1", "run.trackers=[]"]
NODES, CPUS, GPUS = 2, 3, 4
"""Of the cluster, and of each node, independent of the machine. Each node costs seconds of processor time."""
CORE = [RoleSpec("buffer", "buffer.main", 1, True), RoleSpec("learner", "learners.main", 1, True)]


ATTEMPTS = 3


def raylets() -> list[psutil.Process]:
    """This process's raylets, the newest last."""
    found = [each for each in psutil.Process().children() if each.name() == "raylet"]
    return sorted(found, key=psutil.Process.create_time)


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Like `get_node`, but waits as long as the raylet runs: Ray waits 30 s, too few on a busy machine."""

    def get(*arguments: Any) -> Any:
        raylet = raylets()[-1]
        while True:
            with contextlib.suppress(RuntimeError):
                return get_node(*arguments)
            if not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE:
                raise ChildProcessError("the raylet has ended")
            time.sleep(0.2)

    return get


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    from ray._private import services
    from ray.cluster_utils import Cluster

    class PatientCluster(Cluster):
        """A raylet ends by itself if its agent takes more than 15 s to start (a constant of Ray's): start another."""

        def add_node(self, *arguments: Any, **options: Any) -> Any:
            for _ in range(ATTEMPTS - 1):
                with contextlib.suppress(ChildProcessError):
                    return super().add_node(*arguments, **options)
                if self.head_node is None:
                    for each in psutil.Process().children():
                        if each.name() == "gcs_server":
                            each.kill()
            return super().add_node(*arguments, **options)

    services.get_node = patient(services.get_node)
    # Workers' niceness: Ray's default is 15, and a step took 5 s beside other tests instead of 0.2 s.
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
    os.environ |= quiet
    head = {"num_cpus": CPUS, "num_gpus": GPUS, "include_dashboard": False}
    head |= {"include_log_monitor": False, "no_monitor": True}  # nobody listens
    cluster = PatientCluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class RayRun(Run):
    """`scripts.train` with `launcher=ray`."""

    def __init__(self, cluster: Any, place: Path, *overrides: str):
        ours = ["launcher=ray", f"launcher.address={cluster.address}", "--plain"]
        super().__init__(place, *ours, *overrides, fresh=True)

    def gpus(self) -> dict[str, int]:
        """Role → the number of GPUs that it sees."""
        found = {}
        for name, pid in self.roles().items():
            with contextlib.suppress(psutil.Error):
                seen = psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES", "")
                found[name] = len(set(seen.split(",")) - {""})
        return found


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., RayRun]]:
    """Start runs in one folder, on the whole cluster. A failed test's run must not keep resources of the next."""
    started: list[RayRun] = []
    for _ in range(NODES - len(cluster.list_all_nodes())):
        cluster.add_node(num_cpus=CPUS, num_gpus=GPUS)

    def begin(*overrides: str) -> RayRun:
        started.append(RayRun(cluster, tmp_path, *overrides))
        return started[-1]

    yield begin
    for run in started:
        run.close()


def places(strategy: str) -> dict[int, str]:
    """Bundle → node, of the only placement group in use."""
    import ray

    table = ray.util.placement_group_table().values()
    (group,) = [each for each in table if each["state"] != "REMOVED" and each["strategy"] == strategy]
    return group["bundles_to_node_id"]


def test_a_learner_of_two_ranks_trains_over_two_nodes(start: Callable[..., RayRun]) -> None:
    """Four processes do not fit on one node; the buffer and the ranks do. (Ranks on several nodes learn in
    `tests/slurm`.)"""
    small = ["engine=timed", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "groups_per_batch=2"]
    run = start(*small, "task.digits=2", "learner.ranks=2", "actors.count=1", "run.steps=4")
    run.until("its first step", run.steps)
    assert len(set(places("PACK").values())) == 1 and len(places("PACK")) == 3
    assert not set(places("SPREAD").values()) & set(places("PACK").values())
    found = run.finish()
    assert found["steps"] == 4 and found["staleness_max"] <= found["staleness_bound"] == 1
    assert (run.folder / "keys").is_dir() and not run.roles()
    logs = {path.name.partition(".")[0] for path in (run.folder / "logs").glob("*.*.log")}
    assert logs == {"buffer", "learner", "learner-1", "actor-0"}


def test_deaths_of_actors_are_survived_that_of_the_learner_ends_the_run_and_a_resume_has_lost_nothing(
    cluster: Any, start: Callable[..., RayRun]
) -> None:
    """An actor's process is killed, then a node of three, then the learner. Each process has GPUs of its own, as
    many as planned, also after a restart; those declared to Ray. (Resumed by local processes.)"""
    import ray

    cluster.add_node(num_cpus=CPUS, num_gpus=GPUS)
    knobs = [*TIMED, "actors.count=3", "actors.max_restarts=5", "buffer.keep_journal=true", "checkpoint.every=2"]
    run = start(*knobs, "run.steps=100000", "placement={learner: 0, actors: [1-6]}")
    run.until("its first steps", lambda: run.steps() > 5)
    assert run.gpus() == {"buffer": 0, "learner": 1, "actor-0": 2, "actor-1": 2, "actor-2": 2}
    run.kill("actor-1")
    run.until("its successor", lambda: "actor-1.2" in run.roles())
    core, actors = set(places("PACK").values()), places("SPREAD")
    assert len(set(actors.values())) == 3, "they are not spread"
    doomed = next(node for node in cluster.worker_nodes if node.node_id in set(actors.values()) - core)
    lost = [f"actor-{place}" for place, node in actors.items() if node == doomed.node_id]
    cluster.remove_node(doomed, allow_graceful=False)
    again = {name: 3 if name == "actor-1" else 2 for name in lost}
    run.until("those of the dead node", lambda: run.roles().keys() >= {f"{n}.{life}" for n, life in again.items()})
    run.until("GPUs for all", lambda: sorted(run.gpus().values()) == [0, 1, 2, 2, 2])
    done = run.steps()
    run.until("more steps", lambda: run.steps() > done + 8)
    run.kill("learner")
    assert run.end() == 1 and not run.roles(), run.text()
    assert "learner was killed by SIGKILL" in run.text() and f"resume={run.folder}" in run.text()
    assert len([node for node in ray.nodes() if node["Alive"]]) == NODES, "it has taken the cluster along"
    steps = run.steps() + 4
    train(run.folder.parent, "run", *knobs, f"run.steps={steps}", "placement=auto", f"resume={run.folder}")
    found = summary(run.folder)
    assert found["steps"] == steps and found["staleness_max"] <= 1
    assert not any(audit(run.folder).findings.values())


def test_a_run_that_finds_no_place_says_what_it_asked_for(start: Callable[..., RayRun], tmp_path: Path) -> None:
    """Until then it waits for Ray, rather than ask again and again: that took two processors."""
    import ray

    asked: list[None] = []
    launcher = RayLauncher(tmp_path, RestartLimits(0), learner_place={"GPU": 5}, ready_timeout=2.0)
    try:
        with pytest.raises(RunFailed, match=r"no place for buffer, learner for 2 s.* 5 GPU.*the cluster has 6 CPU"):
            launcher._reserve(CORE, lambda: asked.append(None))
    finally:
        for group in launcher._groups:
            ray.util.remove_placement_group(group)
    assert 0 < len(asked) < 10


def test_a_cluster_of_its_own_lets_in_nobody_else_and_ends_with_the_run(start: Callable[..., RayRun]) -> None:
    """Ray binds to all addresses of a host: any peer that reaches them could have it run anything."""
    run = start(*TIMED, "run.steps=100000", "launcher.address=local")
    run.until("its first step", run.steps)
    ours = psutil.Process(run.process.pid).children(recursive=True)
    (head,) = [each for each in ours if "gcs_server" in each.name()]
    assert head.environ()["RAY_AUTH_MODE"] == "token" and len(head.environ()["RAY_AUTH_TOKEN"]) == 64
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130 and not run.roles()
    psutil.wait_procs(ours, timeout=60)
    assert not [each for each in ours if each.is_running()]
