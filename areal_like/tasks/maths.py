"""Verifiers of text answers: plain functions `(answer: str, response: str) -> float`, so that they can run in another
process under a time limit: sympy may never finish on an answer that looks harmless. Thoughts are no answer."""

import logging
import re
from decimal import Decimal

_POWER = r"(?:[eE][+-]?\d{1,3}(?!\d))"
_NUMBER = re.compile(rf"-?\d+(?:,\d{{3}})*(?:\.\d+)?{_POWER}?")
_WRAPPERS = re.compile(r"\\(?:boxed|fbox|text\w*|math\w+|left|right)(?![a-zA-Z])")
_WITH_POWER = re.compile(rf"(?<![\w.])\d+(?:\.\d+)?{_POWER}(?!\w)")


def math_verify(answer: str, response: str) -> float:
    """1.0 where the last (or boxed) expression of `response` equals the answer mathematically, else 0.0.

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, or text that ends with `#### 42` as in
    GSM8K. Raises ValueError where it cannot be parsed: such a row could never be rewarded.
    """
    from math_verify import parse, verify

    # It warns that its own time limits are off: the caller has one, and theirs need signals, which work in a main
    # thread only.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = parse(expression(answer), parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no expression in {answer!r}")
    said = parse(written_out(behind_thoughts(response)), parsing_timeout=None)
    return float(verify(expected, said, timeout_seconds=None))


def exact(answer: str, response: str) -> float:
    """1.0 where the response is the answer, surrounding white space aside, else 0.0."""
    return float(behind_thoughts(response).strip() == answer.strip())


def last_number(answer: str, response: str) -> float:
    """1.0 where the last number of `response`, in digits, equals the answer, else 0.0; "9-3" ends with 3. Raises
    ValueError where the answer has no number."""
    return float(_last(behind_thoughts(response)) == number(answer))


def expression(answer: str) -> str:
    """The LaTeX of an answer. Raises ValueError where nothing in it could be one, a brace stays open, or a digit is no
    ASCII one: no response would match."""
    gold = written_out(answer.rpartition("####")[2].strip())
    bare = _WRAPPERS.sub("", gold.replace("\\{", "").replace("\\}", ""))
    foreign = any(each.isdecimal() and not each.isascii() for each in gold)
    if not any(map(str.isalnum, bare)) or bare.count("{") != bare.count("}") or foreign:
        raise ValueError(f"there is no expression in {answer!r}")
    return gold if "$" in gold or "\\boxed" in gold else f"${gold}$"


def number(answer: str) -> Decimal:
    """Raises ValueError where there is none."""
    if (found := _last(answer)) is None:
        raise ValueError(f"there is no number in {answer!r}")
    return found


def behind_thoughts(response: str) -> str:
    """The text behind the last `</think>`; none while the model still thinks."""
    said = response.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def written_out(text: str) -> str:
    """With the digits of each number that has an exponent, such as 1e-05, for readers that know none."""
    return _WITH_POWER.sub(lambda found: f"{Decimal(found[0]):f}", text)


def _last(text: str) -> Decimal | None:
    found = [*_NUMBER.finditer(text)]
    if not found:
        return None
    number, before = found[-1][0].replace(",", ""), text[: found[-1].start()].rstrip()
    return Decimal(number.removeprefix("-") if before[-1:].isdigit() else number)
