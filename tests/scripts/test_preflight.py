"""Checks before a run starts, of devices, packages, functions, files and addresses: each refusal names its key."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, PretrainedConfig

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.config.run_config import ConfigError
from areal_like.tasks.heldout import sets_of
from scripts.starting import gpus, preflight
from scripts.starting.gpus import Gpus
from scripts.train import parse, prepare
from tests.folders import CONFIGS, REFUSED, write_folder
from tests.scripts import graders
from tests.tasks.templates import FAMILIES, write_tokenizer

QUICKSTART = "configs/quickstart.yaml"


def refusal(folder: Path, *overrides: str) -> str:
    """The sentence that refuses a run; no file is left behind."""
    argv = [QUICKSTART, f"run.dir={folder / 'runs'}", *overrides]
    with pytest.raises((ValueError, OSError)) as error:
        prepare(parse(argv), argv)
    assert not (folder / "runs").exists()
    return " ".join(str(error.value).split())


def notes(*overrides: str) -> str:
    return preflight.preflight(configs.load([QUICKSTART, *overrides]))[0]


class Exits:
    """An environment that cannot be made."""

    def __init__(self) -> None:
        raise SystemExit(3)


AGENT = "{name: agent, agent: 'nomod:fn'}"
EXITS = f"{{name: multi_turn, environment: {{name: '{__name__}:Exits'}}}}"


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("groups_per_batch", ["groups_per_batch=1000000000"]),
        ("sizing", ["sizing=threading:Event"]),
        ("scheduler", ["scheduler=copy:copy"]),
        ("sizing.candidates", ["sizing=sagc", "groups_per_batch=6"]),
        ("workflow.agent", ["workflow={name: agent, agent: [no-such-program]}"]),
        ("eval.workflow.agent", [f"eval.workflow={AGENT}"]),
        ("workflow.environment.tools", ["workflow={name: multi_turn, environment: {name: tools, tools: ['nomod:f']}}"]),
        ("workflow.environment", [f"workflow={EXITS}"]),
        ("engine.kv_tokens", ["engine.kv_tokens=4"]),
        ("sampling.stop", ["task=arithmetic", "sampling.stop=[x]"]),
        ("sampling.stop", ["sampling.stop=['']"]),
        ("learner.overlong_filter", ["learner.overlong_filter=true"]),
        ("launcher.script", ["launcher=slurm", "launcher.script=nowhere.sbatch"]),
    ],
    ids=str,
)
def test_a_failure_after_the_start_is_refused_before(tmp_path: Path, key: str, overrides: list[str]) -> None:
    assert re.search(rf"(?<![\w.]){re.escape(key)}\b", refusal(tmp_path, *overrides))


@pytest.mark.parametrize("found", [Gpus(None, 0), Gpus("12.9", 0), Gpus("12.9", 1)])
def test_cuda_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Gpus) -> None:
    for module in (preflight, gpus):
        monkeypatch.setattr(module, "gpus_here", lambda: found)
    key = "placement" if found.count else "learner.device=cuda"
    assert refusal(tmp_path, "learner.device=cuda", "learner.ranks=2").startswith(f"{key}: ")


def test_torch_is_asked_for_devices_in_a_process_of_its_own() -> None:
    found = gpus.gpus_here()
    assert (found.cuda, found.count) == (torch.version.cuda, torch.cuda.device_count())


@pytest.mark.parametrize("overrides", [["run.trackers=[wandb]"], ["learner.lora={}"]])
def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    monkeypatch.setattr("scripts.starting.preflight.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{overrides[0].partition('=')[0]}.*pip install"):
        preflight.check_packages(configs.load([QUICKSTART, *overrides]))


def test_a_batch_that_repeats_prompts_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--dry-run"]):
        argv = [QUICKSTART, f"run.dir={tmp_path}", "task.train_size=3", *more]
        prepare(parse(argv), argv)
        assert "groups_per_batch=16" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model`: a complete model with its tokenizer."""
    place = tmp_path_factory.mktemp("folders")
    write_folder(place / "model", "qwen2")
    return place


@pytest.fixture
def model(folders: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(folders / "model", tmp_path / "model"))


def rows(count: int) -> list[str]:
    return [json.dumps({"prompt": f"What is {i} + 1?", "answer": i + 1}) for i in range(count)]


def jsonl(place: Path, model: Path, lines: list[str] | bytes, *more: str) -> list[str]:
    """Overrides for a task with these lines."""
    (place / "rows.jsonl").write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
    knobs = f"path: {place}/rows.jsonl, tokenizer: {model}, max_prompt_tokens: 100, max_tokens: 100"
    return [f"task={{name: jsonl, {knobs}}}", "engine=timed", "learner=timed", "groups_per_batch=2", *more]


LONG = json.dumps({"prompt": "x" * 300, "answer": 1})


@pytest.mark.parametrize(
    ("lines", "more", "place"),
    [
        ([*rows(40), *[LONG] * 3], [], r"rows.jsonl:4[123] .*2 more rows"),
        (rows(1), [], "task.path: "),
        ("\n".join(rows(3)).encode() + b'\n{"prompt": "\xe9", "answer": 1}', [], "rows.jsonl:4: "),
    ],
    ids=["long", "one row", "latin-1"],
)
def test_rows_that_can_not_be_used(
    tmp_path: Path, folders: Path, lines: list[str] | bytes, more: list[str], place: str
) -> None:
    """Also where the same file was good in the run before."""
    preflight.preflight(configs.load([QUICKSTART, *jsonl(tmp_path, folders / "model", rows(40))]))
    assert re.search(place, refusal(tmp_path, *jsonl(tmp_path, folders / "model", lines, *more)))


