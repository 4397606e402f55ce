"""`ablate --parallel` on a node with GPUs: runs at a time have devices of their own."""

import os
from pathlib import Path
from typing import ClassVar

import pytest

from areal_like.config import run_config as configs
from areal_like.config.placement import VISIBLE
from areal_like.config.run_config import Config, ConfigError
from scripts.ablation import runs
from scripts.ablation.runs import Folder, wanted
from scripts.ablation.study import MAIN, Run
from scripts.starting.gpus import Gpus

ON_GPUS = ("learner.device=cuda", "learner.ranks=2", "engine.device=cuda", "actors.count=1")
SHARED = ("learner.device=cuda", "engine.device=cuda", "actors.count=1")
ON_ONE = (*SHARED, "placement={learner: [0], actors: [0], share: true}")


def config_of(*overrides: str) -> Config:
    return configs.load(["configs/quickstart.yaml", *overrides])


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("engine.device=cpu",), 0),
        (ON_GPUS, 3),
        (ON_ONE, 1),
        ((*SHARED, "placement={learner: [0], actors: [2]}"), 3),
        (("engine=sglang", "engine.tp_size=2", "engine.replicas=2", "actors.count=1"), 4),
        ((*SHARED, "launcher=inline"), 1),
        ((*SHARED, "launcher=slurm", "buffer.transport=tcp"), 0),
    ],
    ids=["cpu", "auto", "shared", "named", "servers", "inline", "slurm"],
)
def test_a_run_needs_the_devices_of_its_placement(overrides: tuple[str, ...], count: int) -> None:
    assert wanted(config_of(*overrides)) == count


def test_a_run_that_needs_more_devices_than_there_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "gpus_here", lambda: Gpus("stated", 1))
    made = [Run(MAIN, {}, {}, 0, config_of(*ON_GPUS))]
    with pytest.raises(ConfigError, match="needs 3 devices of 1"):
        runs.run_all(made, Folder(tmp_path), 2, lambda: None)


class Looks:
    """Stands in for the process of a run, which ends when it has been looked at three times. `beside`: those that run
    at its start."""

    made: ClassVar[list["Looks"]] = []

    def __init__(self, module: str, arguments: list[str], variables: dict[str, str], log: Path):
        self.seen, self.left, self.beside = variables.get(VISIBLE), 3, [each for each in self.made if each.left]
        self.made.append(self)

    def poll(self) -> int | None:
        self.left = max(0, self.left - 1)
        return None if self.left else 0


@pytest.mark.parametrize("inherited", [None, "4,5,6,7"])
def test_runs_at_a_time_see_devices_of_their_own(
    inherited: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide one waits until enough are free; later ones get the devices that others have given back."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if inherited:
        monkeypatch.setenv(VISIBLE, inherited)
    monkeypatch.setattr(runs, "gpus_here", lambda: Gpus("stated", 4))
    wide, one, none = config_of(*ON_GPUS), config_of(*ON_ONE), config_of("engine.device=cpu")
    configs = [one, one, wide, one, none]
    monkeypatch.setattr(runs, "Forked", Looks)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)
    Looks.made.clear()
    made = [Run(MAIN, {}, {}, seed, config) for seed, config in enumerate(configs)]
    assert runs.run_all(made, Folder(tmp_path), 3, lambda: None) == []
    *on_gpus, last = Looks.made
    assert last.seen == inherited == os.environ.get(VISIBLE)
    seen = {each: set(each.seen.split(",")) for each in on_gpus}
    assert [len(devices) for devices in seen.values()] == [1, 1, 3, 1]
    assert set.union(*seen.values()) <= set((inherited or "0,1,2,3").split(","))
    assert not any(seen[each] & seen[other] for each in on_gpus for other in each.beside)
    assert len(on_gpus[2].beside) < 2, "three devices are free only when one of the first two has ended"
