"""The weights that a replica holds, keeps and discards, by its own report."""

import numpy as np
import pytest

from areal_like.weights.layout import Layout
from areal_like.weights.replica import NOTHING, Desync, Replica, Route
from areal_like.weights.state import State, TensorSpec
from tests.areal_like.weights.states import changed, message, random_state, specs_of
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


def test_a_desync_says_why_and_counts_by_a_word_or_two() -> None:
    assert (str(Desync("wrong base")), str(Desync("wrong base", "here is 3"))) == (
        "wrong base",
        "wrong base: here is 3",
    )
    assert Desync("wrong base", "here is 3").reason == "wrong base"


def test_before_it_has_a_shape_it_holds_nothing() -> None:
    replica = Replica()
    assert (replica.version, replica.digest, replica.state.nbytes) == (NOTHING, "", 0) and NOTHING == -1
    assert not replica.same_bits(0, "") and replica.changes() is None


def test_initial_bits_are_of_the_version_with_their_digest_and_of_no_other() -> None:
    before = random_state(SPECS, seeded(0))
    replica = Replica(before)
    replica.shape(SPECS, BLOCK)
    assert replica.state is before and replica.version == NOTHING and replica.held(0) == (NOTHING, "")
    assert not replica.same_bits(3, "0" * 32) and replica.version == NOTHING
    assert replica.same_bits(3, before.digest()) and replica.held(0) == (3, before.digest())


def test_initial_bits_of_other_tensors_are_not_used() -> None:
    others = State([TensorSpec("w", "bfloat16", (2, 3))])
    replica = Replica(others)
    replica.shape(SPECS, BLOCK)
    assert replica.state is not others and replica.state.specs == SPECS
    replica.shape(others.specs, BLOCK)
    assert replica.state is not others, "only at first"


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


def test_a_delta_leads_from_the_version_and_bits_that_it_names() -> None:
    layout = Layout(SPECS, BLOCK)
    for base, shift, text in ((2, 0, "wrong base: a delta from version 2, and here is 3"), (3, 1, "wrong base")):
        replica, before = holding()
        start = State(SPECS, before.buffer ^ np.uint8(shift))
        after = changed(start, 0.01, seeded(1))
        with pytest.raises(Desync, match=f"^{text}"):
            replica.take([Route(None, [message(start, after, layout, base, 4)])], 4, after.digest())
        assert replica.version == NOTHING and replica.state.buffer.tobytes() == before.buffer.tobytes()


def test_the_version_and_digest_at_the_end_must_be_those_that_were_announced() -> None:
    for version, digest in ((5, None), (4, "0" * 32)):
        replica, before = holding()
        after = changed(before, 0.01, seeded(1))
        delta = message(before, after, Layout(SPECS, BLOCK), 3, 4)
        with pytest.raises(Desync, match=f"^wrong digest: of version {version}: here is 4$"):
            replica.take([Route(None, [delta])], version, digest or after.digest())
        assert replica.version == NOTHING and replica.digest == ""


def test_a_broken_second_delta_leaves_the_bits_as_they_were() -> None:
    replica, before = holding()
    after = changed(before, 0.01, seeded(1))
    delta = message(before, after, Layout(SPECS, BLOCK), 3, 4)
    with pytest.raises(Desync, match=r"^broken delta: a delta that is too short$"):
        replica.take([Route(None, [delta, delta[:10]])], 5, after.digest())
    assert replica.version == NOTHING and replica.state.buffer.tobytes() == before.buffer.tobytes()


def test_a_sweep_forgets_bits_that_have_changed_by_themselves() -> None:
    replica, _ = holding()
    assert replica.sweep() is True and replica.version == 3
    replica.state.buffer[0] ^= 1
    assert replica.sweep() is False and replica.version == NOTHING