@pytest.mark.parametrize(
    ("reward", "line", "words"),
    [
        (graders.raises, 1, "ZeroDivisionError"),
        (graders.of_trl, 0, "TypeError"),
        (graders.returns_none, None, "returns_none returned None"),
        (graders.hangs, None, "0.01 s"),
    ],
)
def test_a_reward_that_fails_for_row_0_is_refused_with_its_line(
    tmp_path: Path, reward: Callable[..., object], line: int | None, words: str
) -> None:
    place = "" if line is None else f"{graders.__file__}:{reward.__code__.co_firstlineno + line}: "
    more = [f"task.reward={graders.__name__}:{reward.__name__}"]
    found = refusal(tmp_path, *jsonl(tmp_path, Path("bytes"), rows(9), "rewards.timeout=0.01", *more))
    assert found.startswith("task.reward: ") and words in found and place in found


@pytest.mark.parametrize(
    ("overrides", "heldout"),
    [(["eval.prompts=5"], 5), (["eval.prompts=0"], 4), (["eval.prompts=5", "eval.sets={more: {prompts: 9}}"], 9)],
)
def test_of_held_out_prompts_those_are_checked_that_are_asked(overrides: list[str], heldout: int) -> None:
    """By evaluations, and a few by probes."""
    config = configs.load([QUICKSTART, *overrides])
    task = build("task", config.task, 0)
    asked = preflight.asked_prompts(task, sets_of(config, task))
    for each, most in ((SimpleNamespace(size=lambda split: 1000), heldout), (task, 1)):  # a user's, a generated one
        found = {split: preflight.rows_to_check(each, split, asked, config, None) for split in ("train", "heldout")}
        assert found == {"train": range(preflight.ROWS), "heldout": range(most)}


Change = Callable[[bytes], bytes]


def spoil(file: Path, change: Change | None) -> None:
    """Change a file's content, or remove it. (It may be a link to a file that others need.)"""
    content = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    if change:
        file.write_bytes(change(content))


def with_fields(**fields: object) -> Change:
    return lambda content: json.dumps(json.loads(content) | fields).encode()


def as_config(config: PretrainedConfig) -> Change:
    return lambda _: config.to_json_string().encode()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("chat_template.jinja", None),
        ("tokenizer.json", lambda content: content[:100]),
        ("tokenizer_config.json", lambda content: content.replace(b"eos_token", b"no_token")),
    ],
)
def test_a_tokenizer_that_lacks_something(tmp_path: Path, model: Path, file: str, change: Change | None) -> None:
    for name in ("config.json", "generation_config.json"):  # these bring a class and an end of their own
        (model / name).unlink()
    spoil(model / file, change)
    assert "task." in refusal(tmp_path, *jsonl(tmp_path, model, rows(9)))


def test_turns_behind_answers_that_are_no_messages(tmp_path: Path) -> None:
    tokenizer = Path(write_tokenizer(tmp_path / "t", FAMILIES["gpt-oss"]))
    turns = "workflow={name: multi_turn, environment: {name: tools}}"
    assert re.match("workflow=multi_turn: .*final", refusal(tmp_path, *jsonl(tmp_path, tokenizer, rows(9), turns)))


def exchanged(content: bytes) -> bytes:
    """A tokenizer of as many tokens, two of which have changed places."""
    found = json.loads(content)
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", exchanged),
        ("config.json", with_fields(vocab_size=100)),
        ("config.json", None),
        ("config.json", as_config(REFUSED["gpt-oss"][0])),
    ],
    ids=["two exchanged", "too few", "none", "not computed"],
)
def test_a_teacher_of_other_tokens_is_refused(
    tmp_path: Path, folders: Path, model: Path, file: str, change: Change | None
) -> None:
    distilled = ["advantage=distill", f"learner.teacher.path={model}", "learner=torch"]
    overrides = jsonl(tmp_path, folders / "model", rows(9), *distilled)
    notes(*overrides)
    spoil(model / file, change)
    assert refusal(tmp_path, *overrides).startswith("learner.teacher.path: ")


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": WEIGHTS}}).encode()


@pytest.mark.parametrize(
    ("key", "file", "change"),
    [
        ("model.path", CONFIG, with_fields(model_type="abacus")),
        ("model.path", CONFIG, with_fields(vocab_size=100)),
        ("max_position_embeddings", CONFIG, with_fields(max_position_embeddings=24)),
        ("max_position_embeddings", CONFIG, as_config(GPT2Config(vocab_size=258, n_positions=24))),
        ("sliding_window", CONFIG, as_config(CONFIGS["mistral with a window"])),
        ("sliding_window", CONFIG, as_config(CONFIGS["gemma 3"])),
        ("original_max_position_embeddings", CONFIG, as_config(CONFIGS["phi 4 mini"])),
        *((f" has {cause}", CONFIG, as_config(config)) for config, cause in REFUSED.values()),
        ("model.path", WEIGHTS, None),
        ("model.path", WEIGHTS, lambda content: content[:-7]),
        ("model.path", INDEX, lambda _: SHARDS),
    ],
)
def test_a_model_that_can_not_be_loaded(
    tmp_path: Path, model: Path, key: str, file: str, change: Change | None
) -> None:
    overrides = jsonl(tmp_path, model, rows(9))[0], f"model={{name: folder, path: {model}}}"
    spoil(model / file, change)
    for more in ([], ["--dry-run"])[: 2 if file == WEIGHTS else 1]:
        assert re.search(key, refusal(tmp_path, *overrides, *more))
