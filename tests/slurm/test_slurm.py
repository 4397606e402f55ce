"""Runs, ablations and faults on a real Slurm cluster of three nodes on this machine (`tests.slurm.cluster`)."""

import contextlib
import csv
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from areal_like.config.registry import build
from areal_like.launch.children import limits
from areal_like.launch.plan import plan
from scripts.ledger import audit
from tests import placed
from tests.integration.living import Run, train
from tests.integration.runs import REPOSITORY, rows, summary
from tests.integration.test_ablate import TIMED as STUDY
from tests.slurm.cluster import Cluster, missing

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(missing()), reason=missing())]

TIMED = ["engine=timed", "learner=timed", "learner.base=0.2", "run.target_reward=null", "eval.prompts=4"]
TIMED += ["eval.every=0", "run.trackers=[]"]
"""Few steps a second: most of the time Slurm is waited for, and runs should leave the processors alone."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that "all nodes" see, with a short path for the daemons' sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def place(shared: Path) -> Path:
    """A folder of one test's own: a second try must not find the run of the first."""
    return Path(tempfile.mkdtemp(dir=shared))


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    (shared / "cluster").mkdir()
    with Cluster(shared / "cluster") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """A failed test must not leave its job on the nodes of the next one."""
    yield
    cluster.run("scancel", "--user=root")
    cluster.until("the end of all jobs", lambda: not cluster.run("squeue", "-h"))


class Job(Run):
    """A run that `scripts.train` submits."""

    def __init__(self, cluster: Cluster, place: Path, name: str, *overrides: str, **variables: str):
        self.cluster = cluster
        super().__init__(place, "launcher=slurm", *overrides, name=name, **variables)

    def start(self, *overrides: str) -> None:
        command = [sys.executable, "-m", *self.words, *overrides]
        said = self.cluster.run(*command, cwd=REPOSITORY, more=self.variables)
        submitted = re.search(r"^job (\d+) is submitted", said, re.MULTILINE)
        assert submitted, said
        self.id = submitted[1]

    def until(self, what: str, event: Any, seconds: float = 120.0) -> None:
        """Raises AssertionError, with the job's own output, also if the job fails in between."""
        self.cluster.until(what, lambda: event() or self.state() in ("FAILED", "CANCELLED", "TIMEOUT"), seconds)
        if not event():
            logs = sorted(self.folder.glob("logs/*.log"))
            texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-1000:]}" for path in logs]
            raise AssertionError("\n".join([f"the job is {self.state()} before {what}", *texts]))

    def state(self) -> str:
        return self.cluster.jobs().get(self.id, "")

    def end(self) -> int:
        self.until("its end", lambda: self.state() == "COMPLETED", 240.0)
        return 0

    def text(self) -> str:
        return self.log(f"slurm-{self.id}")

    def nodes_of(self) -> dict[str, str]:
        """Process → the node of its step. For a heterogeneous job, all parts."""
        listed = self.cluster.run("squeue", "-h", "-s", "-o", "%j %N").splitlines()
        return dict(line.split() for line in listed)


def test_a_learner_of_two_ranks_learns_over_several_nodes_with_keys_of_its_own(cluster: Cluster, place: Path) -> None:
    """As few processes as that takes, on two nodes as the options say: each imports torch for itself."""
    knobs = ["task.digits=2", "learner.ranks=2", "actors.count=1", "run.target_reward=0.3", "run.steps=5000"]
    knobs += ["eval.every=5", "eval.prompts=64", "run.trackers=[]"]
    job = Job(cluster, place, "learns", *knobs, "launcher.options={nodes: 2}")
    job.until("its processes", lambda: len(job.nodes_of()) >= 5)
    assert len(set(job.nodes_of().values())) == 2
    found = job.finish()
    assert found["stopped_because"] == "the held-out reward has reached 0.3" and found["reward_before"] < 0.2
    assert found["staleness_max"] <= found["staleness_bound"] == 1
    secrets = [path for path in (job.folder / "keys").rglob("*") if path.is_file()]
    assert len(secrets) == 8 and all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    config = yaml.safe_load((job.folder / "config.yaml").read_text())
    assert config["buffer"]["transport"] == "tcp" and config["security"]["key_folder"] == str(job.folder / "keys")
    logs = {path.name.partition(".")[0] for path in (job.folder / "logs").glob("*.*.log")}
    assert logs == {"buffer", "learner", "learner-1", "actor-0"}


