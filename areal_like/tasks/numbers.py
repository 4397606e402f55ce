"""A verifier of answers that are one number, without math-verify's parsing: a plain function, as in `maths`."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(answer: str, response: str) -> float:
    """1.0 where the last number of `response` equals the answer, else 0.0. Digits only: "fifteen" is no number.

    A minus sign counts only in front of a number that no other stands before: "9-3" ends with 3. Raises ValueError
    where the answer has no number.
    """
    wanted, found = _last(answer), _last(response)
    if wanted is None:
        raise ValueError(f"there is no number in the answer {answer!r}")
    return float(found == wanted)


def _last(text: str) -> Decimal | None:
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007 - the last one is needed
        pass
    if last is None:
        return None
    found = last[0].replace(",", "")
    before = text[: last.start()].rstrip()
    return Decimal(found.removeprefix("-") if before[-1:].isdigit() else found)
