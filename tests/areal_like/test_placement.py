"""The plan of devices: assignments, refusals, and that real processes see only their own devices."""

from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.placement import Devices, Needs, devices_of, place, visible
from areal_like.config.registry import ConfigError
from areal_like.launch import group
from areal_like.launch.children import RestartLimits
from areal_like.launch.plan import plan
from areal_like.launch.ray import RayLauncher
from areal_like.launch.slurm import SlurmLauncher
from scripts.join import guests
from scripts.starting.gpus import Gpus, memory_in, placed
from scripts.train import main
from tests import placed as reporting

QUICKSTART = "configs/quickstart.yaml"
SGLANG = [QUICKSTART, "learner.device=cuda", "engine=sglang"]
TWO_EACH = [*SGLANG, "engine.tp_size=2", "actors.count=1"]
TIMED = [QUICKSTART, "learner=timed", "engine=timed", "actors.count=2"]
SHARED = [*SGLANG, "placement={learner: 0, actors: 0, share: true}"]
ROOM = "engine.server={mem-fraction-static: 0.4}"


@pytest.mark.parametrize(
    ("spec", "devices"),
    [([0, 1], (0, 1)), (["0-3", 6], (0, 1, 2, 3, 6)), ("4-5,7", (4, 5, 7)), (2, (2,)), (None, ()), ([], ())],
)
def test_devices_are_numbers_and_ranges(spec: object, devices: tuple[int, ...]) -> None:
    assert devices_of(spec, "placement.learner") == devices


@pytest.mark.parametrize(
    ("needs", "count", "ranks", "actors", "shared"),
    [
        (Needs(4, True, 2, 2), 8, ((0,), (1,), (2,), (3,)), ((4, 5), (6, 7)), ()),
        (Needs(1, True, 1, 1), 1, ((0,),), ((0,),), (0,)),
        (Needs(1, False, 2, 1), 1, ((),), ((0,), (0,)), (0,)),
        (Needs(2, False, 1, 1), 1, ((), ()), ((0,),), ()),
    ],
)
def test_auto_gives_the_first_devices_to_the_learner(
    needs: Needs, count: int, ranks: tuple[Devices, ...], actors: tuple[Devices, ...], shared: Devices
) -> None:
    found = place("auto", needs, count)
    assert found and (found.ranks, found.actors, found.shared) == (ranks, actors, shared)
    for none in (0, None):
        assert place("auto", needs, none) is None
    assert place("auto", Needs(4, False, 2, 0), 8) is None, "nothing computes on a device"


@pytest.mark.parametrize(("needs", "count"), [((4, True, 2, 2), 4), ((2, True, 0, 0), 1), ((1, True, 2, 1), 2)])
def test_too_few_devices_are_refused(needs: tuple[int, bool, int, int], count: int) -> None:
    with pytest.raises(ConfigError, match=rf"got {count} devices, expected {Needs(*needs).total} "):
        place("auto", Needs(*needs), count)


@pytest.mark.parametrize(
    ("key", "argv"),
    [
        *[
            ("placement.actors", [*TIMED, f"placement={{actors: {spec}}}"])
            for spec in ("3-0", "-1", "true", "[1.5]", "{a: 1}", "0-9999999", "[[0]]", "[0-2]")
        ],
        ("placement", [*TWO_EACH, "placement={learner: 0, actors: [0-1]}"]),
        ("placement", [*TWO_EACH, "placement=all"]),
        ("placement.learner", [*TWO_EACH, "placement={learner: [0-1], actors: 2}"]),
        ("placement.learner", [*TWO_EACH, "placement={actors: 2}"]),
        ("placement.learner", [QUICKSTART, "placement={learner: 0, actors: [1-2]}"]),
        ("placement.actors", [*TWO_EACH, "placement={learner: 0}"]),
        ("placement.actors", [*TWO_EACH, "placement={learner: 0, actors: [1-3]}"]),
        ("placement.share", [*TWO_EACH, "placement={learner: 0, actors: [1-2], share: 1}"]),
        *[("placement.share", [*SHARED, ROOM, f"launcher={name}"]) for name in ("slurm", "ray")],
        ("engine.server", SHARED),
        *[("launcher.actor_place", [*TIMED, "launcher=ray", f"launcher.actor_place={{CPU: {n}}}"]) for n in (-1, "x")],
    ],
)
def test_devices_that_can_not_be_given_are_refused_with_their_key(key: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configs.load(argv)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("argv", "devices"),
    [
        ([QUICKSTART, "engine=sglang", "placement={actors: [1-2]}"], [(), (), (1,), (2,)]),
        ([*SGLANG, "engine.tp_size=2", "placement={learner: 0, actors: [4-7]}"], [(), (0,), (4, 5), (6, 7)]),
        ([*TIMED, "placement={actors: [0-3]}"], [(), None, (0, 1), (2, 3)]),
        (TIMED, [None] * 4),
        ([*SGLANG, "learner.ranks=2"], [None] * 4),  # two servers on one GPU are no default
    ],
)
def test_each_process_has_the_devices_that_the_placement_names(argv: list[str], devices: list[Devices]) -> None:
    """Without a number of actors there are as many as the placement has devices for; a component that names no device
    gets an even share."""
    assert [role.devices for role in plan(configs.load(argv))] == devices


