"""The plan of devices: assignments, refusals, and that real processes see only their own devices."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.placement import Needs, devices_of, place, visible
from areal_like.config.registry import ConfigError
from areal_like.launch import group
from areal_like.launch.local import LocalLauncher
from areal_like.launch.plan import plan
from areal_like.launch.ray import RayLauncher
from areal_like.launch.restarts import RestartLimits
from areal_like.launch.slurm import SlurmLauncher
from scripts.join import guests
from scripts.starting.gpus import Gpus, memory_in, placed
from scripts.train import main

BASE = ["configs/quickstart.yaml", "learner.device=cuda"]
SGLANG = [*BASE, "engine=sglang"]


@pytest.mark.parametrize(
    ("spec", "devices"),
    [([0, 1], (0, 1)), (["0-3", 6], (0, 1, 2, 3, 6)), ("4-5,7", (4, 5, 7)), (2, (2,)), (None, ()), ([], ())],
)
def test_devices_are_numbers_and_ranges(spec: object, devices: tuple[int, ...]) -> None:
    assert devices_of(spec, "placement.learner") == devices


def test_auto_gives_the_first_devices_to_the_learner_and_says_nothing_without_devices() -> None:
    needs = Needs(4, True, 2, 2)
    found = place("auto", needs, 8)
    assert found and found.ranks == ((0,), (1,), (2,), (3,)) and found.actors == ((4, 5), (6, 7))
    assert not found.shared
    assert place("auto", needs, 0) is None and place("auto", needs, None) is None
    assert place("auto", Needs(4, False, 2, 0), 8) is None, "nothing computes on a device"
    single = place("auto", Needs(1, True, 1, 1), 1)
    assert single and single.shared == (0,) and single.plain == {"learner": [0], "actors": [0], "share": True}
    several = place("auto", Needs(1, False, 2, 1), 1)
    assert several and several.actors == ((0,), (0,)) and several.shared == (0,)
    only_engine = place("auto", Needs(2, False, 1, 1), 1)
    assert only_engine and only_engine.ranks == ((), ()) and only_engine.actors == ((0,),)


@pytest.mark.parametrize(
    ("needs", "count", "needed"),
    [
        (Needs(4, True, 2, 2), 4, 8),
        (Needs(2, True, 0, 0), 1, 2),
        (Needs(1, True, 1, 2), 1, 3),
        (Needs(1, True, 2, 1), 2, 3),
    ],
)
def test_too_few_devices_are_refused(needs: Needs, count: int, needed: int) -> None:
    with pytest.raises(ConfigError, match=rf": {needed} devices are needed, .* {count}: "):
        place("auto", needs, count)


TWO_EACH = [*SGLANG, "engine.tp_size=2", "actors.count=1"]
TIMED = ["configs/quickstart.yaml", "learner=timed", "engine=timed", "actors.count=2"]
SHARED = [*SGLANG, "placement={learner: 0, actors: 0, share: true}"]
ROOM = "engine.server={mem-fraction-static: 0.4}"


@pytest.mark.parametrize(
    ("key", "argv"),
    [
        *[
            ("placement.actors", [*TIMED, f"placement={{actors: {spec}}}"])
            for spec in ("3-0", "a", "-1", "['0', '1-']", "true", "[1.5]", "{a: 1}", "0-9999999", "[[0]]", "[0-2]")
        ],
        ("placement", [*TWO_EACH, "placement={learner: 0, actors: [0-1]}"]),
        ("placement", [*TWO_EACH, "placement={learner: 0, actor: [1-2]}"]),
        ("placement", [*TWO_EACH, "placement=all"]),
        ("placement.learner", [*TWO_EACH, "placement={learner: [0-1], actors: 2}"]),
        ("placement.learner", [*TWO_EACH, "placement={actors: 2}"]),
        ("placement.learner", [*TWO_EACH, "placement={learner: x, actors: 1}"]),
        ("placement.learner", ["configs/quickstart.yaml", "placement={learner: 0, actors: [1-2]}"]),
        ("placement.actors", [*TWO_EACH, "placement={learner: 0}"]),
        ("placement.actors", [*TWO_EACH, "placement={learner: 0, actors: [1-3]}"]),
        ("placement.share", [*TWO_EACH, "placement={learner: 0, actors: [1-2], share: 1}"]),
        *[("placement.share", [*SHARED, ROOM, f"launcher={name}"]) for name in ("slurm", "ray")],
        ("engine.server", SHARED),
        ("engine.server.base-gpu-id", [*SGLANG, "engine.server={base-gpu-id: 4}"]),
    ],
)
def test_devices_that_can_not_be_given_are_refused_with_their_key(key: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configs.load(argv)
    assert error.value.key == key


def test_components_on_the_cpu_get_no_devices() -> None:
    config = configs.load(["configs/quickstart.yaml", "engine=sglang", "placement={actors: [1-2]}"])
    assert [role.devices for role in plan(config)] == [(), (), (1,), (2,)]


def test_on_gpus_there_are_as_many_actors_as_the_placement_has_devices_for() -> None:
    config = configs.load([*SGLANG, "engine.tp_size=2", "placement={learner: 0, actors: [4-7]}"])
    assert config.actors.count == 2 and [role.devices for role in plan(config)][2:] == [(4, 5), (6, 7)]
    assert configs.load(SGLANG).actors.count == 1, "two servers on one GPU are no default"
    assert configs.load([*SGLANG, "engine.device=cpu"]).actors.count == 2


def test_a_component_that_names_no_device_gets_an_even_share() -> None:
    assert not any(role.devices for role in plan(configs.load(TIMED)))
    roles = plan(configs.load([*TIMED, "placement={actors: [0-3]}"]))
    assert [(role.devices, role.gpus) for role in roles] == [((), 0), (None, 0), ((0, 1), 2), ((2, 3), 2)]


def test_auto_is_settled_with_the_devices_that_there_are() -> None:
    config = configs.load([*SGLANG, "learner.ranks=2", "engine.replicas=2", "actors.count=3"])
    settled = placed(config, Gpus("12.9", 8))
    assert settled.placement == {"learner": [0, 1], "actors": [2, 3, 4, 5, 6, 7], "share": False}
    assert configs.select(placed(config, Gpus("12.9", 0)), "placement") == "auto"
    assert placed(settled, Gpus("12.9", 8)) == settled
    with pytest.raises(ConfigError, match=r"placement\.actors: .* 4, 5, 6, 7"):
        placed(settled, Gpus("12.9", 4))
    roles = plan(settled)
    assert [(role.name, role.devices) for role in roles] == [
        ("buffer", ()), ("learner-1", (1,)), ("learner", (0,)), ("actor-0", (2, 3)), ("actor-1", (4, 5)),
        ("actor-2", (6, 7)),
    ]  # fmt: skip
    replayed = configs.load([*SGLANG, "replay=runs/x"])
    assert placed(replayed, Gpus("12.9", 1)).placement == {"learner": [0], "actors": [], "share": False}


def test_devices_are_counted_among_those_that_the_starter_sees() -> None:
    assert visible((0, 2), None) == "0,2" and visible((), None) == ""
    assert visible((1, 0), "4, GPU-8932f937,MIG-x") == "GPU-8932f937,4"
    with pytest.raises(ConfigError, match=r"placement: .* 3.*CUDA_VISIBLE_DEVICES=4,5"):
        visible((0, 3), "4,5")


PRINT = """
import os, sys
from areal_like.run.process import Role, run_role
def main(role: Role) -> None:
    (role.run / f"{role.name}.devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset") + "|"
        + os.environ.get("CUDA_DEVICE_ORDER", "unset"))
