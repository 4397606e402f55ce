"""task=verifiers against the real package: rows, turns, tools, rewards, and answers that are code.

A run of it is the command in docs/environments.md (tests/integration/test_documented_commands.py).
"""

import asyncio
import json
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("verifiers"):  # its import takes seconds, in each process that collects
    pytest.skip("needs pip install verifiers", allow_module_level=True)

from actors.agents.programs import AgentError
from actors.agents.workflow import agent as workflow
from actors.resumption import Recorder
from areal_like.tasks import verifiers as adaptor
from areal_like.tasks.verifiers import Verifiers, environment
from areal_like.types import Limits, PartialSample, Sample
from tests.actors.agents.test_conversation import Speaker

PLAY = "actors.agents.of_verifiers:play"
ENV = "examples.verifiers_digits"
EOS = 256


def make(seed: int = 0, **knobs: Any) -> Verifiers:
    return Verifiers(seed, **{"tokenizer": "bytes", "env": ENV, "max_tokens": 400} | knobs)


def play(
    task: Verifiers, *said: str, row: int = 0, most: int = 400, record: PartialSample | None = None
) -> tuple[Sample, Speaker]:
    """A sample whose model answers `said`, turn by turn, after the turns in `record`."""
    prompt = task.prompt("train", row)
    engine = Speaker(prompt.codec, *said)

    async def scenario() -> Sample:
        limits = Limits(most, 1.0, (EOS,))
        noting = Recorder(engine, task.reward, record or PartialSample())  # type: ignore[arg-type]
        return await workflow(noting, task.reward, prompt, limits, "r", agent=PLAY, timeout=30)  # type: ignore[arg-type]

    return asyncio.run(scenario()), engine


def text(prompt: Any) -> str:
    return prompt.codec.decode(prompt.tokens)


def test_rows_are_the_environments_examples_and_the_splits_share_none() -> None:
    task, again, other = make(), make(), make(1)
    rows = {split: [text(task.prompt(split, row)) for row in range(task.size(split))] for split in ("train", "heldout")}
    assert len(rows["train"]) == 95 and len(rows["heldout"]) == 5 and len({*rows["train"], *rows["heldout"]}) == 100
    assert rows["train"][0].startswith("[user]") and rows["train"][0].endswith("[assistant]")
    assert [text(again.prompt("train", row)) for row in range(95)] == rows["train"]
    assert [text(other.prompt("train", row)) for row in range(95)] != rows["train"]
    with pytest.raises(ValueError, match="unknown split"):
        task.size("test")
    with pytest.raises(IndexError, match="row 5 of split 'heldout'"):
        task.prompt("heldout", 5)


def digits(task: Verifiers) -> str:
    return task.prompt("train", 0).messages[-1]["content"]


def test_a_single_turn_is_scored_by_the_rubric() -> None:
    task = make()
    right = digits(task)
    for said, reward in ((right, 1.0), (right[0] + "x", 0.5), ("", 0.0)):
        sample, engine = play(task, said + "<eos>")
        assert sample.reward == reward and sample.loss_mask.all() and len(engine.asked) == 1


def test_turns_of_an_environment_are_turns_of_the_sample() -> None:
    task = make(args={"kind": "turns"})
    first, second = digits(task)
    sample, engine = play(task, f"{first}<eos>", f"{second}<eos>")
    assert sample.reward == 1.0 and len(engine.asked) == 2
    assert task.prompt("train", 0).codec.decode(sample.tokens) == (
        f"[user]{first}{second}[assistant]{first}[user]{second}[assistant]{second}"
    )
    assert sample.loss_mask.sum() == 4, "two digits and two ends"


def test_a_resume_repeats_the_sample_as_long_as_the_environment_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    task, record, shown = make(args={"kind": "turns"}), PartialSample(), iter("778")

    async def moody(self: Any, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": next(shown)}]

    monkeypatch.setattr("examples.verifiers_digits.Turns.env_response", moody)
    first, _ = play(task, "1<eos>", "2<eos>", record=record)
    again, engine = play(task, record=record)
    assert again.tokens.tolist() == first.tokens.tolist() and not engine.asked
    other, engine = play(task, "3<eos>", record=record)
    assert task.prompt("train", 0).codec.decode(other.tokens).endswith("[assistant]1[user]8[assistant]3")
    assert len(engine.asked) == 1


def template(codec: Any) -> None:
    """Of a model with tools in its template."""
    codec._tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ '<tools>' if tools }}"
    )


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><eos>"


