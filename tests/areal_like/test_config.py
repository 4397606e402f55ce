"""Config files, overrides, the checks of values and between keys, and saved configs."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf.errors import ReadonlyConfigError

from areal_like.config import layers, registry
from areal_like.config import run_config as config
from areal_like.config.heldout import heldout_workflow
from areal_like.config.registry import COMPONENTS, OTHER_NAMES, USUAL_CORRECTIONS, knobs
from areal_like.config.run_config import ConfigError, load
from areal_like.config.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
TURNS = "workflow={name: multi_turn, max_turns: 3, environment: {name: tools, max_characters: 5}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, **content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("learner.lr=1e-3", "learner.lr", 0.001),
        ("learner.betas=[0.5, 1e-2]", "learner.betas", [0.5, 0.01]),
        ("scheduler.max_staleness=inf", "scheduler.max_staleness", math.inf),
        ("scheduler.max_staleness=.inf", "scheduler.max_staleness", math.inf),
        ("run.max_seconds=90", "run.max_seconds", 90.0),
        ("run.max_seconds=", "run.max_seconds", None),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name=0123", "run.name", "0123"),
        ("run.name=5e1234", "run.name", "5e1234"),
        ("run.name=off", "run.name", "off"),
        ("run.name=null", "run.name", None),
        ("buffer.journal=off", "buffer.journal", "off"),
        ("advantage.std=yes", "advantage.std", True),
        ("run.seed=${run.steps}", "run.seed", 100),
        ("loss={name: ppo, clip: 0.1}", "loss", {"name": "ppo", "clip": 0.1}),
        (TURNS.replace("3", "'${run.steps}'"), "workflow.max_turns", 100),
    ],
)
def test_an_override_becomes_a_value(override: str, key: str, value: Any) -> None:
    got = config.select(load(["base", override]), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("use ${x}", None),
        ("${x}", None),
        ("a ${x y} ${", None),
        ("\\${run.seed}", "${run.seed}"),
        ("${run.seed}!", "0!"),
    ],
)
def test_only_the_name_of_a_key_refers_to_it_and_all_else_is_text(tmp_path: Path, given: str, text: str | None) -> None:
    argv = ["base", "task={name: jsonl, path: a, tokenizer: bytes}", f"task.suffix='{given}'", f"run.project='{given}'"]
    found = load(argv)
    config.save(found, tmp_path / "a.yaml")
    for each in (found, config.load_resolved(tmp_path / "a.yaml"), config.replace(found, "run.seed", 1)):
        suffix = registry.with_defaults("task", each.task)["suffix"]
        assert [suffix, each.run.project, config.select(each, "task.suffix")] == [text or given] * 3
    assert config.replace(found, "run.name", "${x}").run.name == "${x}"


@pytest.mark.parametrize("choice", ["mode=sync", "scheduler=sync", "scheduler.name=sync"])
def test_choices_precede_values_and_later_values_win(choice: str) -> None:
    bound = "scheduler.max_staleness=0"
    found = [load(["base", *argv]) for argv in ([bound, choice], [choice, "scheduler.max_staleness=3", bound])]
    assert all(each.mode == "sync" and each.scheduler == {"name": "sync", "max_staleness": 0} for each in found)


def test_files_are_merged_in_order(folder: Path) -> None:
    write(folder, "one.yaml", run={"steps": 1, "seed": 1}, actors={"count": 1}, learner={"betas": [0.1, 0.2]})
    write(folder, "deep/two.yaml", run={"steps": 2, "seed": 2}, learner={"betas": [0.3, 0.4]})
    write(folder, "mode/sync.yaml", mode="sync", scheduler={"name": "sync"}, run={"name": "beside"})
    write(folder, "main.yaml", extends=["base", "one", "deep/two"], run={"seed": 3}, task="reverse")
    made = load(["main", "mode=sync"])
    assert (made.run.steps, made.run.seed, made.run.name, made.actors.count) == (2, 3, "beside", 1)
    assert made.learner["betas"] == [0.3, 0.4] and made.task == {"name": "reverse"}


def test_a_component_of_another_name_replaces_the_inherited_one_at_any_depth(folder: Path) -> None:
    turns = {"name": "multi_turn", "max_turns": 3, "environment": {"name": "tools", "max_characters": 5}}
    write(folder, "one.yaml", extends="base", workflow=turns, loss={"name": "ppo", "clip": 0.1})
    write(folder, "same.yaml", extends="one", workflow={"environment": {"tools": ["python"]}})
    write(folder, "other.yaml", extends="one", workflow={"environment": {"name": "tests.actors.desk:Desk"}}, loss="dg")
    assert load(["same"]).workflow["environment"] == turns["environment"] | {"tools": ["python"]}
    assert load(["other"]).workflow == turns | {"environment": {"name": "tests.actors.desk:Desk"}}
    assert load(["other"]).loss == {"name": "dg"} and load(["one", "loss=ppo"]).loss["clip"] == 0.1
    assert load(["one", "workflow=single_turn"]).workflow == {"name": "single_turn"}


def test_a_wrong_file_is_refused_by_name(folder: Path) -> None:
    write(folder, "typo.yaml", extends="base", learner={"lrr": 1})
    write(folder, "lost.yaml", extends="bsae")
    write(folder, "circle.yaml", extends="back")
    write(folder, "back.yaml", extends="circle")
    write(folder, "alone.yaml", mode="async")
    for name, text in {"bad": "run: [1\nx: 2", "list": "- 1", "twice": "run: {steps: 1, steps: 2}"}.items():
        (folder / f"{name}.yaml").write_text(text)
    for name in ("typo", "lost", "circle", "bad", "list", "twice"):
        with pytest.raises(ConfigError, match=rf"{name}\.yaml"):
            load([f"{name}.yaml"])
    for argv in (["alone"], ["mode=sync"], [], ["no_such_file"]):
        with pytest.raises(ConfigError):
            load(argv)
    for part, form in {
        "task/jsonl": "base task=jsonl task.path=VALUE",
        "ablation/losses": "ablate .*losses.yaml",
    }.items():
        with pytest.raises(ConfigError, match=rf"{part}\.yaml is no run's config.* {form}$"):
            load([part])


MAXRL = "advantage=maxrl"
REFUSED: list[tuple[str, list[str]]] = [
    # the shape
    ("actor", ["actor.count=2"]),
    ("eval.sets", ["eval.sets=[a]"]),
    ("run.changed_data", ["run=5", "run.steps=3"]),
    ("run.seed", ["run.seed=${oops}"]),
    ("engine.name", ["engine=nowhere_at_all:Engine"]),
    # mixtures
    ("task.tasks", ["task={name: mixture, tasks: {}}"]),
    ("task.tasks", ["task={name: mixture, tasks: {mean: copy}}"]),
    ("task.tasks.a", ["task={name: mixture, tasks: {a: {name: copy, digts: 3}}}"]),
    ("task.tasks.a", ["task={name: mixture, tasks: {a: {name: mixture, tasks: {b: copy}}}}"]),
    ("task.ratios", ["task={name: mixture, tasks: {a: copy}, ratios: {b: 1}}"]),
    ("task.ratios.a", ["task={name: mixture, tasks: {a: copy}, ratios: {a: 0}}"]),
    # distillation
    ("learner.teacher.path", ["advantage=distill"]),
    ("learner.teacher", ["learner.teacher={path: x}"]),
    ("learner.teacher.top", ["advantage=distill", "learner.teacher={path: x, top: 3}"]),
    ("run.name", ["run.name=[1"]),
    ("a..b", ["a..b=3"]),
    # types and ranges of knobs and keys
    ("learner.lr", ["learner.lr=.nan"]),
    ("learner.betas", ["learner.betas=[0.9]"]),
    ("learner.betas", ["learner.betas=[2,3]"]),
    ("learner.lora.rnk", ["learner.lora={rnk: 4}"]),
    ("loss.clip", ["loss=ppo", "loss.clip=2"]),
    ("workflow.environment", [TURNS, "workflow.environment=tols"]),
    ("eval.workflow.max_turn", [TURNS, "eval.workflow.max_turn=3"]),
    ("advantage.baseline", ["advantage={name: batch, baseline: none}"]),
    ("run.seed", [f"run.seed={1 << 64}"]),
    ("buffer.heartbeat_timeout", ["buffer.heartbeat_timeout=inf"]),
    ("weights.block_bytes", ["weights.block_bytes=5000"]),
    # transport, launcher, mode
    ("buffer.port=7777", ["buffer.transport=ipc", "buffer.port=7777"]),
    ("buffer.host=192.0.2.1", ["buffer.transport=ipc", "buffer.host=192.0.2.1"]),
    ("scheduler.name", ["mode=sync", "scheduler.name=async"]),
    ("inject_staleness", ["inject_staleness=4", "scheduler.max_staleness=2"]),
    ("inject_staleness", ["inject_staleness=4", "mode=sync"]),
    ("inject_staleness", ["inject_staleness=4", "batch_policy=fifo"]),
    ("inject_staleness", ["inject_staleness=4", "scheduler.max_staleness=20"]),
    # model, loss, advantage, learner
    ("model.hidden_size", ["model.hidden_size=33", "model.num_attention_heads=4"]),
    ("model.num_key_value_heads", ["model.num_attention_heads=4", "model.num_key_value_heads=3"]),
    ("learner.num_minibatch_epochs", ["loss=dg", "learner.num_minibatch_epochs=2"]),
    ("learner.kl_reward", [MAXRL, "learner.kl_reward=0.1"]),
    ("learner.overlong_penalty", [MAXRL, "learner={overlong_penalty: 1, overlong_limit: 8}"]),
    ("learner.lora", ["learner.lora={rank:16}"]),
    ("learner.router_replay", ["learner.router_replay=true"]),
    ("learner.router_replay", ["learner.router_replay=true", "learner.compile=true"]),
    ("learner.router_replay", ["learner.router_replay=true", "engine=timed"]),
    ("engine.return_experts", ["engine.return_experts=true"]),
    # texts
    ("workflow.call_marks", ["workflow={name: agent, agent: [x]}", "workflow.call_marks=[a]"]),
]


@pytest.mark.parametrize(("key", "overrides"), REFUSED, ids=str)
def test_a_wrong_value_is_refused_in_one_line_with_its_key(key: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"(?<![\w.]){re.escape(key)}\b") as error:
        load(["configs/quickstart.yaml", *overrides])
    assert "\n" not in str(error.value)


def test_a_refusal_says_where_the_value_came_from(folder: Path) -> None:
    write(folder, "mine.yaml", extends="base", scheduler={"max_staleness": 3}, learner={"lrr": 1})
    cases = {"mine": r"mine\.yaml", "base learner.lrr=1": "command line", "base eval.workflow.turns=3": "command line"}
    for argv, origin in cases.items():
        with pytest.raises(ConfigError, match=rf"\[from {origin}\]"):
            load(argv.split())


@pytest.mark.parametrize(
    "overrides",
    [
        [f"run.seed={(1 << 64) - 1}", "run.max_seconds=inf"],
        ["learner.betas=[0, 0.5]", "learner.normalise=12", "learner.lora={}", "scheduler.max_staleness=inf"],
        ["loss={name: decoupled_ppo, clip: 1, correction: none}"],
        [MAXRL, "learner.kl_loss=0.1", "learner.clip_grad=0"],
        ["learner.lora={rank: 4, targets: [q_proj]}"],
        *[[f"loss.name={name}"] for name in (*USUAL_CORRECTIONS, "gspo")],
        *[["loss.name=reinforce", f"loss.correction={name}"] for name in COMPONENTS["correction"] if name != "ratio"],
    ],
)
def test_what_goes_together_is_taken(overrides: list[str]) -> None:
    load(["configs/quickstart.yaml", *overrides])


def test_a_saved_config_is_read_only_and_loads_as_it_was(folder: Path) -> None:
    made = load(["base", "scheduler.max_staleness=inf", "learner.lr=1e-5", "run.target_reward=1", "run.name='1e5'"])
    config.save(made, folder / "saved.yaml")
    again = config.load_resolved(folder / "saved.yaml")
    assert again == made == load(["saved.yaml"]) and config.to_yaml(again) == config.to_yaml(made)
    for each in (made, again):
        with pytest.raises(ReadonlyConfigError):
            each.run.steps = 3
    assert config.replace(made, "run.name", "x").run.name == "x" and made.run.name == "1e5"
    for key, value in {"run.nane": "x", "nonsense": 1, "run.steps": "many", "learner.nonsense": 1}.items():
        with pytest.raises(ConfigError, match=re.escape(key)):
            config.replace(made, key, value)


@pytest.mark.parametrize("key", ["parking", "run.parking", "task", "sampling.temperature", "buffer"])
def test_a_run_of_another_format_is_refused(tmp_path: Path, key: str) -> None:
    """A key that is missing, or that today's config does not have."""
    tree, path = yaml.safe_load(config.to_yaml(load(["quickstart"]))), tmp_path / "config.yaml"
    section, _, below = key.partition(".")
    values, name = (tree[section], below) if below else (tree, section)
    values.pop(name, None) or values.update({name: True})
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as error:
        config.load_resolved(path)
    assert error.value.key == key


