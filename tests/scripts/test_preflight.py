"""What `scripts.train` refuses before it starts a process: one sentence with the key, the value and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.tasks.heldout import sets_of
from scripts.starting import gpus, preflight
from scripts.starting.gpus import Gpus
from scripts.train import parse, prepare
from tests.folders import write_folder

QUICKSTART = "configs/quickstart.yaml"


def refusal(folder: Path, *overrides: str) -> str:
    """The sentence that refuses a run; no file is left behind."""
    argv = [QUICKSTART, f"run.dir={folder / 'runs'}", *overrides]
    with pytest.raises((ValueError, OSError)) as error:
        prepare(parse(argv), argv)
    assert not (folder / "runs").exists()
    return " ".join(str(error.value).split())


VALUES = [
    (["model.hidden_size=0"], "model.hidden_size: must be at least 1, got 0 [from command line]"),
    (["model.num_hidden_layers=0"], "model.num_hidden_layers: must be at least 1, got 0"),
    (["model.rope_theta=0"], "model.rope_theta: must be above 0, got 0"),
    (["learner.betas=[0.9]"], "learner.betas: expected 2 values, got [0.9]"),
    (["learner.betas=[2,3]"], "learner.betas: each must be at least 0 and below 1, got [2, 3]"),
    (["learner.lr=inf"], "learner.lr: must be at least 0 and finite, got inf"),
    (["learner.lr=.nan"], "learner.lr: expected float | None, got nan"),
    (["learner.publish_dtype=float31"], "learner.publish_dtype: expected Literal['bfloat16', 'float16', 'float32']"),
    (["learner.critic_lr=-1"], "learner.critic_lr: must be at least 0, got -1"),
    (["learner.lora={rank: -1}"], "learner.lora.rank: must be at least 1, got -1"),
    (["learner.normalise=-3"], "learner.normalise: must be above 0, got -3"),
    (
        ["learner.normalise=mean"],
        "learner.normalise: expected Literal['token_mean', 'sequence_mean', 'response_limit'] | float",
    ),
    (["learner.overlong_filter=true"], "learner.overlong_filter: answers of task=copy have a fixed length"),
    (
        ["advantage=gae", "learner.critic_lr=1e-3", "advantage.bootstrap=true"],
        "advantage.bootstrap: answers of task=copy have a fixed length",
    ),
    (["engine.slots=0"], "engine.slots: must be at least 1, got 0"),
    (["engine.kv_tokens=-1"], "engine.kv_tokens: must be at least 1, got -1"),
    (["workflow={name: best_of_n, n: 0}"], "workflow.n: must be at least 1, got 0"),
    (["run.seed=-1"], "run.seed: must be at least 0 and at most 18446744073709551615, got -1"),
    (["run.seed=18446744073709551616"], "run.seed: must be at least 0 and at most 18446744073709551615"),
    (["run.max_seconds=-1"], "run.max_seconds: must be at least 0, got -1"),
    (["run.target_reward=.nan"], "run.target_reward: must be a number, got nan"),
    (["weights.dense_above=2"], "weights.dense_above: must be at least 0 and at most 1, got 2"),
    (["buffer.heartbeat_timeout=inf"], "buffer.heartbeat_timeout: must be at least 2 and at most 10000000, got inf"),
    (["launcher.ready_timeout=0"], "launcher.ready_timeout: must be above 0"),
    (["loss=ppo", "loss.clip=-1"], "loss.clip: must be above 0 and at most 1, got -1"),
    (["loss=ppo", "loss.clip=2"], "loss.clip: must be above 0 and at most 1, got 2"),
    (["loss=ppo", "loss.dual_clip=1"], "loss.dual_clip: must be above 1, got 1"),
    (["loss={name: dppo, tv_high: 1.5}"], "loss.tv_high: must be above 0 and at most 1, got 1.5"),
    (["loss={name: dg_kondo, keep: 0}"], "loss.keep: must be above 0 and at most 1, got 0"),
    (["loss={name: pmpo, alpha: 2}"], "loss.alpha: must be at least 0 and at most 1, got 2"),
    (["loss={name: vtrace, rho_bar: 0}"], "loss.rho_bar: must be above 0, got 0"),
    (["advantage={name: gae, lam: 2}", "learner.critic_lr=1e-3"], "advantage.lam: must be at least 0 and at most 1"),
    (["buffer.transport=ipc", "buffer.port=7777"], "buffer.transport=ipc has no use for buffer.port=7777: leave that"),
    (["buffer.transport=inproc"], "buffer.transport=inproc reaches no other process: leave it out, or set"),
    (["launcher=inline", "learner.ranks=2"], "learner.ranks: launcher=inline has one process, so 1 rank only"),
    (["launcher=inline", "learner.threads=2"], "learner.threads: with launcher=inline torch has one number of threads"),
    (["buffer.transport=ipc", "buffer.host=192.0.2.1"], "ipc has no use for buffer.host=192.0.2.1"),
    (["mode=sync", "scheduler.name=async"], "scheduler.name=async contradicts mode=sync: say mode=async"),
    (["mode=async", "scheduler=sync"], "scheduler.name=sync contradicts mode=async: say mode=sync"),
    (["eval.sets=[a]"], "eval.sets: Invalid type assigned: list is not a subclass of"),
    (
        ["sampler=pass_rate_pools", "task.train_size=9", "sampler.hard_to=0.8", "sampler.easy_from=0.2"],
        "sampler.hard_to=0.8: a prompt would be hard and easy; want less than easy_from=0.2",
    ),
    (
        ["group_reward={name: judge, base_url: nohost, model_name: m}"],
        "group_reward.base_url=nohost: want the address of a server",
    ),
    (["run=5", "run.steps=3"], "run.steps: run is 5 [from command line], which has no keys; leave one of the two out"),
]


@pytest.mark.parametrize(
    ("argv", "words"), VALUES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_value_that_can_not_work_is_refused_with_its_key(tmp_path: Path, argv: list[str], words: str) -> None:
    assert words in refusal(tmp_path, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["run.seed=18446744073709551615"],
        ["run.max_seconds=inf", "learner.betas=[0, 0.5]", "learner.normalise=12", "weights.dense_above=0"],
        ["loss={name: tis, correction: {weight_high: inf}}"],
        ["loss={name: decoupled_ppo, clip: 1, correction: none}"],
        ["learner.lora={}", "scheduler.max_staleness=inf"],
    ],
)
def test_the_ends_of_ranges_are_taken(argv: list[str]) -> None:
    configs.load([QUICKSTART, *argv])


def test_the_mode_follows_a_scheduler_that_was_chosen_alone() -> None:
    assert configs.load([QUICKSTART, "scheduler=sync"]).mode == "sync"
    assert configs.load([QUICKSTART]).mode == "async"


# What asks for more than the config: devices, functions, tasks


class Exits:
    """An environment that cannot be made."""

    def __init__(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["model.hidden_size=33", "model.num_attention_heads=4"],
            "hidden_size=33: must be a multiple of 2 * model.num",
        ),
        (["model.num_attention_heads=4", "model.num_key_value_heads=3"], "the nearest is 2"),
        (["groups_per_batch=1000000000"], "groups_per_batch=1000000000 groups of sizing.group_size=8 can never fill"),
        (["sizing.group_size=10000000"], "at most 82595524 samples fit"),
        (["sizing=threading:Event"], "sizing=threading:Event does not inherit from buffer.sizing.Sizing: see docs"),
        (["scheduler=copy:copy"], "scheduler=copy:copy does not inherit from buffer.schedulers.Scheduler: see"),
        (["sizing=sagc", "groups_per_batch=6"], "sizing.candidates: groups of 32 can't make up a batch of 48"),
        (["workflow={name: agent, agent: 'nomod:fn'}"], "workflow.agent=nomod:fn: module 'nomod' cannot be found"),
        (["workflow={name: agent, agent: 'examples.agent_function:nothing'}"], "no function or class 'nothing'"),
        (["workflow={name: agent, agent: 'operator:eq'}"], "workflow.agent=operator:eq is no async function"),
        (["workflow={name: agent, agent: [no-such-program]}"], "workflow.agent: there is no program 'no-such-program'"),
        (["eval.workflow={name: agent, agent: 'nomod:fn'}"], "eval.workflow.agent=nomod:fn: module 'nomod'"),
        (["workflow={name: multi_turn, environment: {name: tools, tools: ['nomod:f']}}"], "environment.tools=nomod:f"),
        ([f"workflow={{name: multi_turn, environment: {{name: '{__name__}:Exits'}}}}"], "made: SystemExit(3) at /"),
        (
            [
                "task={name: mixture, tasks: {a: {name: copy}, b: {name: reverse}}, workflows: {b: {name: multi_turn, "
                f"environment: {{name: '{__name__}:Exits'}}}}}}}}"
            ],
            f"task.workflows.b.environment={__name__}:Exits can't be made: SystemExit(3)",
        ),
        (
            ["task={name: mixture, tasks: {a: {name: copy}}, workflows: {a: {name: agent, agent: 'nomod:fn'}}}"],
            "task.workflows.a.agent=nomod:fn: module 'nomod'",
        ),
        (["batch_policy={name: priority, key: 'nomod:f'}"], "batch_policy.key=nomod:f: module 'nomod' cannot be found"),
        (
            ["sampling.max_new_tokens=5000"],
            "row 0 of train: a train prompt of 9 tokens with a response of up to 5000",
        ),
        (
            ["task=arithmetic", "group_reward={name: judge, base_url: 'http://127.0.0.1:9/v1', model_name: m}"],
            "group_reward=judge reads text, e.g. of task=jsonl; task=arithmetic has none",
        ),
        (["engine.kv_tokens=4"], "engine.kv_tokens=4: lower sampling.max_new_tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_die_after_the_start_is_refused_before(tmp_path: Path, argv: list[str], words: str) -> None:
    assert words in refusal(tmp_path, *argv)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Gpus(None, 0),
            "learner.device=cuda: this torch is built without CUDA; install one with CUDA",
        ),
        (Gpus("12.9", 0), "learner.device=cuda: torch sees no CUDA device"),
        (
            Gpus("12.9", 1),
            "learner.ranks=2: 2 devices are needed, and there is 1: ask for fewer, or say which are shared",
        ),
    ],
)
def test_cuda_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Gpus, words: str
) -> None:
    for module in (preflight, gpus):
        monkeypatch.setattr(module, "gpus_here", lambda: found)
    assert words in refusal(tmp_path, "learner.device=cuda", "learner.ranks=2")


def test_torch_is_asked_for_devices_in_a_process_of_its_own() -> None:
    found = gpus.gpus_here()
    assert (found.cuda, found.count) == (torch.version.cuda, torch.cuda.device_count())
    assert bool(found.memory) == bool(found.count)


def test_a_batch_that_repeats_prompts_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [QUICKSTART, f"run.dir={tmp_path}", "task.train_size=3"]
    prepare(parse(argv), argv)
    assert "note: groups_per_batch=16: there are 3 training prompts" in capsys.readouterr().err


# Files: prompts, tokenizers, models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, among them `model`: a complete model with its tokenizer."""
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
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    (place / "rows.jsonl").write_bytes(content)
    knobs = f"path: {place}/rows.jsonl, tokenizer: {model}, max_prompt_tokens: 100, max_tokens: 100"
    return [f"task={{name: jsonl, {knobs}}}", "engine=timed", "learner=timed", *more]