def test_tools_are_called_and_their_results_shown_and_errors_told() -> None:
    task = make(args={"kind": "tools"})
    a, b = map(int, digits(task))
    template(task.prompt("train", 0).codec)
    sample, engine = play(task, call("add", {"a": a}), call("add", {"a": a, "b": b}), f"It is {a + b}.<eos>")
    shown = task.prompt("train", 0).codec.decode(sample.tokens[sample.prompt_length :][~sample.loss_mask])
    assert sample.reward == 1.0 and len(engine.asked) == 3
    assert "missing 1 required positional argument: 'b'" in shown and f"[tool]{a + b}[assistant]" in shown


def test_code_from_the_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a name of a tool, as its arguments, as an answer to the package's parsers and its verifier of mathematics."""
    monkeypatch.chdir(tmp_path)  # the code must not name the folder: its number may hold the right answer
    mark = Path("mark")
    code = "__import__('pathlib').Path('mark').touch()"
    task = make(args={"kind": "tools"})
    template(task.prompt("train", 0).codec)
    for hostile in (
        call(code, {}),
        call("__class__", {}),
        call("eval", {"source": code}),
        call("add", {"a": code, "b": 1}),
        call("add", {"__class__": code}),
        call("add", {"self": {"__reduce__": code}, "a": 1, "b": 2}),
        f"<tool_call>{code}</tool_call><eos>",
    ):
        sample, _ = play(task, hostile, code + "<eos>")
        assert sample.reward == 0.0
    import verifiers

    completion = [{"role": "assistant", "content": f"<think>{code}</think><answer>\\boxed{{{code}}}</answer> ${code}$"}]
    for parser in (verifiers.XMLParser(["think", "answer"]), verifiers.ThinkParser(), verifiers.MaybeThinkParser()):
        parser.parse_answer(completion)
    for said in (f"\\boxed{{{code}}}", f"\\boxed{{\\text{{{code}}}}}", f"${code}$", code):
        found = verifiers.MathRubric().correct_answer(
            verifiers.Parser(extract_fn=verifiers.extract_boxed_answer), [{"role": "assistant", "content": said}], "4"
        )
        assert asyncio.run(found) == 0.0
    assert not mark.exists()


def refusal(env: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    import verifiers

    monkeypatch.setattr(verifiers, "load_environment", lambda name, **args: env)
    environment.cache_clear()
    with pytest.raises(ValueError) as caught:
        environment("theirs", "{}")
    return str(caught.value)


def test_what_would_run_code_or_can_not_be_trained_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the package's own names, so that a new version of it that renames them is noticed."""
    import verifiers

    for name in adaptor.REFUSED:
        source = "".join(path.read_text() for path in (Path(verifiers.__file__).parent / "envs").rglob("*.py"))
        assert f"class {name}(" in source
    data = environment(ENV, "{}").get_dataset()

    class Theirs(verifiers.SingleTurnEnv): ...

    Theirs.__mro__[1].__name__ = "SandboxEnv"
    try:
        assert "Prime's sandboxes" in refusal(Theirs(dataset=data), monkeypatch)
    finally:
        Theirs.__mro__[1].__name__ = "SingleTurnEnv"
    assert "completions" in refusal(verifiers.SingleTurnEnv(dataset=data, message_type="completion"), monkeypatch)

    def best(completions: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    grouped = verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[best]))
    assert "group_reward" in refusal(grouped, monkeypatch)


def test_the_signals_stay_the_actors() -> None:
    """Environments would take SIGTERM, on which an actor hands its work back; and threads may not set any."""
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal, *(signal.getsignal(number) for number in watched)]
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(make().size("train")))
    thread.start()
    thread.join()
    assert sizes == [95] and before == [signal.signal, *(signal.getsignal(number) for number in watched)]


def test_an_environment_that_fails_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Any, messages: Any, state: Any, **_: Any) -> Any:
        from verifiers import InfraError

        raise InfraError("no network")

    task = make(args={"kind": "turns"})
    monkeypatch.setattr(type(environment(ENV, json.dumps({"kind": "turns"}))), "env_response", fails)
    with pytest.raises(AgentError, match="InfraError"):
        play(task, "1<eos>")
