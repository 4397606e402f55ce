"""Throughput and staleness of the loop with a bound, without a simulation. docs/simulation.md has the derivation.

In a steady state, per batch of S samples with answers of L tokens on average:

    decode step     d(n) = base + per_sequence · n + per_token · n · (P + E[L²] / 2 E[L])   n sequences; P: prompt
    rollout         R = A · n / (L · d(n) + n · prefill · P) samples per second, for A actors of n slots
    training        S / T, with T = base + S · (per_sample + per_token · L)
    async           X = min(R, S / T), if the bound admits enough: (η + 1) · k · S samples may be under way, with
                    weights every k train steps
    sync            X = S / (T + G), with G = max(S / R, d(n) · E[longest of S]) and the update

The staleness of async is at most η. Where rollout is the bottleneck, Little's law says it: A · n samples are in
flight, X / S batches per second are trained, a version comes every k of them, so a sample's age at its push is
A · n / (k · S) versions, and it then waits on average half a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_like.sampling import stream_key

from .costs import Costs

DRAWS = 4096


@dataclass(frozen=True)
class Prediction:
    """Samples per second of rollout alone and of training alone, of the loop, and its mean staleness in versions;
    `longest`: seconds of the longest answer of a batch."""

    rollout: float
    training: float
    throughput: float
    staleness: float
    longest: float


def predict(
    costs: Costs, actors: int, samples: int, bound: float, *, sync: bool, prompt: float, most: int, interval: int = 1
) -> Prediction:
    """`samples` per batch; `prompt`: tokens; `most`: the longest answer; `interval`: train steps between weights."""
    made = costs.answers.lengths
    lengths = np.array([min(made.of(number // 8, stream_key(0, number)), most) for number in range(DRAWS)], np.float64)
    mean, size_biased = float(lengths.mean()), float((lengths**2).mean() / (2 * lengths.mean()))
    engine, learner = costs.engine, costs.learner
    under_way = samples if sync else (bound + 1) * interval * samples
    n = max(1.0, min(engine.slots, under_way / actors))
    if engine.kv_tokens is not None:
        n = max(1.0, min(n, engine.kv_tokens / (prompt + size_biased)))
    step = engine.base + engine.per_sequence * n + engine.per_token * n * (prompt + size_biased)
    training_seconds = learner.base + samples * (learner.per_sample + learner.per_token * mean)
    pauses = engine.apply + costs.weights.encode + costs.weights.fetch
    rollout = actors * n / (mean * step + n * engine.cost.join(prompt))
    training = samples / max(1e-9, training_seconds + learner.publish)
    longest = float(np.quantile(lengths, 1.0 - 1.0 / (samples + 1)))
    if not sync and bound > 0:
        throughput = min(rollout, training)
        # an update stops decoding once per version
        throughput = min(training, rollout * max(0.0, 1.0 - engine.apply * throughput / (interval * samples)))
        age = (actors * n / samples + 0.5) / interval if rollout < training else bound
        return Prediction(rollout, training, throughput, float(min(bound, age)), longest * step)
    alone = engine.base + engine.per_sequence + engine.per_token * (prompt + longest)
    round_seconds = max(samples / rollout, longest * (alone + (step - alone) * min(1.0, mean / longest)))
    throughput = samples / (samples / training + round_seconds + pauses)
    return Prediction(rollout, training, throughput, 0.0, longest * step)
