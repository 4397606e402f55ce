"""Rewards for `test_eval_and_chat`. They stand alone: the processes that verify would import torch with the tests."""


def broken(answer: str, text: str) -> float:
    raise RuntimeError("no idea")


def short(answer: str, response: str) -> float:
    return float(len(response) % 2)
