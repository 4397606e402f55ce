"""Samples kept for people stay within their byte limit, through a resume and through faults of the disk."""

from pathlib import Path

import numpy as np
import pytest

from areal_like.run.samples import TRAINED, Kept, SampleLog, kept, read
from areal_like.types import Sample


def sample(tokens: int = 3) -> Sample:
    mask = np.ones(tokens, bool)
    mask[-1] = False
    logprobs = np.linspace(-1, -0.5, tokens).astype(np.float32)
    return Sample(np.arange(tokens + 2, dtype=np.int32), 2, logprobs, mask, [(3, tokens)], 0.5, "stop", [(0, 0.25)])


def record(step: int, tokens: int = 3) -> Kept:
    some, none = np.full(tokens, np.nan), np.full(tokens, np.nan)
    some[0] = 0.123456
    numbers = {"advantage": some, "proximal": none}
    return kept(TRAINED, step, 4, (7, 1), sample(tokens), actor="actor-0", numbers=numbers)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=10, most=None)
    assert log.write(record(1))
    (found,) = read(tmp_path)
    assert found == record(1).__class__(**{name: getattr(found, name) for name in found.__struct_fields__})
    assert (found.fate, found.step, found.group, found.index, found.actor) == ("trained", 1, 7, 1, "actor-0")
    assert found.response == [2, 3, 4] and found.staleness == 1 and found.masked == [2]
    assert found.turn_rewards == [(0, 0.25)] and found.runs == [(3, 3)]
    assert found.numbers["advantage"] == [0.1235, None, None] and "proximal" not in found.numbers
    assert found.numbers["logprob"] == [-1.0, -0.75, -0.5]


def test_bytes_are_spread_over_the_steps_of_a_run(tmp_path: Path) -> None:
    log, most, steps = SampleLog(tmp_path, TRAINED, steps=20, most=20_000), 20_000, 20
    for step in range(1, steps):
        while log.write(record(step)):
            pass
        assert log.path.stat().st_size <= most * (step + 1) / steps
    found = [each.step for each in read(tmp_path)]
    assert set(found) == set(range(1, steps)), "each step has its part"
    assert log.path.stat().st_size > 0.9 * most


def test_what_is_too_long_is_kept_without_its_numbers_or_not_at_all(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=1, most=12_000)
    assert log.write(record(1, tokens=1000)) and not log.write(record(1, tokens=4000))
    (found,) = read(tmp_path)
    assert not found.numbers and len(found.response) == 1000


def test_a_resume_removes_what_will_be_made_again_and_reads_past_damage(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=10, most=None)
    for step in (1, 2, 3):
        log.write(record(step))
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"fate":"trained","st')
    assert [each.step for each in read(tmp_path)] == [1, 2, 3]
    again = SampleLog(tmp_path, TRAINED, steps=10, most=None, done=2)
    again.write(record(3))
    assert [each.step for each in read(tmp_path)] == [1, 2, 3]


def test_a_disk_that_fails_ends_the_writing_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=10, most=None)
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    assert not log.write(record(1)) and not log.write(record(2)) and log.room(9) == 0
    assert [each.message for each in caplog.records if "no more samples are kept" in each.message] != []
    (tmp_path / "file").write_text("")
    assert not SampleLog(tmp_path / "file", TRAINED, steps=1, most=None).write(record(1))


@pytest.mark.parametrize(
    ("masked", "turns"),
    [([], [(0, 6)]), ([0], [(1, 6)]), ([5], [(0, 5)]), ([2, 3], [(0, 2), (4, 6)]), (list(range(6)), [])],
)
def test_turns_are_what_the_model_said(masked: list[int], turns: list[tuple[int, int]]) -> None:
    assert Kept("trained", 1, 1, 0, 0, list(range(8)), 2, [(1, 6)], 0.0, "stop", masked=masked).turns == turns
