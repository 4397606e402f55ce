"""The learner's own record of the versions that it has published, and the batches that it refuses because of it."""

from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.run.run_folder import PUBLISHED as FILE
from areal_like.types import Batch, Group
from learners.attestation import Attestation, AttestationError


def batch(*digests: dict[int, str], actor: str = "actor-1") -> Batch:
    return Batch(7, 3, [Group(number, [], made, actor=actor) for number, made in enumerate(digests, 40)])


def test_what_was_published_is_known_after_a_resume(tmp_path: Path) -> None:
    """A crash may tear the last line: no peer had received that version."""
    before = Attestation(tmp_path)
    for version in range(3):
        before.add(version, f"d{version}")
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text()[:-2])
    again = Attestation(tmp_path)
    again.check(batch({0: "d0", 1: "d1"}))
    with pytest.raises(AttestationError, match=r"batch 7, group 41 of actor-1: .* version 0 .* digest d1,"):
        again.check(batch({1: "d1"}, {0: "d1"}))
    for digest in ("d2", "d"):
        with pytest.raises(AttestationError, match=f"version 2 .* digest {digest},"):
            again.check(batch({2: digest}))
    again.add(1, "d1")
    again.add(2, "other")
    assert (tmp_path / FILE).read_text() == "0 d0\n1 d1\n2 other\n"
    Attestation(tmp_path).check(batch({1: "d1", 2: "other"}))
    again.add(1, "after")
    again.check(batch({1: "after or d1"}))
    with pytest.raises(AttestationError, match="digest lie,"):
        again.check(batch({1: "after or lie"}))


def test_other_ranks_know_what_the_first_one_publishes(tmp_path: Path) -> None:
    first, other = Attestation(tmp_path), Attestation(tmp_path, writes=False)
    first.add(0, "d0")
    assert other.fault(batch({0: "d0"})) == ""
    first.add(1, "d1")
    (tmp_path / FILE).write_text("0 d0\n1 d1\n2 d")  # it is about to write "d2"
    assert other.fault(batch({0: "d0", 1: "d1"})) == ""
    assert other.fault(batch({0: "d0"}, {2: "d"})).startswith("group 41 of actor-1: its tokens of version 2 were made")
    (tmp_path / FILE).write_text("0 d0\n1 d1\n2 d2\n")
    assert other.fault(batch({2: "d2"})) == ""


def test_a_replay_asks_the_record_of_the_run_that_is_replayed(tmp_path: Path) -> None:
    recorded, replay = tmp_path / "recorded", tmp_path / "replay"
    for folder in (recorded, replay):
        folder.mkdir()
    Attestation(recorded).add(0, "d0")
    again = Attestation(replay, recorded)
    again.add(0, "another loss")
    again.check(batch({0: "d0"}))
    with pytest.raises(AttestationError):
        again.check(batch({0: "another loss"}))
    assert (recorded / FILE).read_text() == "0 d0\n" and (replay / FILE).read_text() == "0 another loss\n"


def test_a_checkpoint_with_other_weights_than_were_published_ends_the_run(tmp_path: Path) -> None:
    Attestation(tmp_path).add(3, "d3")
    again = Attestation(tmp_path)
    again.resumed = 3
    again.add(3, "d3")
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        again.add(3, "other")
    again.add(4, "d4")
