"""The learner's half of the probe of what engines serve."""

from functools import partial

import numpy as np
import pytest
import torch

from areal_like.models.causal_lm import publishable
from areal_like.wire.messages import Manifest, Probe
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.probe import Reference
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded

SEQUENCES = [[1, 2], [3, 1, 4, 1, 5, 9], [2, 7, 1]]


def learner_of(**knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), decoupled_ppo, partial(group), 0.7, lr=1e-2, **knobs)


@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_tokens": 4}, {"lora": {"rank": 2}}], ids=["whole", "in parts", "adapters"]
)
def test_logprobs_are_those_of_the_model_at_temperature_1(knobs):
    learner = learner_of(**knobs)
    found, dtype = learner.logprobs_of(SEQUENCES)
    assert dtype == ("bfloat16" if "lora" in knobs else "float32")
    model = tiny_model()
    if "lora" not in knobs:
        model.load_state_dict(learner.model.state_dict())
    else:
        publishable(model)
    for tokens, row in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            every = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = every[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_probe_changes_no_bit_of_training():
    probed, plain = learner_of(), learner_of()
    for index in range(2):
        probed.logprobs_of(SEQUENCES)
        for learner in (probed, plain):
            learner.train(make_batch(seeded(index), index=index))
    for ours, theirs in zip(probed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_some_versions_come_with_a_probe_and_none_with_numbers_that_are_none():
    said = iter([[[-1.0]], [[float("nan")]]])
    reference = Reference([[1, 2]], 2, lambda sequences: (next(said), "float32"))
    manifests = []
    for version in (0, 1, 2):
        reference.take(version)
        manifests.append(reference.added_to(Manifest(version, "")))
    assert manifests[0].probe == Probe([[1, 2]], [[-1.0]], "float32")
    assert not any(manifest.probe for manifest in manifests[1:])
