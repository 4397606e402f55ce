"""What an engine writes after deltas: enough for the bits of a full load, and nothing that is unchanged."""

import numpy as np
import pytest
import torch

from areal_like.models import causal_lm as models
from areal_like.models.causal_lm import write_state
from areal_like.weights.delta import read
from areal_like.weights.layout import Layout
from areal_like.weights.replica import Replica, Route
from areal_like.weights.state import State, TensorSpec
from areal_like.weights.transfer import Inbound
from areal_like.weights.update import Changes
from tests.areal_like.weights.states import changed, compile_from, message, random_state, specs_of
from tests.seeds import seeded

BLOCK = 8192


def bits_of(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values() if tensor.numel()]


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in state.specs}
    tensors = {spec.name: torch.zeros(spec.shape, dtype=dtypes[spec.name]) for spec in state.specs}
    write_state(state, tensors)
    return tensors


@pytest.mark.parametrize("in_batches", [False, True], ids=["one by one", "in batches"])
@pytest.mark.parametrize("compiled_from", [0, 1 << 60])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_a_chain_of_deltas_is_written_as_a_full_load_would(dtype, compiled_from, in_batches, monkeypatch) -> None:
    """On a device in batches: one copy per update here, of places and values of all tensors."""
    copies = []
    send = Inbound._send
    monkeypatch.setattr(Inbound, "_send", lambda self, pinned: (copies.append(1), send(self, pinned)))
    monkeypatch.setattr(models, "in_batches", lambda _: in_batches)
    compile_from(monkeypatch, compiled_from)
    rng, layout = seeded(0), Layout(specs_of(dtype), BLOCK)
    before = random_state(layout.specs, rng)
    replica = Replica(State(before.specs, before.buffer.copy()))
    replica.shape(layout.specs, BLOCK)
    assert replica.same_bits(0, before.digest())
    tensors, version = tensors_of(before), 0
    for densities in ([0.001], [0.01, 0.01], [0.0], [0.2], [0.9, 0.001], [0.003] * 3):
        messages, start = [], before
        for density in densities:
            after = changed(before, density, rng)
            messages.append(message(before, after, layout, version, version + 1))
            before, version = after, version + 1
        replica.take([Route(None, messages)], version, before.digest())
        changes = replica.changes()
        assert changes is not None and changes.since == start.digest()
        copies.clear()
        write_state(replica.state, tensors, changes)
        assert len(copies) == (in_batches and bool(changes.tensors))
        assert bits_of(tensors) == bits_of(tensors_of(before))
        named = sum(
            where.stop - where.start if isinstance(where, slice) else where.size
            for found in changes.tensors.values()
            for where in found
        )
        if max(densities) <= 0.003:
            plain = sum(spec.count for spec in layout.specs if spec.count < 4096)
            assert named <= 3 * plain + 4 * sum(densities) * layout.nbytes


def test_whole_weights_leave_nothing_to_go_by() -> None:
    rng, layout = seeded(0), Layout(specs_of("bfloat16"), BLOCK)
    state, replica = random_state(layout.specs, rng), Replica()
    replica.shape(layout.specs, BLOCK)
    replica.forget()
    replica.state.buffer[:] = state.buffer
    replica.take([Route(5, [])], 5, state.digest())
    assert replica.changes() is None
    after = changed(state, 0.01, rng)
    replica.take([Route(None, [message(state, after, layout, base=5, version=6)])], 6, after.digest())
    changes = replica.changes()
    assert changes is not None and changes.since == state.digest() and changes.tensors


@pytest.mark.parametrize("block", [1 << 12, 1 << 16])
@pytest.mark.parametrize(("share", "singly"), [(1 / 64, True), (1 / 32, True), (1 / 16, False), (1 / 8, False)])
def test_few_changes_are_named_one_by_one_and_many_by_their_stretch(share: float, singly: bool, block: int) -> None:
    """Gaps up to a twelfth, a mask beyond it; up to a thirty-second, only what has changed is written."""
    before = State([TensorSpec("first", "bfloat16", (64, 64)), TensorSpec("w", "bfloat16", (64, 128))])
    after, layout = State(before.specs, before.buffer.copy()), Layout(before.specs, block)
    places = np.arange(0, 64 * 128, round(1 / share))
    list(after.tensors())[1][1][places] += 1
    changes = Changes(before.digest())
    changes.add(read(message(before, after, layout), layout), layout)
    assert list(changes.tensors) == [1]
    assert all(isinstance(each, np.ndarray) == singly for each in changes.tensors[1])
    named = [np.arange(64 * 128)[each] for each in changes.tensors[1]]
    assert np.concatenate(named).tolist() == (places.tolist() if singly else list(range(64 * 128)))
