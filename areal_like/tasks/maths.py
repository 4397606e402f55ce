"""Verifiers of text answers. Imported where an answer is scored, since math-verify brings sympy with it.

A verifier is a plain function `(answer: str, response: str) -> float`, so that it can run in another process under a
time limit: sympy may never finish on an answer that looks harmless.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

# It warns once per process that its own time limits are off. They are off because the caller has one (see above), and
# because theirs need signals, which work in a main thread only.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(answer: str, response: str) -> float:
    """1.0 where the last (or boxed) expression of `response` equals the answer mathematically, else 0.0.

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, or text that ends with `#### 42` as in
    GSM8K. Raises ValueError where it cannot be parsed: such a row could never be rewarded.
    """
    gold = answer.rpartition("####")[2].strip()
    if "$" not in gold and "\\boxed" not in gold:
        gold = f"${gold}$"
    expected = parse(gold, parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))


def exact(answer: str, response: str) -> float:
    """1.0 where the response is the answer, surrounding white space aside, else 0.0."""
    return float(response.strip() == answer.strip())
