"""The held-out sets of a run: its own (the first held-out rows of its task, or of each task of a mixture) by `eval.*`,
and others by name (`eval.sets`): the same rows answered differently, another task, or all rows of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_like.config import run_config as configs
from areal_like.config.heldout import heldout_workflow, task_spec
from areal_like.config.registry import ConfigError, build
from areal_like.config.run_config import Config
from areal_like.config.schema import OWN
from areal_like.estimates import powers
from areal_like.hub import LOCAL
from areal_like.interfaces import Task
from areal_like.tasks.mixture import refuse_other_tokens
from areal_like.types import Prompt


@dataclass(frozen=True)
class HeldoutSet:
    """Prompts of a set: `rows` are (split, row) of its task. Each gets `samples` answers at `temperature` (0: greedy),
    `every` so many train steps (0: before and after training). `ks`: those of pass@k; `right`: the least reward of a
    right answer; `workflow`: the spec of the one that answers; `own`: it belongs to the run's own set."""

    name: str
    task: Task
    rows: Sequence[tuple[str, int]]
    samples: int
    temperature: float
    every: int
    ks: tuple[int, ...]
    right: float
    workflow: Mapping[str, object]
    own: bool = False

    def prompt(self, place: int) -> Prompt:
        return self.task.prompt(*self.rows[place])


def sets_of(config: Config, task: Task) -> list[HeldoutSet]:
    """The sets of a run, its own first. Raises ConfigError, ValueError, OSError."""
    found = [_made(config, name, task, rows, {}, own=True) for name, rows in own_rows(config, task).items() if rows]
    for name, spec in configs.select(config, "eval.sets").items():
        asked, rows = _rows_of(config, task, name, spec)
        found.append(_made(config, name, asked, rows, spec))
    check_best(config, found)
    return found


def check_best(config: Config, sets: Sequence[HeldoutSet]) -> None:
    """Raises ConfigError for a `checkpoint.best` that is no measure of the `sets`, or never taken."""
    known = [f"{each.name}/{figure}" for each in sets for figure in ("reward", *(f"pass@{k}" for k in each.ks))]
    known = [*dict.fromkeys([f"{OWN}/reward", *known])]
    if config.checkpoint.best not in (None, *known):
        key = "checkpoint.best"
        raise ConfigError(f"{key}: got {config.checkpoint.best!r}, expected {' or '.join(known)}", key)
    for key in ("checkpoint.best", "run.early_stop"):
        if configs.select(config, key) is not None and not (config.eval.every and config.eval.prompts):
            raise ConfigError(f"{key}: got eval.every=0 or eval.prompts=0, expected evaluations while it trains", key)


def own_rows(config: Config, task: Task, prompts: int | None = None) -> dict[str, list[tuple[str, int]]]:
    """Name → rows of the run's own sets, of the task or each of a mixture: `prompts`, or the config's number."""
    most = config.eval.prompts if prompts is None else prompts
    rows, first = {}, 0
    for name, member in getattr(task, "members", {OWN: task}).items():
        size = member.size(OWN)
        rows[name] = [(OWN, first + row) for row in range(min(most, size))]
        first += size
    return rows


def _rows_of(config: Config, task: Task, name: str, spec: Mapping[str, object]) -> tuple[Task, list[tuple[str, int]]]:
    """The task of a set, and its rows: all of a file, of others the first held-out ones."""
    given, most = spec.get("task"), spec.get("prompts")
    if given is None or (isinstance(given, str) and given in getattr(task, "members", ())):
        own = own_rows(config, task, most if isinstance(most, int) else None)
        return task, own[given] if isinstance(given, str) else [row for rows in own.values() for row in rows]
    assert isinstance(given, str | Mapping)
    built: Task = build("task", task_spec(config, given), config.run.seed)
    refuse_other_tokens(task, built, f"eval.sets.{name}.task: it and the run's task")
    whole = isinstance(given, str) and given.endswith(LOCAL)
    rows = [(split, row) for split in ((OWN, "train") if whole else (OWN,)) for row in range(built.size(split))]
    return built, rows[: most if isinstance(most, int) else (None if whole else config.eval.prompts)]


def _made(
    config: Config,
    name: str,
    task: Task,
    rows: Sequence[tuple[str, int]],
    spec: Mapping[str, object],
    own: bool = False,
) -> HeldoutSet:
    said = configs.select(config, "eval") | dict(spec)
    samples = int(said["samples"])
    temperature, every, right = float(said["temperature"]), int(said["every"]), float(said["right"])
    workflow = heldout_workflow(config, spec.get("workflow"))
    ks = tuple(said["k"] or powers(samples))
    return HeldoutSet(name, task, rows, samples, temperature, every, ks, right, workflow, own)
