"""A study: the checked yaml file (docs/ablations.md shows one) and its runs. Starts nothing.

A run's name ends in a hash of its config: a changed study keeps the runs that are still in it.
"""

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from areal_like.config import run_config as configs
from areal_like.config.layers import find, read, shown
from areal_like.config.registry import nearest
from areal_like.config.run_config import Config, ConfigError
from areal_like.hub import located
from areal_like.places import CONFIGS

from ..starting.preflight import preflight
from .measures import Curve, read_measure

Overrides = dict[str, Any]
Seed = Annotated[int, msgspec.Meta(ge=0)]
Labels = dict[str, str]
"""Factor → the label of its value."""
OWN_KEYS = ("run.seed", "run.dir", "run.name", "resume")
"""Set for each run by the ablation itself."""
TUNE, MAIN = "tune", "main"


@dataclass(frozen=True, eq=False)
class Run:
    """One run of one stage: `labels` of its point, `tuned` those that tuning tries or picked. Seeds share `config`."""

    stage: str
    labels: Labels
    tuned: Labels
    seed: int
    config: Config

    @property
    def title(self) -> str:
        """For people: `loss=dg, mode=sync, seed 3`."""
        return ", ".join([*self._words(), f"seed {self.seed}"])

    @property
    def name(self) -> str:
        """For files: the same in plain letters, and a hash of the config."""
        text = re.sub(r"[^A-Za-z0-9._]+", "_", "-".join([self.stage, *self._words()]))
        digest = hashlib.sha256(configs.to_yaml(self.config).encode()).hexdigest()[:8]
        return f"{text[:100]}-seed{self.seed}-{digest}"

    def _words(self) -> list[str]:
        return [f"{factor.rpartition('.')[2]}={label}" for factor, label in (self.labels | self.tuned).items()]


class Tune(msgspec.Struct, forbid_unknown_fields=True):
    """`grid` has factors like the study's; `per`, `at` and `by` name factors and measures of the study."""

    grid: dict[str, Any]
    seeds: list[Seed]
    per: list[str] = []
    at: dict[str, Any] = {}
    by: str = ""


class Study(msgspec.Struct, forbid_unknown_fields=True):
    """The yaml, and after `load` a checked ablation. `grid`: factor → label → overrides, in the order of the file."""

    name: str
    file: str
    grid: dict[str, Any]
    seeds: list[Seed]
    measure: dict[str, Any]
    config: str = "base"
    set: Overrides = {}
    curve: Curve = Curve()
    tune: Tune | None = None
    slurm: dict[str, Any] = {}

    def candidates(self) -> list[Labels]:
        return list(points(self.tune.grid if self.tune else {}))

    def tuned_for(self, labels: Labels) -> tuple[str, ...]:
        """Names the tuning whose values a point uses: its labels of the factors in `per`."""
        return tuple(labels[factor] for factor in self.tune.per) if self.tune else ()

    def tuning_runs(self) -> list[Run]:
        """The runs of the first stage, none without `tune`. Raises ConfigError."""
        if not self.tune:
            return []
        tune, runs = self.tune, []
        first = {factor: next(iter(values)) for factor, values in self.grid.items()}
        for chosen in points({factor: self.grid[factor] for factor in tune.per}):
            labels = first | tune.at | chosen
            for candidate in self.candidates():
                runs += self._runs(TUNE, labels, candidate, tune.seeds)
        return runs

    def main_runs(self, picked: Mapping[tuple[str, ...], Labels]) -> list[Run]:
        """The second stage's runs with `picked` values, by `tuned_for`; points take turns. Raises ConfigError."""
        runs: list[Run] = []
        for labels in points(self.grid):
            tuned = picked[self.tuned_for(labels)] if self.tune else {}
            runs += self._runs(MAIN, labels, tuned, self.seeds)
        return sorted(runs, key=lambda run: self.seeds.index(run.seed))

    def main_configs(self) -> list[Config]:
        """Of every point, with the first candidate of the tuning. Raises ConfigError."""
        return [self._config(labels, self.candidates()[0]) for labels in points(self.grid)]

    def check(self) -> None:
        """Make the config of every point and of every tuning run. Raises ConfigError."""
        self.tuning_runs()
        by_samples = self.curve.x == "samples" or any("samples" in each.source for each in self.measure.values())
        for config in self.main_configs():
            if by_samples and "group_size" not in config.sizing:
                raise ConfigError(f"sizing={config.sizing['name']} has no group_size: measure steps, not samples")

    def _runs(self, stage: str, labels: Labels, tuned: Labels, seeds: Iterable[int]) -> list[Run]:
        config = self._config(labels, tuned)
        return [Run(stage, labels, tuned, seed, config) for seed in seeds]

    def _config(self, labels: Labels, tuned: Labels) -> Config:
        chosen = [("grid", self.grid[factor][label]) for factor, label in labels.items()]
        chosen += [("tune.grid", self.tune.grid[factor][label]) for factor, label in tuned.items() if self.tune]
        values, origins = dict[str, Any](), dict[str, str]()
        for section, overrides in [("set", self.set), *chosen]:
            values |= overrides
            origins |= dict.fromkeys(overrides, f"{section} in {self.file}")
        arguments = (self.config, *(f"{key}={_text(value)}" for key, value in values.items()))
        try:
            return _loaded(arguments, tuple(origins.items()))
        except (ValueError, OSError) as error:
            place = ", ".join(f"{factor}={label}" for factor, label in (labels | tuned).items())
            raise ConfigError(f"{place}: {error}") from None


