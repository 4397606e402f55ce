"""A taskset for the package verifiers, as others write them: it uses nothing of this project.

    areal-like train configs/quickstart.yaml task=verifiers task.env=examples.verifiers_digits \\
        task.tokenizer=bytes task.max_tokens=16

`task.args={taskset: {kind: KIND}}`: single (say the digits again), turns (say each digit that is shown, turn by turn),
tools (ask a tool for their sum).
"""

from typing import Any, Literal

import verifiers.v1 as vf

__all__ = ["DigitsEnv", "DigitsTaskset"]


class DigitsConfig(vf.TasksetConfig):
    kind: Literal["single", "turns", "tools"] = "single"
    digits: int = 2


class DigitsData(vf.TaskData):
    kind: str
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """Share of right digits in the model's answers, in order."""
        said, answer = "".join(each.content or "" for each in trace.assistant_messages), self.data.answer
        return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))


class SumTask(DigitsTask):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """Does the last answer have the sum of the digits?"""
        return float(str(sum(map(int, self.data.answer))) in trace.last_reply)


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> list[DigitsTask]:
        kind, digits = self.config.kind, self.config.digits
        made = SumTask if kind == "tools" else DigitsTask
        numbers = [f"{number:0{digits}}" for number in range(10**digits)]
        return [made(DigitsData(prompt=each, answer=each, kind=kind), self.config.task) for each in numbers]


class DigitsEnv(vf.SingleAgentEnv):
    async def run(self, task: Any, agents: vf.Agents) -> None:
        if task.data.kind != "turns":
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            for digit in task.data.answer[1:]:
                await interaction.turn(digit)


if __name__ == "__main__":
    Adder.run()
