"""Lengths from the trace follow its distribution."""

import numpy as np
import pytest

from areal_like.tasks.copying import Copy
from areal_like.tasks.length_trace import SAMPLES, LengthTrace

WIDE = 10**9


def test_lengths_are_log_normal_in_the_prompt_times_noise_within_it():
    sigma, noise, prompts = 1.0, 0.3, 4000
    trace = LengthTrace(median=100_000, sigma=sigma, noise=noise, max=WIDE)
    logs = np.log([trace.lengths(key) for key in range(prompts)])
    between, within = logs.mean(axis=1), logs.std(axis=1, ddof=1)
    # Of normal numbers the mean's standard error is s/√n, the standard deviation's s/√(2n): allow 5 of each.
    spread = np.sqrt(sigma**2 + noise**2 / SAMPLES)
    assert np.median(between) == pytest.approx(np.log(100_000), abs=5 * 1.2533 * spread / np.sqrt(prompts))
    assert between.std(ddof=1) == pytest.approx(spread, abs=5 * spread / np.sqrt(2 * prompts))
    pooled = np.sqrt(np.mean(within**2))
    assert pooled == pytest.approx(noise, abs=5 * noise / np.sqrt(2 * prompts * (SAMPLES - 1)))
    standard = (between - between.mean()) / between.std()
    assert abs(np.mean(standard**3)) < 5 * np.sqrt(6 / prompts)  # no skew: normal in the logarithm


def test_a_task_draws_the_length_from_the_prompt():
    task = Copy(0, digits=2, length_trace={"median": 60, "max": 1000})
    lengths: dict[bytes, tuple[int, ...]] = {}
    for row in range(400):
        prompt = task.prompt("train", row)
        assert lengths.setdefault(prompt.tokens.tobytes(), prompt.filler) == prompt.filler
    assert len(set(lengths.values())) > 80  # a hundred prompts at most, each with its own
    assert Copy(0).prompt("train", 0).filler == ()
