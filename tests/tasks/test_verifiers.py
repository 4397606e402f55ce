"""task=verifiers against the real package: rows, turns, tools, rewards, and answers that are code."""

import asyncio
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("verifiers"):  # its import takes seconds, in each process that collects
    pytest.skip("needs pip install verifiers", allow_module_level=True)

from actors.agents.programs import AgentError
from actors.agents.workflow import agent as workflow
from actors.recorder import Recorder
from areal_like.errors import UserError
from areal_like.tasks import verifiers as adaptor
from areal_like.tasks.verifiers import Verifiers, environment
from areal_like.types import Limits, Sample
from tests.actors.agents.test_conversation import TEMPLATE, Speaker

PLAY = "areal_like.tasks.verifiers:play"
ENV = "examples.verifiers_digits"
EOS, SIZES = 256, {"train": 96, "heldout": 4}


def make(seed: int = 0, **knobs: Any) -> Verifiers:
    return Verifiers(seed, **{"tokenizer": "bytes", "env": ENV, "max_tokens": 400} | knobs)


def play(task: Verifiers, *said: str, row: int = 0, most: int = 400) -> tuple[Sample, Speaker]:
    """A sample whose model answers `said`, turn by turn."""
    prompt = task.prompt("train", row)
    engine = Speaker(prompt.codec, *said)

    async def scenario() -> Sample:
        limits = Limits(most, 1.0, (EOS,))
        noting = Recorder(engine, task.reward)  # type: ignore[arg-type]
        return await workflow(noting, task.reward, prompt, limits, "r", agent=PLAY, timeout=30)  # type: ignore[arg-type]

    return asyncio.run(scenario()), engine


def text(prompt: Any) -> str:
    return prompt.codec.decode(prompt.tokens)


def test_rows_are_the_environments_examples_and_the_splits_share_none() -> None:
    rows = {split: [text(make().prompt(split, row)) for row in range(size)] for split, size in SIZES.items()}
    assert {split: make().size(split) for split in SIZES} == SIZES and len({*rows["train"], *rows["heldout"]}) == 100
    assert rows["train"][0].startswith("[user]") and rows["train"][0].endswith("[assistant]")
    assert [text(make(1).prompt("train", row)) for row in range(96)] != rows["train"]


def test_a_package_without_its_environments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptor, "version", lambda name: "0.4.0")
    with pytest.raises(UserError, match=r"got verifiers 0\.4\.0, expected 0\.1"):
        make()


def digits(task: Verifiers) -> str:
    return task.prompt("train", 0).messages[-1]["content"]


def test_a_single_turn_is_scored_by_the_rubric() -> None:
    task = make()
    right = digits(task)
    for said, reward in ((right, 1.0), (right[0] + "x", 0.5), ("", 0.0)):
        sample, engine = play(task, said + "<eos>")
        assert sample.reward == reward and sample.loss_mask.all() and len(engine.asked) == 1
        prompt = task.prompt("train", 0)
        assert asyncio.run(task.reward(prompt, prompt.codec.encode(said))) == reward


def make_with_tools() -> Verifiers:
    task: Any = make(args={"kind": "tools"})
    task._tokenizer.chat_template = TEMPLATE
    return task


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><eos>"


def test_tools_are_called_and_their_results_shown_and_errors_told() -> None:
    task = make_with_tools()
    a, b = map(int, digits(task))
    sample, engine = play(task, call("add", {"a": a}), call("add", {"a": a, "b": b}), f"It is {a + b}.<eos>")
    shown = task.prompt("train", 0).codec.decode(sample.tokens[sample.prompt_length :][~sample.loss_mask])
    assert sample.reward == 1.0 and len(engine.asked) == 3
    assert "missing 1 required positional argument: 'b'" in shown and f"[tool]{a + b}[assistant]" in shown


