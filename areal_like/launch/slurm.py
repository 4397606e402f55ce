"""Runs as Slurm jobs: the job is divided by role, and each process is a separate job step, started with srun.

Outside of an allocation, the launcher submits a batch script (`scripts/slurm/train.sbatch`, or yours) that calls
`scripts.train`; the plan's options stand on sbatch's command line. Inside, srun starts each role: it passes on the
process's exit code, and signals to the process, but keeps SIGTERM for itself, so SIGUSR2 asks processes to end."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from areal_like.launch.children import GRACE_SECONDS, Children, Launcher, RestartLimits
from areal_like.launch.group import ProcessGroup, spawn
from areal_like.launch.outcome import RunStopped, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.places import COMMANDS, SBATCH, python_path
from areal_like.run.process import EXIT_NODE_FAILED
from areal_like.run.run_folder import CONFIG, NEXT, SUBMITTED, SUMMARY, config_file

GPUS = "gpus-per-task"
WORDS_FOR_GPUS = {GPUS, "gpus", "gpus-per-node", "gpus-per-socket", "gres", "tres-per-task"}
"""sbatch's options that ask for GPUs."""
OF_THE_JOB = ("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GRES", "TRES_PER_TASK", "NTASKS_PER_GPU")
"""Requests of the job, in SLURM_…: a step that reads them takes all GPUs of its node, and the next one waits."""


class JobPart(NamedTuple):
    """Resources to request for some roles: `tasks` of `cpus` processors each, and more options."""

    tasks: int
    cpus: int
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Submission:
    command: list[str]
    environment: dict[str, str]
    script: Path

    def submit(self) -> str:
        return sbatch(self.command[2:], self.environment)

    def describe(self) -> str:
        more = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"$ {more} {shlex.join(self.command)}\n\n# {self.script}\n{self.script.read_text(encoding='utf-8')}"