if __name__ == "__main__":
    run_role(main)
"""


def seen(run: Path, launcher: LocalLauncher, *overrides: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES and device order in each process of a config's plan; the processes report them and end."""
    config = configs.load(["configs/quickstart.yaml", *overrides])
    configs.save(config, run / "config.yaml")
    roles = [dataclasses.replace(role, module="printing_role") for role in plan(config)]
    launcher.start(roles)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all((run / f"{role.name}.devices").exists() for role in roles):
        time.sleep(0.02)
    time.sleep(0.05)
    return {role.name: (run / f"{role.name}.devices").read_text() for role in roles}


@pytest.mark.slow
def test_each_process_sees_its_own_devices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printing_role.py").write_text(PRINT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    launcher = LocalLauncher(tmp_path, RestartLimits(2))
    more = ["learner.device=cuda", "learner.ranks=2", "engine=sglang", "engine.replicas=2", "actors.count=2"]
    try:
        told = seen(tmp_path, launcher, *more, "placement={learner: [0-1], actors: [4-7]}")
    finally:
        launcher.stop()
    assert told == {
        "buffer": "|PCI_BUS_ID", "learner": "8|PCI_BUS_ID", "learner-1": "9|PCI_BUS_ID",
        "actor-0": "12,13|PCI_BUS_ID", "actor-1": "14,15|PCI_BUS_ID",
    }  # fmt: skip


