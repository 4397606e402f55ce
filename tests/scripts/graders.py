"""Rewards of tests. They stand alone: the processes that verify would import torch with the tests."""

import time


def broken(answer: str, text: str) -> float:
    raise RuntimeError("no idea")


def short(answer: str, response: str) -> float:
    return float(len(response) % 2)


def in_parts(answer: str, response: str) -> dict[str, float]:
    return {"short": short(answer, response)}


def of_some(answer: str, response: str) -> float | None:
    return None if len(response) % 3 == 0 or answer == "none" else short(answer, response)


def raises(answer: str, response: str) -> float:
    return len(response) / (len(answer) - len(answer))


def of_trl(completions: list[str], **columns: object) -> list[float]:
    return [1.0 for _ in completions]


def returns_none(answer: str, response: str) -> None:
    return None


def near(answer: str, response: str, *, within: float = 0.0) -> float:
    return float(abs(float(answer) - float(response)) <= within)


def total_minus(prompt: object, answers: list[dict], *, by: float = 0.0) -> list[float]:
    """Of a whole group: the sum of all rewards, minus `by`."""
    return [sum(answer["reward"] for answer in answers) - by] * len(answers)


def hangs(answer: str, response: str) -> float:
    time.sleep(3600)
    return 1.0