LONG = json.dumps({"prompt": "x" * 300, "answer": 1})


@pytest.mark.parametrize(
    ("lines", "more", "words"),
    [
        ([*rows(40), LONG], [], "rows.jsonl:41 (row "),
        ([*rows(40), LONG, LONG, LONG.replace("x", "y")], [], "(2 more rows don't fit either)"),
        ([*rows(40), LONG], [], "task.max_prompt_tokens allows 1 to 100: raise it, or take the row out"),
        (rows(1), [], "task.path: 0 training rows and 1 held-out rows"),
        (rows(1) * 64, [], "or name a file of held-out rows in task.heldout_path"),
        (
            b"\n".join(row.encode() for row in rows(3)) + b'\n{"prompt": "\xe9", "answer": 1}',
            [],
            "rows.jsonl:4: not UTF-8",
        ),
        (
            rows(9),
            ["task.reward=nomod:f"],
            "task.reward.name: 'nomod:f' cannot be read: module 'nomod' cannot be found",
        ),
        (rows(9), ["task.max_tokens=0"], "task.max_tokens: must be at least 1, got 0"),
    ],
    ids=["long", "many long", "remedy", "one row", "equal rows", "latin-1", "reward", "no tokens"],
)
def test_rows_that_can_not_be_used(
    tmp_path: Path, folders: Path, lines: list[str] | bytes, more: list[str], words: str
) -> None:
    assert words in refusal(tmp_path, *jsonl(tmp_path, folders / "model", lines, *more))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path, folders: Path) -> None:
    overrides = jsonl(tmp_path, folders / "model", b"\xef\xbb\xbf" + "\n".join(rows(9)).encode())
    assert preflight.preflight(configs.load([QUICKSTART, "groups_per_batch=2", *overrides])) == ""