class SlurmLauncher(Launcher):
    """`options`: of the job, as on sbatch's command line, e.g. {partition: gpu, time: "04:00:00"}. `learner_part` (for
    the learner and the buffer) or `actors_part` make the job heterogeneous: options of each part; so do processes that
    compute on GPUs. Each of them gets as many as it needs (`config.placement`), or `gpus-per-task` of its part,
    however the job requests them; other processes get none. `script`: the batch script to submit. `container`:
    a command in front of `python` (null: the Python that submits), such as "apptainer exec --nv image.sif"."""

    ACROSS_HOSTS = True

    def __init__(  # noqa: PLR0913 - its keyword parameters are knobs
        self,
        run: Path,
        limits: RestartLimits,
        *,
        ready_timeout: Annotated[float, "(0, 1e7]"] = 120.0,
        options: dict[str, str | int | bool] | None = None,
        learner_part: dict[str, str | int | bool] | None = None,
        actors_part: dict[str, str | int | bool] | None = None,
        script: str | None = None,
        container: str | None = None,
        python: str | None = None,
    ):
        self.run, self.ready_timeout = run, ready_timeout
        self.running = Children(
            run, limits, self._spawn, on_nodes=True, end_signal=signal.SIGUSR2, meaning=self._meaning
        )
        self.options, self._has_gpus = dict(options or {}), False
        self._parts = {True: learner_part, False: actors_part}  # by whether a role is essential
        self.script = Path(script) if script else SBATCH / "train.sbatch"
        if "SLURM_JOB_ID" not in os.environ and not self.script.is_file():  # in a job, Slurm has read it already
            raise ValueError(f"launcher.script: there is no {self.script}")
        self.container, self.python = shlex.split(container or ""), python or sys.executable

    # ---- outside of the job -----------------------------------------------------------------------------------------

    def parts(self, roles: list[RoleSpec]) -> list[JobPart]:
        """The learner's part is one task, so that all of it is on one node."""
        alike = self._parts == {True: None, False: None}
        if alike and (WORDS_FOR_GPUS & self.options.keys() or not any(role.gpus for role in roles)):
            return [JobPart(len(roles), max(role.threads for role in roles), {})]
        found = []
        for essential in (True, False):
            some = [role for role in roles if role.essential is essential]
            threads, gpus = [role.threads for role in some], [self._gpus_of(role) for role in some]
            together = sum if essential else max  # one task holds the learner's ranks and the buffer
            options = dict(self._parts[essential] or {})
            if any(gpus) and not (WORDS_FOR_GPUS - {GPUS}) & options.keys():
                options[GPUS] = together(gpus)
            if some:
                found.append(JobPart(1 if essential else len(some), together(threads), options))
        return found

    def submission(self, roles: list[RoleSpec]) -> Submission | None:
        """The job to submit; None inside an allocation, where the plan can start at once."""
        if "SLURM_JOB_ID" in os.environ:
            return None
        folder = self.run.resolve()
        common = flags({"job-name": folder.name, "output": folder / "logs" / "slurm-%j.log"} | self.options)
        command = ["sbatch", "--parsable", f"--chdir={os.getcwd()}"]
        for number, part in enumerate(self.parts(roles)):
            command += [":"] * (number > 0) + ["--no-kill", *common]
            command += [f"--ntasks={part.tasks}", f"--cpus-per-task={part.cpus}", *flags(part.options)]
        config = folder / (SUBMITTED if config_file(folder) != folder / CONFIG else CONFIG)
        command += [str(self.script), str(config), f"resume={folder}"]
        environment = {"PYTHON": sys.executable, "PYTHONPATH": python_path(), "COMMANDS": COMMANDS}
        return Submission(command, environment, self.script)

    # ---- inside of the job ------------------------------------------------------------------------------------------

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        self._has_gpus = any(map(self._gpus_of, roles)) or any(f"SLURM_{name}" in os.environ for name in OF_THE_JOB)
        self.running.start(roles)

    def stop(self) -> None:
        self.running.end()

    def _spawn(self, role: RoleSpec, name: str) -> ProcessGroup:
        return spawn(self._command(role, name), role.threads, self.run / "logs" / f"{role.name}.log")

    def _command(self, role: RoleSpec, name: str) -> list[str]:
        step = ["env", *(f"--unset=SLURM_{name}" for name in OF_THE_JOB), "srun"]
        step += ["--nodes=1", "--ntasks=1", f"--cpus-per-task={role.threads}", "--exact", "--mem=0"]
        step += ["--input=none", "--open-mode=append", f"--job-name={name}"]
        step += [f"--output={self.run.resolve()}/logs/{name}.%N.log"]
        if "SLURM_HET_SIZE" in os.environ:
            step.append(f"--het-group={0 if role.essential else 1}")
        if gpus := self._gpus_of(role):
            step.append(f"--{GPUS}={gpus}")  # Slurm chooses which, and sets the process's CUDA_VISIBLE_DEVICES
        elif self._has_gpus:
            step.append("--gres=none")  # a step that asks for none takes all of its node
        command = [*self.container, self.python, "-m", role.module, *role.arguments(self.run, name)]
        return [*step, *command, "--grace", str(GRACE_SECONDS)]

    def _gpus_of(self, role: RoleSpec) -> int:
        options = self._parts[role.essential] or {}
        return 0 if role.name == "buffer" else int(options.get(GPUS, role.gpus))

    def _meaning(self, role: RoleSpec, code: int) -> int:
        """The role's own exit code. srun also ends with 0 when the node has failed; only the learner itself may end
        with 0, after it has written a summary. Raises RunStopped if the run can't go on without the node."""
        done = (self.run / SUMMARY).exists() and not (self.run / NEXT).exists()
        if code != 0 or (role.name == "learner" and done):
            return code
        if role.essential:
            raise RunStopped(f"the {role.name}'s node has failed", paused=True)
        return EXIT_NODE_FAILED


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as on the command line; true means an option without a value."""
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


def sbatch(arguments: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Submit; returns the job's id. Raises OSError if sbatch is missing or refuses."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env=os.environ | dict(environment or {}),
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise OSError("there is no sbatch here; --dry-run prints what would be submitted") from None
    if done.returncode:
        raise OSError(f"sbatch {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]