def test_a_heterogeneous_job_has_the_learner_here_and_the_actors_there(cluster: Cluster, place: Path) -> None:
    parts = ["launcher.learner_part={nodelist: n1}", 'launcher.actors_part={nodelist: "n2,n3", ntasks-per-node: 1}']
    job = Job(cluster, place, "parts", *TIMED, *parts, "run.steps=100000")
    job.until("a train step", lambda: job.steps() > 2)
    nodes = job.nodes_of()
    assert (nodes["buffer"], nodes["learner"]) == ("n1", "n1")
    assert {nodes["actor-0"], nodes["actor-1"]} == {"n2", "n3"}
    cluster.run(sys.executable, "-m", "scripts.stop", str(job.folder), "--drain", cwd=REPOSITORY)
    found = job.finish()
    assert found["stopped_because"] == "it was drained" and not found["ledger"]["dropped"]


@pytest.mark.parametrize(
    "knobs",
    [[], ["launcher.options={nodes: 2, gpus-per-node: 4, exclusive: true}"]],
    ids=["asked by the plan", "whole nodes"],
)
def test_each_process_sees_gpus_of_its_own_as_many_as_planned(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knobs: list[str]
) -> None:
    """By the launcher's own submission; the processes only look (`tests.placed`)."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    script, folder = tmp_path / "look.sbatch", tmp_path / "run"
    script.write_text('#!/bin/bash\nexec "$PYTHON" -m tests.placed "$1"\n')
    config = placed.prepared(folder, "launcher=slurm", f"launcher.script={script}", *knobs)
    submission = build("launcher", config.launcher, folder, limits(config)).submission(plan(config))
    job = submission.submit()
    cluster.until("its end", lambda: cluster.jobs().get(job) in ("COMPLETED", "FAILED"), 150.0)
    told = placed.seen(folder)
    assert placed.agree(told), "\n".join([str(told), *(path.read_text() for path in folder.glob("logs/*.log"))])


def test_usr1_makes_a_checkpoint_and_the_job_goes_on_by_itself(cluster: Cluster, place: Path) -> None:
    """It ends like an undisturbed run over the same batches. (With a model: `tests/integration/test_resume.py`.)"""
    knobs = [*TIMED, "actors.count=1", "run.steps=20"]
    job = Job(cluster, place, "requeued", *knobs, "checkpoint.every=1000", "buffer.keep_journal=true")
    job.until("some train steps", lambda: job.steps() >= 5)
    cluster.run("scancel", "--signal=USR1", job.id)
    job.until("the checkpoint", lambda: any((job.folder / "checkpoints").glob("step-*/meta.json")))
    found = job.finish()
    told = job.text()
    assert "paused at a checkpoint" in told and told.count("resuming") == 2
    assert [row["step"] for row in rows(job.folder)] == list(range(1, 21))
    undisturbed = train(place, "undisturbed", *TIMED, "learner.base=0", f"replay={job.folder}")
    assert summary(undisturbed)["weights_digest"] == found["weights_digest"]
    assert not any(audit(job.folder).findings.values())


def test_a_node_that_fails_takes_its_actors_along_and_no_more(cluster: Cluster, place: Path) -> None:
    """Its slurmd and all of its processes are killed at once. Leases return, and the actors restart elsewhere, or wait
    for room."""
    more = ["actors.count=4", "run.steps=100000", "buffer.heartbeat_timeout=3", "actors.max_restarts=5"]
    run = (cluster, place, "failing", *TIMED, *more, "buffer.keep_journal=true", "groups_per_batch=4")
    job, victim, lost = with_a_node_of_actors_alone(*run)
    try:
        cluster.kill_node(victim)
        kill_with_parents(job.folder, lost)
        buffer = next((job.folder / "logs").glob("buffer.*.log"))
        returned = lambda name: re.search(rf"{name}:? .* leases go to others", buffer.read_text())  # noqa: E731
        job.until("the leases' return", lambda: all(returned(name) for name in lost))
        steps = job.steps()
        job.until("train steps without it", lambda: job.steps() > steps + 8)
        job.until("their replacement", lambda: job.text().count("started again (restart 1)") == len(lost))
        cluster.run(sys.executable, "-m", "scripts.stop", str(job.folder), "--drain", cwd=REPOSITORY)
        found = job.finish()
    finally:
        cluster.start_node(victim)
        cluster.until("the node", lambda: cluster.states()[victim] == "idle")
    assert found["staleness_max"] <= 1
    assert not any(audit(job.folder).findings.values())


SRUN = """#!/bin/bash
# Slurm decides where steps go: buffer and learner shall be on the node of the batch script, before actors fill it.
[[ $* =~ --job-name=(buffer|learner)\\  ]] && set -- "--nodelist=$SLURMD_NODENAME" "$@"
if [[ $* =~ --job-name=actor ]]; then
    until squeue --noheader --steps --format=%j | grep -qx learner; do sleep 0.2; done