def points(grid: Mapping[str, Mapping[str, Overrides]]) -> Iterator[Labels]:
    for labels in itertools.product(*grid.values()):
        yield dict(zip(grid, labels, strict=True))


@functools.cache
def _loaded(arguments: tuple[str, ...], origins: tuple[tuple[str, str], ...]) -> Config:
    """A config that passes all checks before a run. Raises ValueError, OSError."""
    config = configs.load(arguments, origins=dict(origins))
    if folders := located(configs.leaves(config), {}):
        config = configs.load((*arguments, *folders), origins=dict(origins))
    preflight(config)
    return config


def _text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def named(name: str) -> Path:
    """The file of a study: a path, or the name of one in `configs/ablation`. Raises ConfigError."""
    if Path(name).is_file():
        return Path(name)
    shipped = {file.stem: file for file in sorted((CONFIGS / "ablation").glob("*.yaml"))}
    if name not in shipped:
        hint = nearest(Path(name).stem, shipped)
        raise ConfigError(f"there is no study {name!r}.{hint} Give a yaml file, or one of {', '.join(shipped)}")
    return shipped[name]


def load(path: Path) -> Study:
    """The study of a yaml file, with the configs of all its runs checked. Raises ConfigError."""
    try:
        study = msgspec.convert(read(path) | {"name": path.stem, "file": shown(path)}, Study)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; see docs/ablations.md") from None
    if not study.grid or not study.measure:
        raise ConfigError(f"{path}: an ablation needs a grid with a factor and something to measure")
    study.config = str(find(study.config, path.parent, f"config in {path}"))
    study.measure = {name: read_measure(name, spec) for name, spec in study.measure.items()}
    _check_section(study, "")
    if study.tune:
        _check_section(study.tune, "tune.")
        _check_names(study.tune, study)
    _refuse_lost_values(study)
    study.check()
    return study


def _check_section(section: Study | Tune, prefix: str) -> None:
    """Raises ConfigError."""
    section.grid = {factor: _values(f"{prefix}grid.{factor}", factor, each) for factor, each in section.grid.items()}
    if len({*section.seeds}) < max(1, len(section.seeds)):
        raise ConfigError(f"{prefix}seeds: got {section.seeds}, expected different whole numbers", f"{prefix}seeds")


def _refuse_lost_values(study: Study) -> None:
    """If two factors set one key, only one of the values would reach the runs. Raises ConfigError."""
    owners = dict.fromkeys(OWN_KEYS, "the ablation, for each of its seeds")
    factors = [*study.grid.items(), *(study.tune.grid.items() if study.tune else ())]
    for name, values in [("set", {"": study.set}), *factors]:
        keys = {key for overrides in values.values() for key in overrides}
        for key in sorted(keys & owners.keys()):
            raise ConfigError(f"{name}: {key} is set by {owners[key]} already", key)
        if name != "set":
            owners |= dict.fromkeys(keys, repr(name))


def _check_names(tune: Tune, study: Study) -> None:
    """Raises ConfigError for names of factors, labels or measures that the study does not have."""
    tune.at = {factor: str(label) for factor, label in tune.at.items()}
    tune.by = tune.by or next(iter(study.measure))
    asked: list[tuple[str, str, Iterable[str]]] = [("per", factor, study.grid) for factor in (*tune.per, *tune.at)]
    asked += [("by", tune.by, study.measure)]
    asked += [(f"at.{factor}", label, study.grid.get(factor, ())) for factor, label in tune.at.items()]
    for key, name, known in asked:
        if name not in known:
            raise ConfigError(f"tune.{key}: got {name!r}, expected one of {', '.join(known)}", f"tune.{key}")


def _values(key: str, factor: str, values: Any) -> dict[str, Overrides]:
    """Label → overrides. A list gives values of the key `factor`; a mapping names sets of overrides."""
    if isinstance(values, list) and values:
        found = {_text(value): {factor: value} for value in values}
        if len(found) < len(values):
            raise ConfigError(f"{key}: a value appears twice")
        return found
    if isinstance(values, dict) and values and all(isinstance(item, dict) for item in values.values()):
        return {str(label): overrides for label, overrides in values.items()}
    raise ConfigError(f"{key}: expected a list of values, or labels with overrides; got {values!r}")
