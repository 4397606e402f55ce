"""The command line of `scripts.train`, up to the point where processes would start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.registry import COMPONENTS, knobs
from areal_like.config.run_config import ConfigError
from areal_like.run.run_folder import data_of
from scripts.train import (
    main,
    make_run_folder,
    name_of,
    parse,
    prepare,
    resolve_folders,
    resolve_transport,
    write_record,
)

REPOSITORY = Path(__file__).resolve().parent.parent.parent
QUICKSTART = "configs/quickstart.yaml"
LIGHT = """
import sys
from scripts.train import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
heavy = {"torch", "transformers", "tensorboard", "sglang", "ray"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def run_light(*argv: str) -> subprocess.CompletedProcess[str]:
    """`scripts.train` in a process that fails if it has imported something heavy."""
    command = [sys.executable, "-c", LIGHT, *argv]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_print_config_is_light_has_every_knob_and_is_a_config(tmp_path: Path) -> None:
    done = run_light(QUICKSTART, "--print-config", "learner.lr=5e-3", "algorithm=grpo")
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.yaml").write_text(done.stdout)
    assert configs.load_resolved(tmp_path / "config.yaml").learner.lr == 5e-3
    whole = configs.load([str(tmp_path / "config.yaml")])
    for kind in COMPONENTS.keys() & configs.Config.__dataclass_fields__.keys():
        assert set(getattr(whole, kind)) == {"name", *knobs(kind, getattr(whole, kind)["name"])}
    assert whole.loss["clip"] == 0.2 and whole.learner["micro_batch_tokens"] == 16384


def test_resume_and_replay_are_options_too() -> None:
    assert parse(["quickstart", "--resume", "auto", "run.steps=5"]).overrides == ["run.steps=5", "resume=auto"]


def test_a_wrong_config_is_one_line_and_light() -> None:
    done = run_light(QUICKSTART, "learner.lrr=1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and "learner.lrr" in done.stderr


def test_a_run_that_slurm_refuses_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main([QUICKSTART, f"run.dir={tmp_path / 'runs'}", "run.name=x", "launcher=slurm"]) == 1
    assert not (tmp_path / "runs" / "x").exists()


def test_a_setting_written_as_an_option_is_answered(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([QUICKSTART, "--num-train-epochs=3"])
    assert "run.steps" in capsys.readouterr().err


def test_run_folders_do_not_collide(tmp_path: Path) -> None:
    config = configs.load([QUICKSTART, f"run.dir={tmp_path}"])
    made = [make_run_folder(config, "quickstart") for _ in range(3)]
    assert len({folder for folder, _ in made}) == 3
    assert all(folder.is_dir() and named.run.name == folder.name for folder, named in made)
    config = configs.replace(config, "run.name", "mine")
    make_run_folder(config, "quickstart")
    with pytest.raises(ConfigError, match=r"run\.name=mine: .*mine exists"):
        make_run_folder(config, "quickstart")


def test_a_run_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run.dir=\S+/file: cannot be written"):
        make_run_folder(configs.load([QUICKSTART, f"run.dir={tmp_path / 'file'}"]), "a")


def test_the_record_is_enough_to_run_again(tmp_path: Path) -> None:
    argv = [QUICKSTART, "run.seed=7", "learner.lr=0.003"]
    config = configs.load(argv)
    write_record(config, tmp_path, argv, {"train": "2 rows (0)"})
    assert configs.load_resolved(tmp_path / "config.yaml") == config
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"][-3:] == argv and data_of(tmp_path) == {"train": "2 rows (0)"}
    again = configs.load([str(tmp_path / "config.yaml")])
    assert again == config


def test_a_folder_that_can_not_be_filled_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scripts.train.write_record", full)
    argv = [QUICKSTART, f"run.dir={tmp_path}", "run.name=mine"]
    with pytest.raises(OSError, match=r"No space left on device: .*mine"):
        prepare(parse(argv), argv)
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_found_where_the_shell_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = resolve_folders(configs.load([QUICKSTART, "run.dir=~/runs", "resume=~/runs/a"]))
    assert (config.run.dir, config.resume) == ("/home/me/runs", "/home/me/runs/a")


def test_transport_follows_the_port() -> None:
    assert resolve_transport(configs.load([QUICKSTART])).buffer.transport == "ipc"
    assert resolve_transport(configs.load([QUICKSTART, "buffer.port=7777"])).buffer.transport == "tcp"
    assert resolve_transport(configs.load([QUICKSTART, "launcher=inline"])).buffer.transport == "inproc"
    asked = configs.load([QUICKSTART, "buffer.transport=ipc"])
    assert resolve_transport(asked).buffer.transport == "ipc"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "quickstart"),
        (["engine.server.mem-fraction-static=0.4"], "quickstart-mem_fraction_static=0.4"),
        (["task.path=a b/../c.jsonl"], "quickstart-path=a_b_.._c.jsonl"),
        (["loss=dg"] * 30, "quickstart-" + ("loss=dg-" * 30)[:60].rstrip("-")),
    ],
)
def test_a_run_is_named_by_what_its_command_sets(overrides: list[str], name: str) -> None:
    assert name_of("quickstart", overrides) == name
