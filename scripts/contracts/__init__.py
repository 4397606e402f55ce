"""The rules for components of each kind, as checks that users can run (`scripts.check`).

A check is (what is claimed, a function that returns a remark, or raises `Broken` or whatever the component raises). The
checks of a kind are made from its spec; they use the component as the run's processes do, on made-up input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Claim = tuple[str, Callable[[], object]]
"""What is claimed, and its check. Text that the check returns is a remark."""


class Broken(AssertionError):
    """A claim that does not hold: what was found, and what to do."""


class Help(NamedTuple):
    """Input from the user for components that need it: an answer and a response for a reward; the spec of the task
    whose prompts an environment or a workflow gets."""

    answer: str = "42"
    response: str = "The answer is 42"
    task: str = ""


def demand(holds: object, otherwise: str) -> None:
    """Raises Broken."""
    if not holds:
        raise Broken(otherwise)
