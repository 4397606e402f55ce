"""Every command in the README, the docs and the examples: it runs here, scaled down, or in the test that `ELSEWHERE`
names."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.folders import write_folder
from tests.forked import forked, forking_python, said

ROOT = Path(__file__).resolve().parents[2]
OWN_TEST = ROOT / "docs" / "extending.md"
"""tests/test_extending.py runs its commands."""
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").glob("*.md")} - {OWN_TEST}), *EXAMPLES]
SMALL = ["run.steps=3", "eval.prompts=4", "groups_per_batch=4", "sizing.group_size=4", "actors.count=1"]
"""What makes a run short; what the command sets itself stays."""
SMALLER = {"eval": ["--max-tokens", "8"], "simulate": ["run.steps=5"]}
"""The same for other commands than `train`."""
ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/integration/test_documented_commands.py",
    "bash scripts/quickstart_pretrained.sh": "tests/integration/test_documented_commands.py",
    "bash scripts/test.sh": ".ci/run",
    "bash scripts/test_sglang.sh": ".ci/run",
    "bash scripts/test_pythons.sh": ".ci/run",
    "bash scripts/setup.sh": "scripts/test.sh",
    "python -m scripts.bench.pretrained": "tests/scripts/test_bench.py",
    "areal-like train configs/quickstart.yaml launcher=ray": "tests/integration/test_ray.py",
    "areal-like train configs/quickstart.yaml launcher=slurm": "tests/slurm/test_slurm.py",
    "areal-like ablate staleness --slurm": "tests/slurm/test_slurm.py",
    "areal-like ablate staleness --parallel": "tests/integration/test_ablate.py",
    "areal-like train base model=Qwen/": "tests/areal_like/test_hub.py",
    "areal-like export": "tests/scripts/test_eval.py",
    "areal-like eval runs/a test.csv": "tests/scripts/test_eval.py",
    "areal-like train configs/smollm2/one-digit.yaml 'group_reward=": "tests/actors/test_group_rewards.py",
    "areal-like train gsm8k/0.5b": "tests/scripts/test_estimate.py",
    "areal-like join": "tests/integration/test_process_life.py",
    "areal-like stop": "tests/integration/test_process_life.py",
    "areal-like serve": "tests/scripts/test_eval.py",
    "areal-like status runs/first": "tests/integration/test_process_life.py",
}
"""How a command begins → where it is run; tests that need a cluster, a live run or minutes."""
OTHERS = (".", "tensorboard", "pip", "git", "cd", "sbatch", "export", "wandb", "mkdocs", "lm_eval")
"""Programs that are not ours."""


def documented() -> dict[str, str]:
    """Each shell command, on one line → the page that shows it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in " ".join(shlex.quote(word) for word in shlex.split(line, comments=True)).split("'&&'"):
                    words = shlex.split(part)
                    if words and words[0] not in OTHERS:
                        shown = page.relative_to(ROOT).as_posix()
                        found.setdefault(shlex.join(words).replace(".venv/bin/", ""), shown)
    return found


def is_elsewhere(command: str) -> bool:
    return any(command.startswith(first) for first in ELSEWHERE)


HERE = [command for command in documented() if not is_elsewhere(command)]


