"""The weights that a replica holds, keeps and discards, and the changes that an engine writes after an update."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from areal_like.models.causal_lm import write_state
from areal_like.models.flat_parameters import FlatParameters
from areal_like.weights import device
from areal_like.weights.device import DeviceReplica
from areal_like.weights.layout import Layout
from areal_like.weights.replica import NOTHING, Desync, Replica, Route
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import changed, compile_from, message, random_state, specs_of
from tests.seeds import seeded

SPECS = specs_of("bfloat16")
BLOCK = 8192


def holding(parts: int = 1) -> tuple[Replica, State]:
    """A replica at version 3, and a copy of its bits."""
    before = random_state(SPECS, seeded(0))
    replica = Replica(State(SPECS, before.buffer.copy()))
    replica.shape(SPECS, BLOCK, parts)
    assert replica.same_bits(3, before.digest())
    return replica, before


def test_initial_bits_are_of_the_version_with_their_digest_and_of_no_other() -> None:
    replica = Replica()
    assert (replica.version, replica.digest, replica.state.nbytes) == (NOTHING, "", 0)
    assert not replica.same_bits(0, "") and replica.changes() is None
    before = random_state(SPECS, seeded(0))
    replica = Replica(before)
    replica.shape(SPECS, BLOCK)
    assert replica.state is before and replica.version == NOTHING and replica.held(0) == (NOTHING, "")
    assert not replica.same_bits(3, "0" * 32) and replica.version == NOTHING
    assert replica.same_bits(3, before.digest()) and replica.held(0) == (3, before.digest())
    others = State([TensorSpec("w", "bfloat16", (2, 3))])
    replica = Replica(others)
    replica.shape(SPECS, BLOCK)
    assert replica.state is not others and replica.state.specs == SPECS


def test_the_same_shape_keeps_what_is_held() -> None:
    replica, before = holding(parts=2)
    layouts, state = replica.layouts, replica.state
    replica.shape(specs_of("bfloat16"), BLOCK, 2)
    assert replica.layouts is layouts and replica.version == 3 and replica.digest == before.digest()
    for specs, block, parts in ((SPECS, BLOCK, 3), (SPECS, 2 * BLOCK, 3)):
        replica.shape(specs, block, parts)
        assert replica.version == NOTHING and len(replica.layouts) == parts
        assert replica.state is state, "the same tensors: their memory and bits are used again"
        assert replica.same_bits(4, before.digest()) and replica.version == 4
    replica.shape(SPECS[1:], BLOCK)
    assert replica.state.specs == SPECS[1:] and not replica.state.buffer.any()


def test_a_part_is_forgotten_alone() -> None:
    replica, before = holding(parts=2)
    held = replica.held(1)
    replica.forget(0)
    assert replica.held(0) == (NOTHING, "") and replica.held(1) == held and held[0] == 3
    assert replica.version == NOTHING and replica.digest == "" and replica.changes() is None
    assert not replica.same_bits(3, before.digest())


@pytest.mark.parametrize(
    ("base", "shift", "cut", "version", "digest", "reason"),
    [
        (2, 0, None, 4, "", "wrong base"),
        (3, 1, None, 4, "", "wrong base"),
        (3, 0, 10, 5, "", "broken delta"),
        (3, 0, None, 5, "", "wrong digest"),
        (3, 0, None, 4, "0" * 32, "wrong digest"),
    ],
    ids=["another version", "other bits", "a broken second delta", "another version at the end", "another digest"],
)
def test_a_delta_that_does_not_fit_is_a_desync(base, shift, cut, version, digest, reason) -> None:
    replica, before = holding()
    start = State(SPECS, before.buffer ^ np.uint8(shift))
    after = changed(start, 0.01, seeded(1))
    delta = message(start, after, Layout(SPECS, BLOCK), base, 4)
    with pytest.raises(Desync) as caught:
        replica.take([Route(None, [delta, delta[:cut]] if cut else [delta])], version, digest or after.digest())
    assert caught.value.reason == reason and replica.version == NOTHING and replica.digest == ""
    if reason != "wrong digest":
        assert replica.state.buffer.tobytes() == before.buffer.tobytes()


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """As an engine has them: vectors in float32."""
    kinds = {1: torch.float32, 2: getattr(torch, state.specs[0].dtype)}
    tensors = {spec.name: torch.zeros(spec.shape, dtype=kinds[len(spec.shape)]) for spec in state.specs}
    write_state(state, tensors)
    return tensors


def bits_of(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values() if tensor.numel()]


@pytest.mark.parametrize(
    ("dtype", "compiled_from", "make"),
    [(dtype, least, Replica) for dtype in ("bfloat16", "float32", "float8_e4m3fn") for least in (0, 1 << 60)]
    + [(dtype, 0, partial(DeviceReplica, torch.device("cpu"))) for dtype in ("bfloat16", "float32")],
)
def test_a_chain_of_deltas_is_written_as_a_full_load_would_and_little_else(
    dtype, compiled_from, make, monkeypatch
) -> None:
    compile_from(monkeypatch, compiled_from)
    rng, layout = seeded(0), Layout(specs_of(dtype), BLOCK)
    before = random_state(layout.specs, rng)
    replica, version = make(State(before.specs, before.buffer.copy())), 0
    replica.shape(layout.specs, BLOCK)
    assert replica.same_bits(0, before.digest())
    monkeypatch.setattr(device, "FEW", 4096)
    tensors = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors_of(before).items()}
    groups = [[tensors[name] for name in names] for names in (("norm", "bias"), ("odd", "none"), ("large",), ("tiny",))]
    flat = FlatParameters([(group, group[0].dtype) for group in groups], torch.device("cpu"))
    for densities in ([0.001], [0.01, 0.01], [0.0], [0.2], [0.9, 0.001], [0.003] * 3):
        messages, start = [], before
        for density in densities:
            after = changed(before, density, rng)
            messages.append(message(before, after, layout, version, version + 1))
            before, version = after, version + 1
        replica.take([Route(None, messages)], version, before.digest())
        changes = replica.changes()
        assert changes is not None and changes.since == start.digest()
        flat.write(replica.state, tensors, changes)
        assert bits_of(tensors) == bits_of(tensors_of(before))
        named = sum(
            where.stop - where.start if isinstance(where, slice) else len(where)
            for found in changes.tensors.values()
            for where in found
        ) + sum(len(places) for _, places in changes.places)
        if max(densities) <= 0.003:
            plain = sum(spec.count for spec in layout.specs if spec.count < 4096)
            assert named <= 3 * plain + 4 * sum(densities) * layout.nbytes


def test_whole_weights_leave_nothing_to_go_by() -> None:
    replica, before = holding()
    replica.forget()
    replica.take([Route(5, [])], 5, before.digest())
    assert replica.changes() is None
    after = changed(before, 0.01, seeded(0))
    replica.take([Route(None, [message(before, after, Layout(SPECS, BLOCK), 5, 6)])], 6, after.digest())
    changes = replica.changes()
    assert changes is not None and changes.since == before.digest() and changes.tensors