FILES = sorted(set(layers.CONFIGS.rglob("*.yaml")) - set(layers.CONFIGS.glob("ablation/*")))
NEEDED = {
    "jsonl": ["task.path=x", "task.tokenizer=y"],
    "verifiers": ["task.env=x", "task.tokenizer=bytes"],
    "math": ["model.path=x"],
}
"""Keys that a user must set: of a file by its path below `configs/`, or by its stem."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(layers.CONFIGS)))
def test_every_shipped_config_loads(file: Path, tmp_path: Path) -> None:
    """A file of a config group is loaded as a choice over base; any other without it."""
    group = file.parent.name
    is_choice = file.parent != layers.CONFIGS and group in config.Config.__annotations__
    argv = ["base", f"{group}={file.stem}"] if is_choice else [str(file)]
    made = load([*argv, *NEEDED.get(str(file.relative_to(layers.CONFIGS)), NEEDED.get(file.stem, []))])
    config.save(made, tmp_path / "config.yaml")
    assert config.load_resolved(tmp_path / "config.yaml") == made


def test_loading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from areal_like.config.run_config import load\n"
        "load(['configs/quickstart.yaml', 'mode=sync'])\n"
        "print(*sorted({'torch', 'transformers', 'zmq', 'ray', 'sglang', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


def test_an_injected_age_is_the_bound_where_none_was_set() -> None:
    for choice in ([], ["mode=async"]):
        assert load(["base", *choice, "inject_staleness=4"]).scheduler["max_staleness"] == 4


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"max_turns": 3, "environment": {"name": "tools", "max_characters": 5}}),
        (
            ["eval.workflow={max_turns: 1, environment: {tools: [python], max_characters: 2}}"],
            {"max_turns": 1, "environment": {"name": "tools", "max_characters": 2, "tools": ["python"]}},
        ),
        (
            ["eval.workflow.environment={name: tests.actors.desk:Desk}"],
            {"max_turns": 3, "environment": {"name": "tests.actors.desk:Desk"}},
        ),
        (["eval.workflow={name: agent, agent: x:y}", "eval.workflow={name: single_turn}"], {"name": "single_turn"}),
    ],
)
def test_held_out_prompts_take_the_workflow_with_knobs_of_their_own(overrides: list[str], expected: dict) -> None:
    loaded = load(["base", TURNS, *overrides])
    assert heldout_workflow(loaded) == {"name": "multi_turn"} | expected
    assert loaded.workflow["max_turns"] == 3 and loaded.workflow["environment"]["max_characters"] == 5


def test_the_mode_follows_a_scheduler_that_was_chosen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.COMPONENTS["scheduler"], "single", "buffer.schedulers:AsyncScheduler")
    for name, mode in {"sync": "sync", "async": "async", "single": "async"}.items():
        assert load(["quickstart", f"scheduler={name}"]).mode == mode


def test_names_of_other_systems_point_to_keys_that_exist() -> None:
    keys = {f"{section}.{key}" for section, shape in SECTIONS.items() for key in shape.__dataclass_fields__}
    keys |= {f"{kind}.{knob}" for kind, names in COMPONENTS.items() for name in names for knob in knobs(kind, name)}
    assert OTHER_NAMES.keys() - keys <= config.Config.__dataclass_fields__.keys()
