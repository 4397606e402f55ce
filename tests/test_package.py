"""The wheel holds everything that runs outside of a clone, and no top-level name that others may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel. The wheel's dependencies come from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split("\n"):
        if name and (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", wheel], check=True, capture_output=True)
    # As a plain folder on the path, its own .pth files, and with them the editable clone, do not count.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (site_of(folder / "venv") / "dependencies.pth").write_text(f"{packages}\n")
    return folder / "venv"


def site_of(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


def called(environment: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the console command, far from the clone."""
    return run(folder, environment / "bin" / "areal-like", *arguments)


def python(environment: Path, folder: Path, code: str) -> subprocess.CompletedProcess:
    return run(folder, environment / "bin" / "python", "-c", code)


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if key not in hidden} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def test_the_wheel_has_every_room_and_no_common_names(environment: Path, tmp_path: Path) -> None:
    site = site_of(environment)
    found = python(environment, tmp_path, "import actors; print(actors.__file__)")
    assert found.stdout.strip() == str(site / "actors" / "__init__.py"), "not the clone's"
    assert {path.name for path in site.iterdir() if path.suffix not in (".dist-info", ".pth")} == {
        "areal_like", "actors", "buffer", "learners",
    }  # fmt: skip
    installed = {room: (room, "*.py") for room in ("areal_like", "actors", "buffer", "learners")}
    installed |= {
        "configs": ("areal_like/configs", "*.yaml"),
        "scripts/slurm": ("areal_like/commands/slurm", "*.sbatch"),
    }
    installed["scripts/reporting"] = ("areal_like/commands/reporting", "*.*")
    for source, (target, pattern) in installed.items():
        files = [path for path in (ROOT / source).rglob(pattern) if "__pycache__" not in path.parts]
        missing = [path for path in files if not (site / target / path.relative_to(ROOT / source)).is_file()]
        assert files and not missing, "a folder or a kind of file is missing in pyproject.toml"
    assert (site / "areal_like" / "py.typed").is_file()


def test_the_verbs_are_listed_and_explained(environment: Path, tmp_path: Path) -> None:
    listed = called(environment, tmp_path, "--help")
    assert listed.returncode == 0 and all(verb.replace("_", "-") in listed.stdout for verb in cli.VERBS)
    imported = "import importlib; from areal_like.commands import cli; print(len([*map(importlib.import_module, "
    imported += "[f'areal_like.commands.{verb}' for verb in cli.VERBS])]))"
    assert python(environment, tmp_path, imported).stdout == f"{len(cli.VERBS)}\n"
    assert called(environment, tmp_path, "report", "--help").stdout.startswith("usage: areal-like report")
    assert called(environment, tmp_path, "trian").returncode == 2


@pytest.mark.integration
def test_a_run_outside_the_clone_finds_configs_and_the_users_own_module(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from areal_like.tasks.copying import Copy\n\n\nclass Mine(Copy):\n    '''A task of the user's.'''\n"
    )
    code = (
        "import areal_like as al\n"
        "wanted = {'task.name': 'mine:Mine', 'run.name': 'a', 'run.steps': 2, 'run.target_reward': None,\n"
        "          'eval.prompts': 4, 'actors.count': 1, 'engine.name': 'timed', 'learner.name': 'timed'}\n"
        "run = al.train('quickstart', wanted)\n"
        "assert [row['step'] for row in run.metrics] == [1, 2] and run.summary['steps'] == 2\n"
        "assert run.config.task['name'] == 'mine:Mine' and len(list(run.samples('heldout'))) == 8\n"
        "assert run.checkpoint.is_dir() and repr(al.Run('runs/a')) == repr(run)\n"
        "later = {'resume': 'runs/a', 'run.steps': 3}\n"
        "more = al.train('quickstart', wanted | later, quiet=True)\n"
        "assert repr(more) == repr(run) and more.summary['steps'] == 3\n"
        "try:\n"
        "    al.train('quickstart', {'resume': 'auto'})\n"
        "except ValueError as error:\n"
        "    assert 'name the run folder' in str(error), error\n"
        "try:\n"
        "    al.train('quickstart', wanted, quiet=True)\n"
        "except RuntimeError as error:\n"
        "    assert 'choose another name' in str(error), error\n"
    )
    done = python(environment, tmp_path, code)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stdout + done.stderr
    shown = called(environment, tmp_path, "samples", "runs/a", "--count", "1")
    assert shown.returncode == 0 and "reward" in shown.stdout, shown.stderr
