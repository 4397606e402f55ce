"""Rewards of tests. They stand alone: the processes that verify would import torch with the tests."""

import time


def broken(answer: str, text: str) -> float:
    raise RuntimeError("no idea")


def short(answer: str, response: str) -> float:
    return float(len(response) % 2)


def raises(answer: str, response: str) -> float:
    return len(response) / (len(answer) - len(answer))


def of_trl(completions: list[str], **columns: object) -> list[float]:
    return [1.0 for _ in completions]


def returns_none(answer: str, response: str) -> None:
    return None


def hangs(answer: str, response: str) -> float:
    time.sleep(3600)
    return 1.0