def test_auto_is_settled_with_the_devices_that_there_are() -> None:
    config = configs.load([*SGLANG, "learner.ranks=2", "engine.replicas=2", "actors.count=3"])
    settled = placed(config, Gpus("12.9", 8))
    assert settled.placement == {"learner": [0, 1], "actors": [2, 3, 4, 5, 6, 7], "share": False}
    assert configs.select(placed(config, Gpus("12.9", 0)), "placement") == "auto"
    assert placed(settled, Gpus("12.9", 8)) == settled
    with pytest.raises(ConfigError, match=r"placement\.actors: .* 4, 5, 6, 7"):
        placed(settled, Gpus("12.9", 4))
    replayed = configs.load([*SGLANG, "replay=runs/x"])
    assert placed(replayed, Gpus("12.9", 1)).placement == {"learner": [0], "actors": [], "share": False}


def test_devices_are_counted_among_those_that_the_starter_sees() -> None:
    assert visible((0, 2), None) == "0,2" and visible((), None) == ""
    assert visible((1, 0), "4, GPU-8932f937,MIG-x") == "GPU-8932f937,4"
    with pytest.raises(ConfigError, match=r"placement: .* 3.*CUDA_VISIBLE_DEVICES=4,5"):
        visible((0, 3), "4,5")


@pytest.mark.slow
def test_each_process_sees_its_own_devices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    config = reporting.prepared(tmp_path / "run", "placement={learner: [0-1], actors: [4-7]}")
    reporting.start(config, tmp_path / "run")
    assert {name: devices for name, (_, devices) in reporting.seen(tmp_path / "run").items()} == {
        "buffer": [], "learner": ["8"], "learner-1": ["9"], "actor-0": ["12", "13"], "actor-1": ["14", "15"],
    }  # fmt: skip
    assert group.environment(1, (0,))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    unplaced = group.environment(1)
    assert unplaced["CUDA_VISIBLE_DEVICES"] == "8,9,10,11,12,13,14,15" and "CUDA_DEVICE_ORDER" not in unplaced


def test_slurm_is_asked_for_each_steps_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    roles = plan(configs.load([*SGLANG, "learner.ranks=4", "engine.tp_size=2", "actors.count=2", "launcher=slurm"]))
    assert [role.gpus for role in roles] == [0, 1, 1, 1, 1, 2, 2] and not any(role.devices for role in roles)
    launcher = SlurmLauncher(Path("run"), RestartLimits(0), options={"partition": "gpu"})
    assert launcher.parts(roles) == [(1, 5, {"gpus-per-task": 4}), (2, 1, {"gpus-per-task": 2})]
    monkeypatch.setattr(launcher.running, "start", lambda _: None)
    launcher.start(roles)
    asked = [next(word for word in launcher._command(role, role.name) if "g" in word[:4]) for role in roles]
    assert asked == ["--gres=none", *["--gpus-per-task=1"] * 4, *["--gpus-per-task=2"] * 2]
    for knobs, options in (
        ({"actors_part": {"gres": "gpu:h100:2"}}, [{"gpus-per-task": 4}, {"gres": "gpu:h100:2"}]),
        ({"learner_part": {"gpus-per-task": 2}}, [{"gpus-per-task": 8}, {"gpus-per-task": 2}]),
        ({"options": {"gpus-per-node": 8}}, [{}]),
    ):
        given = SlurmLauncher(Path("run"), RestartLimits(0), **knobs)
        assert [part.options for part in given.parts(roles)] == options


def test_ray_is_asked_for_each_places_resources() -> None:
    roles = plan(configs.load([*TWO_EACH, "launcher=ray"]))
    own = {"learner_place": {"high_memory": 2.0}, "actor_place": {"GPU": 4}}
    for knobs, learner, actor in (({}, {}, {"GPU": 2}), (own, {"high_memory": 2}, {"GPU": 4})):
        assert RayLauncher(Path("run"), RestartLimits(0), **knobs).groups(roles) == [
            ("PACK", [("buffer", {"CPU": 1}), ("learner", {"CPU": 1, "GPU": 1} | learner)]),
            ("SPREAD", [("actor-0", {"CPU": 1} | actor)]),
        ]


def test_guests_divide_the_devices_of_their_host() -> None:
    config = configs.load(SGLANG)
    assert [role.devices for role in guests(2, config, (4, 5, 6, 7))] == [(4, 5), (6, 7)]
    assert [role.devices for role in guests(2, config)] == [None, None]
    with pytest.raises(ConfigError, match="--devices: "):
        guests(2, config, (0, 1, 2))


def test_devices_of_a_machine_are_stated_for_dry_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_in("80GB") == 80 * 10**9
    with pytest.raises(ValueError):
        memory_in("80")
    for more in (["--devices", "8"], ["--device-memory", "80GB"], ["--dry-run", "--devices", "-1"]):
        with pytest.raises(SystemExit):
            main([QUICKSTART, *more])
    assert main([*SGLANG, "--dry-run", "--devices", "1", "learner.ranks=2"]) == 2
    assert "learner.ranks=2" in capsys.readouterr().err


@pytest.mark.parametrize("choices", [["gpu=1x", "engine=sglang"], ["engine=sglang", "gpu=1x"]], ids=["first", "last"])
def test_a_choice_of_engine_wins_over_that_of_gpu_in_either_order(choices: list[str]) -> None:
    config = configs.load(["configs/base.yaml", *choices, ROOM])
    assert (config.engine.name, config.learner.device, config.gpu) == ("sglang", "cuda", "1x")
