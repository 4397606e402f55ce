"""Unfinished samples: an interrupted group goes back to the buffer with them, and a later lease brings them along."""

from dataclasses import dataclass, field

from areal_like.types import Completion


@dataclass(slots=True)
class PartialSample:
    """The record of an interrupted sample, by request: enough for its workflow to continue. `calls` maps (digest of the
    engine's input tokens, `Limits.offset`) to the engine's completion, with finish "abort" if it had not ended.
    `scores` maps the digest of a response to its reward (see `areal_like.wire.groups`), `parts` to that reward's."""

    calls: dict[tuple[int, int], Completion] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    parts: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that were sampled."""
        return sum(len(call.tokens) for call in self.calls.values())


@dataclass(slots=True)
class CarriedSamples:
    """An earlier lease's unfinished group, which a lease carries: samples by index, and digests of versions."""

    samples: dict[int, PartialSample] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