def test_only_rows_that_may_be_too_long_are_encoded(tmp_path: Path, folders: Path) -> None:
    overrides = jsonl(tmp_path, folders / "model", [*rows(200), json.dumps({"prompt": "x" * 80, "answer": 1})])
    task = build("task", configs.load([QUICKSTART, *overrides]).task, 0)
    found = {task.place(split, row) for split in ("train", "heldout") for row in task.rows_beyond(split, 100)}
    assert found == {f"{tmp_path}/rows.jsonl:201"}


def test_a_server_of_others_that_does_not_answer_is_told_of(tmp_path: Path, folders: Path) -> None:
    judge = "group_reward={name: judge, base_url: 'http://127.0.0.1:9/v1', model_name: m}"
    overrides = jsonl(tmp_path, folders / "model", rows(9), judge, "groups_per_batch=2")
    told = preflight.preflight(configs.load([QUICKSTART, *overrides]))
    assert told.startswith("group_reward.base_url=http://127.0.0.1:9/v1: nobody answers there now")


Change = Callable[[bytes], bytes]


def spoil(file: Path, change: Change | None) -> None:
    """Change a file's content, or remove it. (It may be a link to a file that others need.)"""
    content = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    if change:
        file.write_bytes(change(content))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("chat_template.jinja", None, "has no chat template: set task.chat_template=false"),
        ("tokenizer.json", lambda content: content[:100], "task.tokenizer: the tokenizer in "),
        ("tokenizer_config.json", lambda content: content.replace(b"eos_token", b"no_token"), "set eos_token in its"),
    ],
)
def test_a_tokenizer_that_lacks_something(
    tmp_path: Path, model: Path, file: str, change: Change | None, words: str
) -> None:
    for name in ("config.json", "generation_config.json"):  # these bring a class and an end of their own
        (model / name).unlink()
    spoil(model / file, change)
    assert words in refusal(tmp_path, *jsonl(tmp_path, model, rows(9)))


