"""Transcript: sampled tokens stay as they were; shown tokens are masked and have no age."""

from dataclasses import replace

import numpy as np

from actors.transcript import Transcript
from areal_like.types import Completion, Limits

PROMPT = np.array([7, 8], np.int32)
LIMITS = Limits(max_tokens=10, temperature=0.5, stop=(2,), key=99, offset=3)


def said(runs: list[tuple[int, int]], first: int = 100) -> Completion:
    tokens = np.arange(first, first + sum(n for _, n in runs), dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), runs, "stop")


def test_a_conversation_becomes_one_sample():
    transcript = Transcript(PROMPT, LIMITS)
    transcript.said(said([(1, 2), (2, 1)]))
    transcript.earned(0.25)
    transcript.shown(np.array([50, 51], np.int32))
    assert transcript.tokens.tolist() == [7, 8, 100, 101, 102, 50, 51]
    assert (
        transcript.limits() == transcript.limits(9) == Limits(5, 0.5, (2,), 99, 8)
        and transcript.limits(2).max_tokens == 2
    )
    transcript.said(said([(2, 1), (5, 2)], first=200))
    transcript.earned(0.5)
    sample = transcript.sample(None, "stop")
    assert sample.tokens.tolist() == [7, 8, 100, 101, 102, 50, 51, 200, 201, 202] and sample.tokens.dtype == np.int32
    assert sample.logprobs.tolist() == [-100, -101, -102, 0, 0, -200, -201, -202]
    assert sample.loss_mask.tolist() == [True, True, True, False, False, True, True, True]
    assert sample.runs == [(1, 2), (2, 4), (5, 2)]  # shown tokens have the version of the model's turn before them
    assert (sample.prompt_length, sample.reward, sample.turn_rewards) == (2, 0.75, [(2, 0.25), (7, 0.5)])


def test_a_fork_begins_a_context_of_its_own_in_the_same_sample():
    transcript = Transcript(PROMPT, LIMITS)
    transcript.said(said([(1, 3)]))
    transcript.earned(0.25)
    again, stretch = np.array([7, 8, 60, 61], np.int32), replace(LIMITS, offset=13)
    assert transcript.fits(again) and not transcript.fits(np.arange(12, dtype=np.int32))
    transcript.forked(again, stretch)
    assert transcript.tokens.tolist() == [7, 8, 60, 61] and transcript.room == 8
    assert transcript.limits() == replace(stretch, max_tokens=8, offset=15)
    transcript.said(said([(2, 2)], first=200))
    transcript.earned(0.5)
    transcript.shown(np.array([50], np.int32))
    assert transcript.tokens.tolist() == [7, 8, 60, 61, 200, 201, 50]
    branch = transcript.branch(stretch)
    assert branch.limits() == transcript.limits() == replace(stretch, max_tokens=5, offset=18)
    sample = branch.sample(None, "stop")
    assert sample.tokens.tolist() == [7, 8, 100, 101, 102, 7, 8, 60, 61, 200, 201, 50] and sample.forks == [3]
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 4 + [True] * 2 + [False]
    assert sample.runs == [(1, 7), (2, 3)] and sample.turn_rewards == [(2, 0.25), (8, 0.5)]
    assert sample.contexts == [(0, 5), (5, 12)]


def test_the_experts_of_contexts_stand_at_their_tokens():
    def chosen(count: int, first: int) -> np.ndarray:
        return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)

    transcript = Transcript(PROMPT, LIMITS)
    transcript.said(replace(said([(0, 2)]), experts=chosen(3, 1)))
    transcript.forked(np.array([7, 8, 9], np.int32), LIMITS)
    assert transcript.limits().experts_from == 0
    transcript.said(replace(said([(0, 2)]), experts=chosen(4, 11)))
    assert transcript.limits().experts_from == 4
    sample = transcript.sample(1.0, "stop")
    assert sample.experts is not None and len(sample.experts) == len(sample.tokens) - 1
    assert sample.experts[:, 0, 0].tolist() == [1, 2, 3, 0, 11, 12, 13, 14]