def test_without_a_placement_the_environment_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    made = group.environment(1)
    assert made["CUDA_VISIBLE_DEVICES"] == "5" and "CUDA_DEVICE_ORDER" not in made


def test_slurm_is_asked_for_each_steps_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    config = configs.load([*SGLANG, "learner.ranks=4", "engine.tp_size=2", "actors.count=2", "launcher=slurm"])
    roles = plan(config)
    assert [role.gpus for role in roles] == [0, 1, 1, 1, 1, 2, 2] and not any(role.devices for role in roles)
    launcher = SlurmLauncher(Path("run"), RestartLimits(0), options={"partition": "gpu"})
    learner, actors = launcher.parts(roles)
    assert (learner.tasks, learner.options) == (1, {"gpus-per-task": 4})
    assert (actors.tasks, actors.options) == (2, {"gpus-per-task": 2})
    monkeypatch.setattr(launcher.running, "start", lambda _: None)
    launcher.start(roles)
    asked = [[word for word in launcher._command(role, role.name) if "g" in word[:4]] for role in roles]
    assert [words[0] for words in asked] == ["--gres=none", *["--gpus-per-task=1"] * 4, *["--gpus-per-task=2"] * 2]
    own = SlurmLauncher(Path("run"), RestartLimits(0), actors_part={"gres": "gpu:h100:2"})
    assert own.parts(roles)[1].options == {"gres": "gpu:h100:2"}, "the user's words stand"
    whole = SlurmLauncher(Path("run"), RestartLimits(0), options={"gpus-per-node": 8})
    assert [part.options for part in whole.parts(roles)] == [{}]


def test_ray_is_asked_for_each_places_devices() -> None:
    config = configs.load([*SGLANG, "engine.tp_size=2", "actors.count=1", "launcher=ray"])
    told = RayLauncher(Path("run"), RestartLimits(0)).placement(plan(config))
    assert "learner     1 CPU, 1 GPU\n" in told and "actor-0     1 CPU, 2 GPU\n" in told
    assert "buffer      1 CPU\n" in told
    own = RayLauncher(Path("run"), RestartLimits(0), actor_place={"GPU": 4}).placement(plan(config))
    assert "actor-0     1 CPU, 4 GPU\n" in own


def test_guests_divide_the_devices_of_their_host() -> None:
    config = configs.load(SGLANG)
    assert [role.devices for role in guests(2, config, (4, 5, 6, 7))] == [(4, 5), (6, 7)]
    assert [role.devices for role in guests(2, config)] == [None, None]
    with pytest.raises(ConfigError, match="--devices: "):
        guests(2, config, (0, 1, 2))


def test_memory_is_given_with_its_unit() -> None:
    assert memory_in("80GB") == 80 * 10**9 and memory_in("79.5 GiB") == int(79.5 * 2**30)
    for text in ("80", "GB", "0GB", "-1GB", "80TB"):
        with pytest.raises(ValueError, match="80GB"):
            memory_in(text)


def test_devices_of_a_machine_are_stated_for_dry_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--devices", "8"], ["--device-memory", "80GB"], ["--dry-run", "--devices", "-1"]):
        with pytest.raises(SystemExit):
            main([BASE[0], *more])
    assert "--dry-run" in capsys.readouterr().err
    assert main([*SGLANG, "--dry-run", "--devices", "1", "learner.ranks=2"]) == 2
    assert "learner.ranks=2" in capsys.readouterr().err


@pytest.mark.parametrize("choices", [["gpu=1x", "engine=sglang"], ["engine=sglang", "gpu=1x"]], ids=["first", "last"])
def test_a_choice_of_engine_wins_over_that_of_gpu_in_either_order(choices: list[str]) -> None:
    config = configs.load(["configs/base.yaml", *choices, ROOM])
    assert (config.engine.name, config.learner.device, config.gpu) == ("sglang", "cuda", "1x")