def test_the_tests_that_run_the_others_are_there() -> None:
    shown = documented()
    for first, place in ELSEWHERE.items():
        assert any(command.startswith(first) for command in shown), f"no page shows {first} any more"
        text = (ROOT / place).read_text()
        name = re.search(r"scripts/(\w+\.sh)|scripts\.(?:\w+\.)?(\w+)|areal-like (\w+)", first)
        known = name and next(filter(None, name.groups()))
        assert known and known in text.replace(f'"{first}"', ""), f"{place} does not run {first}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the files that the commands expect."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("configs", "docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    write_folder(folder / "MODEL_FOLDER", "qwen2")
    (folder / "models").mkdir()
    for name in ("TEACHER_FOLDER", "models/smollm2-135m-instruct"):
        (folder / name).symlink_to(folder / "MODEL_FOLDER")
    (folder / "data" / "math").mkdir(parents=True)
    for name, first in (("train", 0), ("test", 50)):
        sums = [(f"{n} + {n} =", str(2 * n)) for n in range(first, first + 8)]
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in sums]
        asked = [{"problem": prompt, "answer": answer} for prompt, answer in sums]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "data" / "math" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return folder


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A clone with this environment: `scripts/setup.sh`, which CI runs, would install a new one."""
    (tmp_path / "scripts").mkdir()
    for file in (*ROOT.iterdir(), *(ROOT / "scripts").iterdir()):
        if file.name not in ("scripts", "setup.sh", "runs", "models", "data", ".git") and not file.name.startswith("."):
            (tmp_path / file.relative_to(ROOT)).symlink_to(file)
    (tmp_path / "scripts" / "setup.sh").write_text('[ -x "$1/bin/python" ]\n')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_folder(tmp_path / "models" / "smollm2-135m-instruct", "llama")  # fetching it would need a network
    monkeypatch.chdir(tmp_path)
    with forking_python(tmp_path / ".venv" / "bin" / "python", tmp_path / "output"):
        yield tmp_path


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("quickstart.sh", []),
        ("quickstart_pretrained.sh", ["sampling.max_new_tokens=8", "filter=none"]),
    ],
)
def test_the_quickstarts_run_to_their_end(clone: Path, script: str, more: list[str]) -> None:
    """The second one with one chapter; `tests/scripts/test_quickstart_pretrained.py` has both, with stand-ins."""
    command = ["bash", f"{clone}/scripts/{script}", *SMALL, *more]
    done = subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, timeout=280)
    output = (clone / "output").read_text()
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{output[-5000:]}"
    assert output.count("finished: ") == len(list((clone / "runs").glob("*/summary.json"))) == 1


def scaled(words: list[str], folder: Path) -> list[str]:
    """The command as it runs here, scaled down."""
    module = words[0] if words[0] == "areal-like" else words[2].removeprefix("scripts.")
    if module.startswith("examples."):
        return words[2:]
    verb, arguments = (words[1], words[2:]) if module == "areal-like" else (module, words[3:])
    start = ["scripts.cli", verb.replace("-", "_")]
    if verb != "train":
        return [*start, *arguments, *SMALLER.get(verb, ())]
    keys = {word.partition("=")[0] for word in arguments}
    small = [word for word in SMALL if word.partition("=")[0] not in keys - {"run.steps"}]
    if "--devices" in arguments:  # it sizes a run and starts none
        small = []
    for word in arguments:
        name = word.partition("=")[2]
        if word.startswith("run.name=") and (folder / "runs" / name).exists():  # an earlier page has made it
            small.append("run.name=b")
    if any(word.startswith("resume=runs") for word in arguments):
        small[0] = "run.steps=5"  # two more
    if "task=jsonl" in arguments or any(word.endswith("math.yaml") for word in arguments):
        small.append("sampling.max_new_tokens=8")  # the model takes no more
    if "resume=auto" in arguments:
        small.append("run.name=none")  # nothing is unfinished there
    return [*start, *arguments, *small, *(["--plain"] if "--dry-run" not in arguments else [])]


# Data come first, then runs that others look at, first those that they can replay.
FIRST = ("python -m examples.", "keep_journal", "run.name=")
ORDER = sorted(HERE, key=lambda command: [part not in command for part in FIRST])


@pytest.mark.integration
@pytest.mark.parametrize("command", ORDER)
def test_every_other_command_runs(place: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: later ones use the runs of earlier ones. Each is a process of its own, forked from one that
    has imported torch: half of them would import it, and transformers, for seconds."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if "task=verifiers" in command:
        pytest.importorskip("verifiers", "0.4")
    module, *arguments = scaled(shlex.split(command), place)
    with forked(module, [arguments], tmp_path) as (process,):
        code = process.wait(200)
    assert code == 0, f"{documented()[command]}: {command}\n{said(tmp_path)[-5000:]}"
