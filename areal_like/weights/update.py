"""The argument of an engine's `load`: the verified weights of one version, and their changes."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.weights.changes import Changes
from areal_like.weights.state import State


@dataclass(frozen=True, slots=True)
class Update:
    """An engine that holds the weights with the digest `changes.since` may write only what `changes` names.
    Without `changes`, or with other weights, it writes all."""

    version: int
    digest: str
    state: State
    changes: Changes | None = None