def with_fields(**fields: object) -> Change:
    return lambda content: json.dumps(json.loads(content) | fields).encode()


def exchanged(content: bytes) -> bytes:
    """A tokenizer of as many tokens, two of which have changed places."""
    found = json.loads(content)
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer.json", lambda content: content, ""),
        ("tokenizer.json", exchanged, "token 64 is 'b' to the model in "),
        ("config.json", with_fields(vocab_size=100), "knows 100 token ids, the task uses 259"),
        ("config.json", None, "learner.teacher.path: no config.json in "),
    ],
    ids=["its own", "two exchanged", "too few", "none"],
)
def test_a_teacher_of_other_tokens_is_refused(
    tmp_path: Path, folders: Path, model: Path, file: str, change: Change | None, words: str
) -> None:
    spoil(model / file, change)
    overrides = ["advantage=distill", f"learner.teacher.path={model}", "learner=torch", "groups_per_batch=2"]
    argv = [*jsonl(tmp_path, folders / "model", rows(9)), *overrides]
    if words:
        assert words in refusal(tmp_path, *argv)
    else:
        preflight.preflight(configs.load([QUICKSTART, *argv]))


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": WEIGHTS}}).encode()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (CONFIG, lambda _: b"{oops", "config.json is no JSON (Expecting property name"),
        (CONFIG, lambda _: b"{}", "config.json describes no model: it has no model_type"),
        (CONFIG, lambda _: b"[]", "config.json holds no JSON object"),
        (CONFIG, with_fields(model_type="abacus"), "knows no causal language model of model_type 'abacus'"),
        (CONFIG, with_fields(vocab_size=100), "knows 100 token ids, the task uses"),
        (CONFIG, with_fields(max_position_embeddings=24), "max_position_embeddings=24: lower sampling.max_new_tokens"),
        (WEIGHTS, None, "(model.safetensors is missing): download them"),
        (WEIGHTS, lambda content: content[:200], "model.safetensors is cut off: it has 200 bytes, and its header says"),
        (WEIGHTS, lambda content: content[:-7], "model.safetensors is cut off"),
        (WEIGHTS, lambda _: b"hello, world " * 9, "is no safetensors file: download it again"),
        (
            WEIGHTS,
            lambda _: b"version https://git-lfs.github.com/spec/v1",
            "a pointer of Git LFS, not the weights",
        ),
        (WEIGHTS, lambda content: content[:8] + b"!" + content[9:], "the header of "),
        (INDEX, lambda _: SHARDS, "(model-00001-of-00002.safetensors is missing)"),
    ],
)
def test_a_model_that_can_not_be_loaded(
    tmp_path: Path, model: Path, file: str, change: Change | None, words: str
) -> None:
    overrides = jsonl(tmp_path, model, rows(9))[0], f"model={{name: folder, path: {model}}}"
    preflight.preflight(configs.load([QUICKSTART, "groups_per_batch=2", *overrides]))
    spoil(model / file, change)
    assert words in refusal(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (CONFIG, lambda _: b"{oops", "config.json is no JSON"),
        (CONFIG, with_fields(model_type="abacus"), "abacus"),
        (WEIGHTS, lambda content: content[:-7], "model.safetensors is cut off"),
    ],
)
def test_a_dry_run_says_the_same(tmp_path: Path, model: Path, file: str, change: Change, words: str) -> None:
    spoil(model / file, change)
    assert words in refusal(tmp_path, f"model={{name: folder, path: {model}}}", "--dry-run")