fi
exec {srun} "$@"
"""


def with_a_node_of_actors_alone(cluster: Cluster, place: Path, name: str, *overrides: str) -> tuple[Job, str, set[str]]:
    """A running run, a node that it can do without, and the processes there."""
    shim = place / "bin" / "srun"
    shim.parent.mkdir()
    shim.write_text(SRUN.format(srun=shutil.which("srun")))
    shim.chmod(0o755)
    job = Job(cluster, place, name, *overrides, PATH=f"{shim.parent}:{os.environ['PATH']}")
    job.until("train steps", lambda: job.steps() > 5)
    nodes = job.nodes_of()
    assert nodes["batch"] == nodes["buffer"] == nodes["learner"], nodes
    node = next(where for where in nodes.values() if where != nodes["batch"])
    return job, node, {role for role, where in nodes.items() if where == node}


def kill_with_parents(folder: Path, names: set[str]) -> None:
    """Kill the roles and the Slurm processes that watch them; the roles are stopped first, so that none can report its
    end."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join([*(process.info["cmdline"] or []), ""])
        if f"--run {folder.resolve()} " in words and words.partition(" ")[0] in names:
            found.append(process)
    watchers = [process.parent() for process in found]
    for process in found:
        process.suspend()
    for process in [*filter(None, watchers), *found]:
        process.kill()


def test_an_ablation_of_two_configs_and_two_seeds_becomes_one_table(cluster: Cluster, place: Path) -> None:
    """An array of four tasks; USR1 warns one that its time is over, and it is queued again."""
    own = {"groups_per_batch": 2, "learner.base": 0.1, "run.steps": 15}
    study = STUDY | {"set": STUDY["set"] | own, "grid": {"scheduler.max_staleness": [0, 1]}, "seeds": [0, 1]}
    path, out = place / "study.yaml", place / "study"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    command = [sys.executable, "-m", "scripts.ablate", str(path), "--out", str(out), "--slurm", "--parallel", "4"]
    said = cluster.run(*command, cwd=REPOSITORY)
    submitted = re.search(r"4 main runs are submitted as job (\d+); job (\d+) continues after them", said)
    assert submitted, said
    array, then = submitted.groups()
    (listed,) = out.glob("slurm/main-*.runs")
    _, folder = listed.read_text().splitlines()[0].split("\t")
    cluster.until("the first run's start", (Path(folder) / "metrics.jsonl").exists)
    with contextlib.suppress(AssertionError):  # it fails where the job has been requeued meanwhile
        cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_0")
    cluster.until("the tables", lambda: cluster.jobs().get(then) == "COMPLETED", 180.0)
    found = list(csv.DictReader((out / "results.csv").open()))
    assert [row["steps"] for row in found] == ["15.0"] * 4, [path.read_text() for path in out.glob("slurm/*.log")]
    assert {(row["scheduler.max_staleness"], row["staleness"]) for row in found} == {("0", "0.0"), ("1", "1.0")}
    assert (out / "results.md").exists()
    log = next(out.glob(f"slurm/{array}_0.log")).read_text()
    assert "paused at a checkpoint" in log and "resuming" in log, log
