"""A merged delta has the effect of its parts, bit for bit, and is no longer than they are."""

import pytest

from areal_like.weights.delta import read
from areal_like.weights.layout import Layout
from areal_like.weights.merge import merge
from areal_like.weights.planes import DeltaError
from tests.areal_like.weights.states import DTYPES, applied, changed, message, random_state, specs_of
from tests.seeds import seeded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "densities", [(0.01, 0.01, 0.01), (0.06, 0.06), (0.001, 0.5, 0.01, 0.2), (0.2, 0.2, 0.2), (0, 0)]
)
def test_a_merged_chain_leads_to_the_same_bits(dtype: str, densities: tuple[float, ...]) -> None:
    rng = seeded(len(densities))
    states = [random_state(specs_of(dtype), rng)]
    layout = Layout(states[0].specs, 16384)
    messages = []
    for version, density in enumerate(densities, 1):
        states.append(changed(states[-1], density, rng))
        messages.append(message(*states[-2:], layout, base=version - 1, version=version))
    whole = merge(messages, layout)
    state, digest = applied(whole, states[0], layout)
    assert state.buffer.tobytes() == states[-1].buffer.tobytes() and digest == states[-1].digest()
    assert len(whole) <= sum(map(len, messages))


def test_what_goes_there_and_back_is_no_change() -> None:
    rng = seeded(0)
    before = random_state(specs_of("bfloat16"), rng)
    after, layout = changed(before, 0.02, rng), Layout(before.specs, 16384)
    there, back = message(before, after, layout), message(after, before, layout, base=1, version=2)
    assert sum(block.changes.sum() for block in read(merge([there, back], layout), layout).blocks) == 0


def test_steps_that_do_not_follow_are_refused() -> None:
    rng = seeded(0)
    before = random_state(specs_of("bfloat16"), rng)
    layout = Layout(before.specs, 16384)
    one = message(before, changed(before, 0.1, rng), layout)
    with pytest.raises(ValueError, match="does not follow"):
        merge([one, one], layout)


def test_other_weights_are_refused() -> None:
    rng = seeded(0)
    before = random_state(specs_of("bfloat16"), rng)
    layout = Layout(before.specs, 16384)
    data = message(before, changed(before, 0.1, rng), layout)
    for other in (Layout(before.specs, 32768), Layout(before.specs[:-2], 16384)):
        with pytest.raises(DeltaError, match="other tensors"):
            read(data, other)
