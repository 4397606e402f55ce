"""Config files, overrides, refusals. Stand-ins for the heavy components are written to the test's folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ReadonlyConfigError

from areal_like.config import layers, registry
from areal_like.config import run_config as config
from areal_like.config.corrections import USUAL
from areal_like.config.other_names import OTHER_NAMES
from areal_like.config.registry import COMPONENTS, knobs
from areal_like.config.run_config import ConfigError, load
from areal_like.config.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[2]

STAND_INS = """
class Engine:
    def __init__(self, *, base: float = 0.1, nested: dict | None = None): ...
class Learner:
    def __init__(self, *, lr: float = 1e-3, minibatches: int = 1, betas: list = [0.9, 0.95]): ...
class Scheduler:
    def __init__(self, sizing, *, max_staleness: float = 1, max_inflight_groups: int | None = None): ...
class Rounds:
    def __init__(self, sizing, *, max_staleness: float = 0): ...
class Launcher:
    def __init__(self, *, ready_timeout: float = 60.0): ...
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with engines, learners, schedulers and a launcher whose knobs this file knows."""
    (tmp_path / "config_stand_ins.py").write_text(STAND_INS)
    monkeypatch.syspath_prepend(tmp_path)
    for kind, name, attribute in (
        ("engine", "torch", "Engine"),
        ("engine", "timed", "Engine"),
        ("learner", "torch", "Learner"),
        ("scheduler", "async", "Scheduler"),
        ("scheduler", "sync", "Rounds"),
        ("launcher", "local", "Launcher"),
    ):
        monkeypatch.setitem(registry.COMPONENTS[kind], name, f"config_stand_ins:{attribute}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(argv)
    return str(error.value)


def write(folder: Path, name: str, **content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("learner.lr=1e-3", "learner.lr", 0.001),
        ("learner.lr=3", "learner.lr", 3),
        ("learner.betas=[0.5, 1e-2]", "learner.betas", [0.5, 0.01]),
        ("scheduler.max_staleness=inf", "scheduler.max_staleness", math.inf),
        ("scheduler.max_staleness=.inf", "scheduler.max_staleness", math.inf),
        ("run.max_seconds=90", "run.max_seconds", 90.0),
        ("run.max_seconds=null", "run.max_seconds", None),
        ("run.max_seconds=", "run.max_seconds", None),
        ("run.name=a=b", "run.name", "a=b"),
        ("advantage.std=yes", "advantage.std", True),
        ("engine=timed", "engine", {"name": "timed"}),
        ("engine={name: timed, base: 0.5}", "engine", {"name": "timed", "base": 0.5}),
        ("run.seed=${run.steps}", "run.seed", 100),
        ("engine.nested={seconds: '${run.steps}'}", "engine.nested", {"seconds": 100}),
        ("loss=ppo", "loss.name", "ppo"),
        ("loss=config_stand_ins:Engine", "loss.name", "config_stand_ins:Engine"),
        ("scheduler.max_staleness=3", "scheduler.max_staleness", 3),
    ],
)
def test_an_override_becomes_a_value(stand_ins: Path, override: str, key: str, value: Any) -> None:
    got = OmegaConf.select(cast(DictConfig, load(["base", override])), key)
    got = OmegaConf.to_container(got) if OmegaConf.is_config(got) else got
    assert got == value and type(got) is type(value)


def test_later_overrides_win(stand_ins: Path) -> None:
    assert load(["base", "learner.lr=1", "learner.lr=2"]).learner["lr"] == 2


@pytest.mark.parametrize("choice", ["mode=sync", "scheduler=sync", "scheduler.name=sync"])
def test_a_choice_never_wipes_out_a_value_set_for_it(stand_ins: Path, choice: str) -> None:
    before, after = (
        load(["base", "scheduler.max_staleness=0", choice]),
        load(["base", choice, "scheduler.max_staleness=0"]),
    )
    assert before.scheduler == after.scheduler == {"name": "sync", "max_staleness": 0}


def test_the_name_of_a_run_is_a_value_and_replaces_nothing(stand_ins: Path) -> None:
    run = load(["base", "run.name=mine"]).run
    assert run.name == "mine" and run.steps == load(["base"]).run.steps


# Files


def test_extends_merges_in_order_and_the_file_wins(stand_ins: Path) -> None:
    write(stand_ins, "one.yaml", run={"steps": 1, "seed": 1}, actors={"count": 1})
    write(stand_ins, "deep/two.yaml", run={"steps": 2, "seed": 2})
    write(stand_ins, "main.yaml", extends=["base", "one", "deep/two"], run={"seed": 3})
    run = load(["main.yaml"])
    assert (run.run.steps, run.run.seed, run.actors.count) == (2, 3, 1)


def test_a_name_is_found_beside_the_file_before_configs(stand_ins: Path) -> None:
    write(stand_ins, "mode/sync.yaml", mode="sync", scheduler={"name": "sync", "max_staleness": 0}, run={"seed": 9})
    write(stand_ins, "main.yaml", extends="base")
    assert load(["main.yaml", "mode=sync"]).run.seed == 9
    assert load(["main", "mode=async"]).run.seed == 0


def test_choices_in_a_file_come_before_its_values(stand_ins: Path) -> None:
    write(stand_ins, "main.yaml", extends="base", engine={"base": 0.7}, mode="sync", task="reverse")
    main = load(["main.yaml", "engine=timed"])
    assert main.mode == "sync" and main.scheduler == {"name": "sync"} and main.task == {"name": "reverse"}
    assert main.engine == {"name": "timed"}, "the command line names another component: 0.7 was not meant for it"
    write(stand_ins, "main.yaml", extends="base", engine={"base": 0.7}, **{"engine.name": "timed"})
    assert load(["main.yaml"]).engine == {"name": "timed", "base": 0.7}


def test_a_component_of_another_name_replaces_the_inherited_one_at_any_depth(stand_ins: Path) -> None:
    write(
        stand_ins,
        "one.yaml",
        extends="base",
        engine={"nested": {"name": "a", "knob": 1, "inner": {"name": "x", "y": 1}}},
    )
    write(stand_ins, "same.yaml", extends="one", engine={"nested": {"name": "a", "inner": {"name": "z"}}})
    write(stand_ins, "other.yaml", extends="one", engine={"nested": {"name": "b"}})
    write(stand_ins, "unnamed.yaml", extends="one", engine={"nested": {"knob": 2}})
    assert load(["same"]).engine["nested"] == {"name": "a", "knob": 1, "inner": {"name": "z"}}
    assert load(["other"]).engine["nested"] == {"name": "b"}
    assert load(["unnamed"]).engine["nested"] == {"name": "a", "knob": 2, "inner": {"name": "x", "y": 1}}


def test_sync_over_async_is_no_chimera(stand_ins: Path) -> None:
    assert load(["base", "mode=sync"]).scheduler == {"name": "sync"}
    assert load(["base", "mode=sync"]).mode == "sync"


def test_lists_are_replaced(stand_ins: Path) -> None:
    write(stand_ins, "one.yaml", extends="base", learner={"betas": [1, 2, 3]})
    write(stand_ins, "two.yaml", extends="one", learner={"betas": [4]})
    assert load(["two.yaml"]).learner["betas"] == [4]


def test_a_circle_of_configs_is_refused(stand_ins: Path) -> None:
    write(stand_ins, "one.yaml", extends="two")
    write(stand_ins, "two.yaml", extends="one")
    assert "circle: one.yaml -> two.yaml -> one.yaml" in refusal("one.yaml")


# Refusals: what, where, and what to do


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actors.count=two", ["actors.count", "'two'", "Integer", "[from command line]"]),
        ("actors=2", ["actors: expected a section", "count, max_restarts, restart_window, min_alive, threads"]),
        ("actor.count=2", ["unknown key 'actor'", "Did you mean 'actors'?", "[from command line]"]),
        ("actors.cuont=2", ["unknown key 'actors.cuont'", "Did you mean 'count'?"]),
        ("zzzz=2", ["unknown key 'zzzz'", "There are mode, run"]),
        ("actors.count=0", ["actors.count: must be at least 1, got 0"]),
        ("run.max_seconds=soon", ["run.max_seconds", "'soon'", "Float"]),
        ("staleness_policy=dorp", ["staleness_policy", "'dorp'", "'drop', 'requeue', 'mask_tokens'"]),
        ("buffer.transport=udp", ["buffer.transport", "'udp'", "'ipc'"]),
        ("learner.lrr=1e-3", ["learner.lrr", "no knob 'lrr'", "Did you mean 'lr'?", "minibatches", "command line"]),
        ("learner.lr=fast", ["learner.lr: expected float, got 'fast'"]),
        ("mode=asnyc", ["there is no mode 'asnyc'", "Did you mean 'async'?"]),
        ("mode=3", ["there is no mode '3'"]),
        ("task=copi", ["there is no task 'copi'", "Did you mean 'copy'", "jsonl"]),
        ("task=null", ["there is no task 'None'"]),
        ("task={name: coppy}", ["there is no task 'coppy'", "Did you mean 'copy'?", "module:Name"]),
        ("engine=nowhere_at_all:Engine", ["engine.name", "'nowhere_at_all' cannot be found"]),
        ("task=jsonl", ["task.path has no value", "task.path=VALUE", "jsonl.yaml"]),
        ("sampling.top_p=0.9", ["sampling.top_p is not supported", "logprobs", "command line"]),
        ("sampling.top_k=5", ["sampling.top_k is not supported"]),
        ("resume=yes", ["resume: expected auto, a run folder, or null", "got yes or no", "command line"]),
        ("replay=no", ["replay: expected a run folder, or null"]),
        ("run.seed=${oops}", ["run.seed", "'oops' not found"]),
        ("run.name=[1", ["'run.name=[1'", "not valid yaml"]),
        ("nonsense", ["'nonsense' is no override", "key=value"]),
        ("--steps=3", ["'--steps=3' is no override"]),
        ("a..b=3", ["'a..b=3' is no override"]),
    ],
)
def test_a_wrong_override_is_refused_in_one_clear_line(stand_ins: Path, override: str, words: list[str]) -> None:
    message = refusal("base", override)
    assert [word for word in words if word not in message] == [], message
    assert len(message.splitlines()) == 1


def test_a_wrong_file_is_refused_by_name(stand_ins: Path) -> None:
    write(stand_ins, "typo.yaml", extends="base", learner={"lrr": 1})
    assert refusal("typo.yaml").endswith("[from typo.yaml]")
    write(stand_ins, "lost.yaml", extends="bsae")
    assert "no config 'bsae'" in (message := refusal("lost.yaml")) and "Did you mean 'base'?" in message
    assert message.endswith("[from extends in lost.yaml]")
    assert "Did you mean 'quickstart'?" in refusal("configs/quikstart.yaml")
    (stand_ins / "bad.yaml").write_text("run: [1\nx: 2")
    assert "bad.yaml: not valid yaml" in refusal("bad.yaml")
    (stand_ins / "list.yaml").write_text("- 1")
    assert "a config is a mapping" in refusal("list.yaml")
    (stand_ins / "twice.yaml").write_text("run: {steps: 1, steps: 2}")
    assert "duplicate key steps" in refusal("twice.yaml")
    write(stand_ins, "alone.yaml", mode="async")
    assert "let the file extend base" in refusal("alone.yaml")
    assert "give the file first" in refusal("mode=sync")
    assert "no config file given" in refusal()


# The result


def test_the_result_is_read_only_and_survives_yaml(stand_ins: Path) -> None:
    made = load(["base", "scheduler.max_staleness=inf", "learner.lr=1e-5", "run.target_reward=1", "run.name='1e5'"])
    with pytest.raises(ReadonlyConfigError):
        made.run.steps = 3
    with pytest.raises(AttributeError):
        made.run.stepz  # type: ignore[attr-defined]  # noqa: B018
    config.save(made, stand_ins / "saved.yaml")
    again = config.load_resolved(stand_ins / "saved.yaml")
    assert again == made and config.to_yaml(again) == config.to_yaml(made)
    assert again.scheduler["max_staleness"] == math.inf and again.learner["lr"] == 1e-5 and again.run.name == "1e5"
    with pytest.raises(ReadonlyConfigError):
        again.run.steps = 3
    assert load(["saved.yaml"]) == made, "a saved config can be run again, with overrides too"


def test_replacing_a_key_leaves_the_first_alone_and_checks(stand_ins: Path) -> None:
    made = load(["base"])
    assert config.replace(made, "run.name", "x").run.name == "x" and made.run.name is None
    for key, value in {"run.nane": "x", "nonsense": 1, "run.steps": "many", "learner.nonsense": 1}.items():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            config.replace(made, key, value)


# What is shipped

FILES = sorted(set(layers.CONFIGS.rglob("*.yaml")) - set(layers.CONFIGS.glob("ablation/*")))
"""Ablations are no configs but name some; tests of `scripts.ablation` load them."""
NEEDED = {
    **{stem: ["task.path=x", "task.tokenizer=y"] for stem in ("jsonl", "code_jsonl")},
    "sft.yaml": ["task.path=x", "model.path=y"],
    "verifiers": ["task.env=x", "task.tokenizer=bytes"],
    **{stem: ["model.path=x"] for stem in ("math", "gsm8k")},
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(layers.CONFIGS)))
def test_every_shipped_config_loads(file: Path, tmp_path: Path) -> None:
    """A file of a config group is loaded as a choice over base; any other by itself."""
    group = file.parent.name
    is_choice = file.parent != layers.CONFIGS and group in config.Config.__annotations__
    argv = ["base", f"{group}={file.stem}"] if is_choice else [str(file)]
    made = load([*argv, *NEEDED.get(str(file.relative_to(layers.CONFIGS)), NEEDED.get(file.stem, []))])
    config.save(made, tmp_path / "config.yaml")
    assert config.load_resolved(tmp_path / "config.yaml") == made


def test_every_key_of_base_has_a_comment() -> None:
    lines = (layers.CONFIGS / "base.yaml").read_text().splitlines()
    keys = [line for line in lines if ":" in line and not line.startswith("#")]
    sections = {"run", "scheduler", "sizing", "sampling", "advantage", "eval", "actors", "buffer", "launcher"}
    sections |= {"checkpoint", "security"}
    bare = [line for line in keys if "#" not in line and line.strip().rstrip(":") not in sections]
    assert [line for line in bare if not line.strip().startswith("name: ")] == []


def test_loading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from areal_like.config.run_config import load\n"
        "load(['configs/quickstart.yaml', 'mode=sync'])\n"
        "print(*sorted({'torch', 'transformers', 'zmq', 'ray', 'sglang', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


# Staleness on purpose


@pytest.mark.parametrize(("ages", "oldest"), [("4", 4), ("{0: 0.5, 6: 0.5}", 6), ("{uniform: [0, 8]}", 8)])
def test_injected_ages_are_the_bound_where_none_was_set(stand_ins: Path, ages: str, oldest: int) -> None:
    for argv in (["base", f"inject_staleness={ages}"], ["base", "mode=async", f"inject_staleness={ages}"]):
        assert load(argv).scheduler["max_staleness"] == oldest
    wider = load(["base", f"inject_staleness={ages}", "scheduler.max_staleness=20"])
    assert wider.scheduler["max_staleness"] == 20
    saved = stand_ins / "saved.yaml"
    config.save(wider, saved)
    assert config.load_resolved(saved) == wider


def test_injected_ages_that_contradict_the_rest_are_refused(stand_ins: Path) -> None:
    assert "bound of 2" in refusal("base", "inject_staleness=4", "scheduler.max_staleness=2")
    assert "bound of 0" in refusal("base", "inject_staleness=4", "mode=sync")
    assert "batch_policy=in_order" in refusal("base", "inject_staleness=4", "batch_policy=fifo")
    assert "1 in sum" in refusal("base", "inject_staleness={0: 0.5}")
    write(stand_ins, "mine", extends="base", scheduler={"max_staleness": 3})
    assert "bound of 3" in refusal("mine", "inject_staleness=4")


JUDGE = "{name: judge, base_url: http://127.0.0.1:1/v1, model_name: m}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sizing.group_size=1"], "sizing.group_size=1: advantage=group compares the samples of one prompt"),
        (["advantage={name: gae}"], "advantage=gae needs a critic: set learner.critic_lr above 0"),
        (["loss=dg", "learner.num_minibatch_epochs=2"], "learner.num_minibatch_epochs: loss=dg"),
        (["learner.lora={rnk: 4}"], r"learner.lora.rnk: .*'rank'"),
        (["learner.lora={rank: many}"], "learner.lora.rank: expected int"),
        (["rewards.timeout=0"], "rewards.timeout: must be at least"),
        (["learner.threads=0"], "learner.threads: must be at least 1"),
        (["learner.clip_grad=-1"], "learner.clip_grad: must be at least 0"),
        (["advantage=maxrl", "learner.kl_reward=0.1"], "learner.kl_reward: advantage=maxrl"),
        (["learner.critic_clip=0.2"], "learner.critic_clip: there is no critic"),
        (["learner.kl_cut=10"], "learner.kl_cut: there is no KL to cut"),
        (
            ["advantage=gae", "learner.critic_lr=1e-3", "advantage.bootstrap=true", "learner.overlong_filter=true"],
            "advantage.bootstrap: learner",
        ),
        (["advantage={name: batch, std: false, deviation_of: rewards}"], "advantage.deviation_of: advantage.std=false"),
        (["advantage.std=bessel"], "advantage.std: expected"),
        (["learner.router_replay=true"], "learner.router_replay: a model of qwen2 has no experts"),
        (["learner.router_replay=true", "learner.compile=true"], "does not go with learner.compile"),
        (["learner.router_replay=true", "engine=timed"], "engine=timed does not return the experts"),
        (["engine.return_experts=true"], "engine.return_experts: learner.router_replay says whether"),
        (["advantage=maxrl", "learner={overlong_penalty: 1, overlong_limit: 8}"], "overlong_penalty: advantage=maxrl"),
        (
            [f"group_reward={JUDGE}", "group_reward.scale=[1, 1]"],
            r"group_reward.scale=\[1, 1\]: .* the lower one",
        ),
        ([f"group_reward={JUDGE}", "group_reward.scale=[1]"], r"group_reward.scale=\[1\]: want two numbers"),
        ([f"group_reward={JUDGE}", "group_reward.template=Grade"], r"group_reward.template must hold \$answer"),
        (["workflow={name: agent, agent: [x]}", "workflow.call_marks=[a]"], r"workflow.call_marks=\['a'\]: want two"),
    ],
)
def test_what_the_learner_would_refuse_is_refused_here(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(["configs/quickstart.yaml", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["advantage=gae", "learner.critic_lr=1e-3"],
        ["advantage=maxrl", "learner.kl_loss=0.1", "learner.clip_grad=0"],
        ["advantage.std=sample", "learner.kl_loss=0.1", "learner.kl_cut=10"],
        ["advantage=gae", "learner.critic_lr=1e-3", "advantage.bootstrap=true", "learner.critic_clip=0.2"],
        ["loss=ppo", "learner.num_minibatch_epochs=2"],
        ["learner.lora={rank: 4, targets: [q_proj]}"],
        ["learner.lora={}"],
        ["advantage={name: gae}", "learner=timed"],
        ["mode=sync", "partial_rollout=restart"],
        [f"group_reward={JUDGE}", "group_reward.template=$answer"],
        ["workflow={name: agent, agent: [x]}", "workflow.call_marks=[a, b]"],
    ],
)
def test_what_it_takes_is_taken(argv: list[str]) -> None:
    load(["configs/quickstart.yaml", *argv])


MULTI = "workflow={name: multi_turn, max_turns: 3, environment: {name: tools, max_calls: 5}}"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"name": "multi_turn", "max_turns": 3, "environment": {"name": "tools", "max_calls": 5}}),
        (
            ["eval.workflow={max_turns: 1, environment: {turn_reward: 1}}", "eval.workflow.environment.max_calls=2"],
            {
                "name": "multi_turn",
                "max_turns": 1,
                "environment": {"name": "tools", "max_calls": 2, "turn_reward": 1},
            },
        ),
        (
            ["eval.workflow.environment={name: tests.actors.desk:Desk}"],
            {"name": "multi_turn", "max_turns": 3, "environment": {"name": "tests.actors.desk:Desk"}},
        ),
        (["eval.workflow={name: best_of_n, n: 2}", "eval.workflow={name: single_turn}"], {"name": "single_turn"}),
    ],
)
def test_held_out_prompts_take_the_workflow_with_knobs_of_their_own(argv: list[str], expected: dict) -> None:
    loaded = load(["base", MULTI, *argv])
    assert config.heldout_workflow(loaded) == expected
    assert loaded.workflow["max_turns"] == 3 and loaded.workflow["environment"]["max_calls"] == 5


def test_a_wrong_knob_of_the_workflow_of_held_out_prompts_is_named_with_its_path() -> None:
    assert "eval.workflow.max_turn" in refusal("base", MULTI, "eval.workflow.max_turn=3")
    assert "eval.workflow.environment.credits" in refusal("base", MULTI, "eval.workflow.environment.credits=exact")


def test_a_scheduler_that_is_no_mode_leaves_the_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.COMPONENTS["scheduler"], "single", "buffer.schedulers:AsyncScheduler")
    found = load(["configs/quickstart.yaml", "scheduler=single"])
    assert (found.mode, found.scheduler["name"]) == ("async", "single")
    assert load(["configs/quickstart.yaml", "mode=async", "scheduler.name=single"]).mode == "async"


@pytest.mark.parametrize("name", COMPONENTS["correction"])
def test_every_correction_goes_with_a_loss_without_a_ratio_of_its_own(name: str) -> None:
    knobs = {"ratio": {"name": name, "reject": "ratio", "high": 2.0}}.get(name, name)
    config = load(["quickstart", "loss.name=reinforce", f"loss.correction={json.dumps(knobs)}"])
    assert config.loss["correction"] == knobs


@pytest.mark.parametrize("name", [*USUAL, "vespo", "gspo"])
def test_losses_load_with_their_usual_correction(name: str) -> None:
    assert load(["quickstart", f"loss.name={name}"]).loss["name"] == name


@pytest.mark.parametrize("key", ["parking", "run.parking", "task", "sampling.temperature", "buffer"])
def test_a_run_of_another_format_is_refused(tmp_path: Path, key: str) -> None:
    tree, path = yaml.safe_load(config.to_yaml(load(["quickstart"]))), tmp_path / "config.yaml"
    section, _, below = key.partition(".")
    values, name = (tree[section], below) if below else (tree, section)
    values.pop(name, None) or values.update({name: True})
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as error:
        config.load_resolved(path)
    assert error.value.key == key


def test_names_of_other_systems_are_answered_with_keys_that_exist() -> None:
    keys = {f"{section}.{key}" for section, shape in SECTIONS.items() for key in shape.__dataclass_fields__}
    keys |= {f"{kind}.{knob}" for kind, names in COMPONENTS.items() for name in names for knob in knobs(kind, name)}
    assert set(OTHER_NAMES.values()) - keys <= config.Config.__dataclass_fields__.keys()
    for wrong, ours in {
        "learner.learning_rate": "learner.lr",
        "actor_rollout_ref.rollout.n": "sizing.group_size",
    }.items():
        with pytest.raises(ConfigError, match=ours):
            load(["quickstart", f"{wrong}=1"])
    with pytest.raises(ConfigError, match="algorithm=grpo"):
        load(["quickstart", "loss=grpo"])
