"""Published bits on a device, here through torch on the CPU: the same messages, digests and bits as on the host."""

import numpy as np
import pytest
import torch

from areal_like.weights import device
from areal_like.weights.codec import Encoder
from areal_like.weights.delta import DeltaHead, write
from areal_like.weights.device import DeviceReplica, DeviceState
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import CODINGS, pack
from areal_like.weights.replica import Route
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import DTYPES, changed, compile_from, in_parts, message, random_state, specs_of
from tests.seeds import seeded

CPU = torch.device("cpu")
BLOCK = 16384
MIXED = [TensorSpec(f"{dtype} {spec.name}", dtype, spec.shape) for dtype in DTYPES for spec in specs_of(dtype)]


WEIGHTS = [*((dtype, 1) for dtype in DTYPES), ("mixed", 3)]


def weights_of(state: State) -> dict[str, torch.Tensor]:
    """Tensors with a state's bits, of its dtypes."""
    copy = DeviceState(state.specs, state.buffer, device=CPU, part=state.part, parts=state.parts)
    return {spec.name: bits for spec, bits in copy.tensors()}


@pytest.mark.parametrize(("compiled_from", "run_bytes"), [(0, 1), (1 << 60, 1 << 30)], ids=["compiled", "numpy"])
@pytest.mark.parametrize(("dtype", "parts"), [*WEIGHTS[:-1], ("bfloat16", 3)])
def test_a_learners_device_writes_the_same_bytes(dtype, parts, compiled_from, run_bytes, monkeypatch) -> None:
    """Any share of changes, small and large steps, -0, NaN payloads, odd sizes; one block at once or all."""
    compile_from(monkeypatch, compiled_from)
    monkeypatch.setattr(device, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(device, "MANY", 10_000)
    rng, specs = seeded(0), specs_of(dtype)
    whole = random_state(specs, rng)
    before, states, lanes = in_parts(whole, parts, BLOCK), list[DeviceState](), []
    layouts = [Layout(specs, BLOCK, part, parts, apart=True) for part in range(parts)]
    for host, layout in zip(before, layouts, strict=True):
        states.append(DeviceState(specs, device=CPU, part=host.part, parts=parts))
        states[-1].write(weights_of(host))
        lanes.append(states[-1].follow(layout))
        assert states[-1].digest() == host.digest()
    for density, small in [(0, 1), (0.001, 0.9), (0.01, 1), (0.1, 0.9), (0.3, 1), (1, 1), (1, 0)]:
        whole = changed(whole, density, rng, small)
        after = in_parts(whole, parts, BLOCK)
        for part, (state, layout) in enumerate(zip(states, layouts, strict=True)):
            expected, reached = message(before[part], after[part], layout), list[int]()
            base = text_of(lanes[part].total(), layout.nbytes // 8)
            state.write(weights_of(after[part]), reached.append)
            assert reached == sorted(reached) and reached[-1] == state.nbytes
            digest = text_of(lanes[part].total(), layout.nbytes // 8)
            blocks = [pack(state.coded(block)) for block in layout.blocks]
            assert write(DeltaHead(0, 1, base, digest), layout, blocks) == expected
            assert bytes(state.buffer.numpy()) == after[part].buffer.tobytes() and digest == state.digest()
        before = after


@pytest.mark.parametrize(("flip", "coding"), [(1, "mask"), (0x4000, "dense")])
def test_a_device_looks_where_the_compiled_kernels_do(flip: int, coding: str, monkeypatch) -> None:
    """All of the few changes lie in the stretches that kernels sample."""
    compile_from(monkeypatch, 0)
    before = random_state([TensorSpec("w", "bfloat16", (400, 500))], seeded(0))
    after, layout = State(before.specs, before.buffer.copy()), Layout(before.specs, 1 << 20, apart=True)
    for start in range(0, 200_000, 25_000):
        after.buffer.view(np.uint16)[start : start + 1024] ^= np.uint16(flip)
    state = DeviceState(before.specs, before.buffer, device=CPU)
    state.follow(layout)
    state.write(weights_of(after))
    coded = Encoder(layout).encode(layout.blocks[0], before.buffer, after.buffer)
    assert CODINGS[coded.codings[0]] == coding and pack(coded) == pack(state.coded(layout.blocks[0]))


@pytest.mark.parametrize("batch", [1, 5000])
@pytest.mark.parametrize(("dtype", "parts"), WEIGHTS)
def test_an_actors_device_takes_messages_as_the_host_does(dtype, parts, batch, monkeypatch) -> None:
    monkeypatch.setattr(device, "BATCH", batch)
    rng, specs = seeded(1), MIXED if dtype == "mixed" else specs_of(dtype)
    before = random_state(specs, rng)
    replica, version = DeviceReplica(CPU, State(specs, before.buffer.copy())), 0
    replica.shape(specs, BLOCK, parts)
    assert replica.same_bits(0, before.digest())
    layouts = [Layout(specs, BLOCK, part, parts) for part in range(parts)]
    for densities in ([0], [0.001], [0.01, 0.001], [0.1], [0.3, 0.6], [1]):
        messages = [[] for _ in layouts]
        for density in densities:
            after = changed(before, density, rng)
            for layout, found in zip(layouts, messages, strict=True):
                found.append(message(before, after, layout, version, version + 1))
            before, version = after, version + 1
        replica.take([Route(None, found) for found in messages], version, before.digest())
        assert bytes(replica.state.buffer.numpy()) == before.buffer.tobytes() and replica.sweep()
        out = np.empty(layouts[-1].nbytes, np.uint8)
        with monkeypatch.context() as small:
            small.setattr(device, "PIECE", 1000)
            layouts[-1].copy_out(replica.state, out)
        assert out.tobytes() == in_parts(before, parts, BLOCK)[-1].buffer.tobytes()
    replica.state.buffer[9] ^= 1
    assert not replica.sweep() and replica.version == -1
