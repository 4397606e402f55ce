"""Verifiers of text answers: plain functions `(answer: str, response: str) -> float`, so that they can run in another
process under a time limit: sympy may never finish on an answer that looks harmless."""

import logging
import re
from decimal import Decimal

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def math_verify(answer: str, response: str) -> float:
    """1.0 where the last (or boxed) expression of `response` equals the answer mathematically, else 0.0.

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, or text that ends with `#### 42` as in
    GSM8K. Raises ValueError where it cannot be parsed: such a row could never be rewarded.
    """
    from math_verify import parse, verify

    # It warns that its own time limits are off: the caller has one, and theirs need signals, which work in a main
    # thread only.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
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


def last_number(answer: str, response: str) -> float:
    """1.0 where the last number of `response`, in digits, equals the answer, else 0.0; "9-3" ends with 3. Raises
    ValueError where the answer has no number."""
    wanted = _last(answer)
    if wanted is None:
        raise ValueError(f"there is no number in the answer {answer!r}")
    return float(_last(response) == wanted)


def _last(text: str) -> Decimal | None:
    found = [*_NUMBER.finditer(text)]
    if not found:
        return None
    number, before = found[-1][0].replace(",", ""), text[: found[-1].start()].rstrip()
    return Decimal(number.removeprefix("-") if before[-1:].isdigit() else number)
