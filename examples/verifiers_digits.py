"""An environment for the package verifiers, as others write them: it uses nothing of this project.

    areal-like train configs/quickstart.yaml task=verifiers task.env=examples.verifiers_digits \\
        task.tokenizer=bytes task.max_tokens=16

`kind`: single (say the digits again), turns (say each digit that is shown, turn by turn), tools (ask a tool for a sum).
"""

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", digits: int = 2) -> vf.Environment:
    rows = [{"question": f"{number:0{digits}}", "answer": f"{number:0{digits}}"} for number in range(10**digits)]
    data, rubric = Dataset.from_list(rows), vf.Rubric(funcs=[share])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=rubric)
    if kind == "turns":
        return Turns(dataset=data, rubric=rubric)
    return vf.ToolEnv(tools=[add], dataset=data, rubric=vf.Rubric(funcs=[summed]), max_turns=3)


def share(completion: list[dict[str, Any]], answer: str) -> float:
    """Share of right digits in the model's answers, in order."""
    said = "".join(each["content"] or "" for each in completion if each["role"] == "assistant")
    return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))


class Turns(vf.MultiTurnEnv):
    """Shows the number again until each of its digits has had a turn."""

    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        return [{"role": "user", "content": state["answer"][len(state["trajectory"])]}]

    @vf.stop
    async def all_said(self, state: vf.State) -> bool:
        return len(state["trajectory"]) == len(state["answer"])


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(int(a) + int(b))


def summed(completion: list[dict[str, Any]], answer: str) -> float:
    """Does the last answer have the sum of the digits?"""
    return float(str(sum(map(int, answer))) in (completion[-1]["content"] or "") if completion else 0)