def test_a_rate_that_would_ruin_a_pretrained_model_is_told(tmp_path: Path, model: Path) -> None:
    pretrained = [*jsonl(tmp_path, model, rows(9)), "learner=torch", f"model={{name: folder, path: {model}}}"]
    for rate, told in (("2e-3", True), ("5e-5", False), ("null", False)):
        note = preflight.preflight(configs.load([QUICKSTART, *pretrained, f"learner.lr={rate}"]))
        assert ("learner.lr=0.002 is likely to ruin a pretrained model: usual are 1e-6" in note) is told
    for rate, told in (("1e-2", True), ("1e-3", False), ("null", False)):
        note = preflight.preflight(configs.load([QUICKSTART, *pretrained, f"learner.lr={rate}", "learner.lora={}"]))
        assert ("learner.lr=0.01 is likely to ruin adapters (LoRA) of a pretrained model: usual" in note) is told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["learner.schedule=linear", "learner.schedule_steps=50"], True),
        (["learner.schedule=cosine", "learner.schedule_steps=70"], False),
        (["learner.schedule=linear"], False),
        (["learner.schedule_steps=50"], False),
        (["learner=timed"], False),
    ],
)
def test_steps_behind_the_end_of_a_schedule_are_told_of(overrides: list[str], told: bool) -> None:
    note = preflight.preflight(configs.load([QUICKSTART, "run.steps=70", *overrides]))
    assert ("learner.schedule_steps=50: train steps 51 to run.steps=70 have a learning rate of 0" in note) is told


def test_a_dry_run_passes_notes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [QUICKSTART, f"run.dir={tmp_path}", "task.train_size=3", "--dry-run"]
    prepare(parse(argv), argv)
    assert "note: groups_per_batch=16: there are 3 training prompts" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["notahost", "192.0.2.1"])
def test_an_address_of_no_interface_here_is_refused(tmp_path: Path, host: str) -> None:
    said = refusal(tmp_path, f"buffer.host={host}")
    assert said.startswith(f"buffer.host={host}: can't bind to it (") and said.endswith("(see ip address), or node")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "lo", "node"])
def test_an_address_or_interface_of_this_machine_is_taken(host: str) -> None:
    preflight.check_host(host)


def test_trackers_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str) -> None:
        preflight.check_trackers(configs.load(["configs/quickstart.yaml", f"run.trackers=[{name}]"]))

    with pytest.raises(configs.ConfigError, match=r"run.trackers: .*no tracker 'tensorbord'.* mean 'tensorboard'"):
        check("tensorbord")
    monkeypatch.setattr("scripts.starting.preflight.find_spec", lambda name: None)
    with pytest.raises(configs.ConfigError, match=r"trackers: wandb is not installed: pip install .areal_like"):
        check("wandb")


@pytest.mark.parametrize(
    ("overrides", "heldout"),
    [(["eval.prompts=5"], 5), (["eval.prompts=0"], 4), (["eval.prompts=5", "eval.sets={more: {prompts: 9}}"], 9)],
)
def test_of_held_out_prompts_those_are_checked_that_are_asked(overrides: list[str], heldout: int) -> None:
    """By evaluations, and a few by probes."""
    config = configs.load([QUICKSTART, *overrides])
    task = build("task", config.task, 0)
    asked = preflight.asked_prompts(task, sets_of(config, task))
    rows = {split: preflight.rows_to_check(task, split, asked, config, None) for split in ("train", "heldout")}
    assert rows == {"train": range(preflight.ROWS), "heldout": range(heldout)}
