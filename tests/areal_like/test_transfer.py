"""Copies from and to a device, here a CPU: every piece arrives, in order, and is reported once it has arrived."""

import numpy as np
import torch

from areal_like.weights.transfer import Outbound, to_device


def test_tensors_larger_than_a_piece_arrive_whole_and_in_order():
    rng, told = torch.Generator().manual_seed(0), []
    outbound = Outbound(torch.device("cpu"), piece=64)
    sources = [torch.randn(shape, generator=rng) for shape in ((7, 31), (), (0, 3), (5,), (1, 200))]
    targets = [torch.full((source.numel(),), 9.0, dtype=torch.bfloat16) for source in sources]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = source.reshape(-1).bfloat16()
        outbound.copy(source, target, lambda n=number, t=target, e=expected: told.append((n, torch.equal(t, e))))
    assert len(told) < len(sources), "the last ones are under way"
    outbound.drain()
    assert told == [(number, True) for number in range(len(sources))]


def test_an_array_for_a_cpu_is_not_copied():
    array = np.arange(3)
    to_device(array, torch.device("cpu"))[0] = 5
    assert array[0] == 5
