"""The wheel: everything that runs outside of a clone is in it, and nothing that has anybody's name."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as site-packages."""
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
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def called(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The console command, far from the clone."""
    code = f"import sys; sys.argv[1:] = {list(arguments)!r}; from areal_like.commands.cli import main; sys.exit(main())"
    return python(site, folder, code)


def python(site: Path, folder: Path, code: str) -> subprocess.CompletedProcess:
    # Without the site module's editable install of the clone, but with the packages that are installed there.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{packages}", "OMP_NUM_THREADS": "1"}
    environment.pop("AREAL_FORK_SERVER", None)  # it would serve the clone's code
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_the_wheel_has_every_room_and_no_common_names(site: Path) -> None:
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {
        "areal_like", "actors", "buffer", "learners",
    }  # fmt: skip
    for room in ("areal_like", "actors", "buffer", "learners"):
        files = {path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
        assert not {path for path in files if not (site / path).is_file()}, "a folder is missing in pyproject.toml"
    configs = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert not {path for path in configs if not (site / "areal_like" / "configs" / path).is_file()}
    assert (site / "areal_like" / "py.typed").is_file()
    assert len(list((site / "areal_like" / "commands" / "slurm").glob("*.sbatch"))) == 4
    parts = {path.name for path in (ROOT / "scripts" / "reporting").iterdir() if path.is_file()}
    assert not {name for name in parts if not (site / "areal_like" / "commands" / "reporting" / name).is_file()}


def test_the_verbs_are_listed_and_explained(site: Path, tmp_path: Path) -> None:
    listed = called(site, tmp_path, "--help")
    assert listed.returncode == 0 and all(verb.replace("_", "-") in listed.stdout for verb in cli.VERBS)
    for verb in cli.VERBS:
        found = called(site, tmp_path, verb, "--help")
        assert found.returncode == 0 and f"usage: areal-like {verb}" in found.stdout, found.stderr
    assert called(site, tmp_path, "trian").returncode == 2


@pytest.mark.integration
def test_a_run_outside_the_clone_finds_configs_and_the_users_own_module(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from areal_like.tasks.copying import Copy\n\n\nclass Mine(Copy):\n    '''A task of the user's.'''\n"
    )
    code = (
        "import areal_like as al\n"
        "wanted = {'task.name': 'mine:Mine', 'run.name': 'a', 'run.steps': 2, 'run.target_reward': None,\n"
        "          'eval.prompts': 4, 'actors.count': 1}\n"
        "run = al.train('quickstart', wanted)\n"
        "assert [row['step'] for row in run.metrics] == [1, 2] and run.summary['steps'] == 2\n"
        "assert run.config.task['name'] == 'mine:Mine' and len(list(run.samples('heldout'))) == 8\n"
        "assert (run.checkpoint / 'config.json').is_file() and repr(al.Run('runs/a')) == repr(run)\n"
        "more = al.train('quickstart', wanted | {'resume': 'runs/a', 'run.steps': 3}, quiet=True)\n"
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
    done = python(site, tmp_path, code)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stdout + done.stderr
    shown = called(site, tmp_path, "samples", "runs/a", "--count", "1")
    assert shown.returncode == 0 and "reward" in shown.stdout, shown.stderr