def test_code_from_the_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the code must not name the folder: its number may hold the right answer
    code = "__import__('pathlib').Path('mark').touch()"
    task = make_with_tools()
    calls = [call(code, {}), call("eval", {"source": code}), call("add", {"a": code, "b": 1})]
    for hostile in [*calls, call("__class__", {}), f"<tool_call>{code}</tool_call><eos>"]:
        assert play(task, hostile, code + "<eos>")[0].reward == 0.0
    assert not list(tmp_path.iterdir())


def test_environments_that_run_code_or_cannot_be_trained_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the package's own names, so that a new version of it that renames them is noticed."""
    import verifiers

    source = "".join(path.read_text() for path in (Path(verifiers.__file__).parent / "envs").rglob("*.py"))
    assert all(f"class {name}(" in source for name in adaptor.REFUSED)
    data = environment(ENV, "{}").get_dataset()

    def best(completions: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    kind = type("SandboxEnv", (verifiers.SingleTurnEnv,), {"__module__": "verifiers.envs.sandbox_env"})
    refused = {
        "SandboxEnv": kind(dataset=data),
        "completions": verifiers.SingleTurnEnv(dataset=data, message_type="completion"),
        "group_reward": verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[best])),
    }
    for words, env in refused.items():
        monkeypatch.setattr(verifiers, "load_environment", lambda name, env=env, **args: env)
        environment.cache_clear()
        with pytest.raises(ValueError, match=words):
            environment("theirs", "{}")


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verifiers]:
    """Makes the task of data sets of reasoning_gym."""
    import verifiers
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    monkeypatch.setattr(verifiers, "load_environment", lambda name, **args: ReasoningGymEnv(**args))
    environment.cache_clear()
    sizes = {"num_train_examples": 4, "num_eval_examples": 2}
    return lambda *names: make(env="theirs", args={"gym": list(names), **sizes}, max_prompt_tokens=4096)


def test_data_sets_of_reasoning_gym_are_scored_by_their_own_scorers(gym: Callable[..., Verifiers]) -> None:
    task = gym("chain_sum")
    prompt = task.prompt("train", 0)
    right = eval(prompt.messages[-1]["content"].partition(":")[2].strip(" ="))
    for said, reward in ((f"<answer>{right}</answer>", 1.0), (f"<answer>{right + 1}</answer>", 0.0), (str(right), 0.0)):
        assert asyncio.run(task.reward(prompt, prompt.codec.encode(said))) == reward


@pytest.mark.parametrize("name", sorted(adaptor.EVALUATED | adaptor.UNSTEADY))
def test_data_sets_whose_scorers_run_answers_or_whose_items_move_are_refused(gym, name: str) -> None:
    with pytest.raises(ValueError, match=f"of {name} "):
        gym(name).prompt("train", 0)


def test_no_other_scorer_of_reasoning_gym_evaluates_answers() -> None:
    """Reads the package: a new version may have another one."""
    import reasoning_gym

    calls = ("eval(", "parse_expr(", "exec(", "sympify(", "literal_eval(")
    texts = {file.stem: file.read_text() for file in Path(reasoning_gym.__file__).parent.rglob("*.py")}
    found = {name for name, text in texts.items() if "score_answer" in text and any(call in text for call in calls)}
    own = {"codeio", "number_sorting", "bitwise_arithmetic", "basic_arithmetic", "propositional_logic"}
    assert found - own - adaptor.UNSTEADY == adaptor.EVALUATED, "`own` evaluate what they have made"


def test_the_signals_stay_the_actors() -> None:
    """Environments would take SIGTERM, on which an actor hands its work back; and threads may not set any."""
    watched = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal, *map(signal.getsignal, watched)]
    environment.cache_clear()
    with ThreadPoolExecutor() as threads:
        assert threads.submit(lambda: make().size("train")).result() == 96
    assert before == [signal.signal, *map(signal.getsignal, watched)]


def test_an_environment_that_fails_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Any, messages: Any, state: Any, **_: Any) -> Any:
        from verifiers import InfraError

        raise InfraError("no network")

    monkeypatch.setattr("examples.verifiers_digits.Turns.env_response", fails)
    with pytest.raises(AgentError, match="InfraError"):
        play(make(args={"kind": "turns"}), "1<eos>")
