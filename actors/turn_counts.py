"""Turns of this process's samples, which heartbeats carry (`actors.measures`), if there are any.

Of samples that are to be trained and have several turns or could have (`multi_turn`, `agent`), over all since the
start: turns, contexts and tool calls of a sample, tokens of a turn, and the share of calls that failed. A call has
failed if its result begins with "error".
"""

from __future__ import annotations

from collections import Counter

from actors.measures import quotient
from actors.transcript import Transcript
from areal_like.types import Sample

TOTALS: Counter[str] = Counter()
FAILED = "error"


def note(transcript: Transcript, sample: Sample, calls: int, errors: int) -> Sample:
    """Count a sample that is complete; returns it."""
    if transcript.whole.trained:
        tokens = int(sample.loss_mask.sum())
        TOTALS.update(samples=1, turns=transcript.turns, tokens=tokens, contexts=len(sample.contexts))
        TOTALS.update(calls=calls, errors=errors)
    return sample


def stats() -> dict[str, float]:
    """Metrics, as `actors.measures` has them."""
    if not TOTALS:
        return {}
    count = {name: float(total) for name, total in TOTALS.items()}
    found = {
        **quotient("turns/per_sample", count["turns"], count["samples"]),
        **quotient("turns/contexts_per_sample", count["contexts"], count["samples"]),
        **quotient("turns/tokens_per_turn", count["tokens"], count["turns"]),
        **quotient("turns/tool_calls_per_sample", count["calls"], count["samples"]),
    }
    return found | quotient("turns/tool_error_share", count["errors"], count["calls"])
