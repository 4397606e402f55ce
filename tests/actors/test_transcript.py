"""Transcript: the experts and the room of contexts; tests of multi_turn, agents and forks have the rest."""

from dataclasses import replace

import numpy as np

from actors.transcript import Transcript
from areal_like.types import Completion, Limits

PROMPT = np.array([7, 8], np.int32)
LIMITS = Limits(max_tokens=10, temperature=0.5, stop=(2,), key=99, offset=3)


def said(runs: list[tuple[int, int]], first: int = 100) -> Completion:
    tokens = np.arange(first, first + sum(n for _, n in runs), dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), runs, "stop")


def test_the_experts_of_contexts_stand_at_their_tokens():
    def chosen(count: int, first: int) -> np.ndarray:
        return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)

    transcript = Transcript(PROMPT, LIMITS)
    transcript.said(replace(said([(0, 2)]), experts=chosen(3, 1)))
    transcript.forked(np.array([7, 8, 9], np.int32), LIMITS)
    assert transcript.limits().experts_from == 0 and transcript.room == 9
    assert transcript.fits(np.zeros(11, np.int32)) and not transcript.fits(np.zeros(12, np.int32))
    transcript.said(replace(said([(0, 2)]), experts=chosen(4, 11)))
    assert transcript.limits().experts_from == 4
    sample = transcript.sample(1.0, "stop")
    assert sample.experts is not None and len(sample.experts) == len(sample.tokens) - 1
    assert sample.experts[:, 0, 0].tolist() == [1, 2, 3, 0, 11, 12, 13, 14]
