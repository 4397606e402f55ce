"""The faults that `scripts.verify.mutants` inserts, and its report about tests that notice them or don't."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from areal_like.places import REPOSITORY
from scripts.verify.mutants import COMPILED, Reach, Results, drawn, files, outcome, room_of, summary
from scripts.verify.mutations import TUNING, Mutant, mutants

SOURCE = '''"""A module."""
LIMIT = 3

def allowed(count: int, most: int = LIMIT) -> bool:
    """Text that stays."""
    if most > 9:
        log.info("counting %s", 1 + 1)
    if count < 0:
        raise ValueError("count + 1")
    return count <= most and not count == 2
'''


def test_each_mutant_changes_one_place_and_texts_stay():
    found = list(mutants("buffer/x.py", SOURCE))
    assert [(each.line, each.what.split(" -> ")[1]) for each in found if each.line in (2, 6, 8)] == [
        (2, "4"),
        (8, "count <= 0"),
        (8, "1"),
    ]
    assert {"count > 3", "count < most"} & {each.what.split(" -> ")[1] for each in found} == {"count < most"}
    assert len({each.source for each in found}) == len(found), "one fault twice"
    for each in found:
        ast.parse(each.source)
        assert "Text that stays." in each.source and "'count + 1'" in each.source and "1 + 1" in each.source


def test_a_knobs_default_is_told_from_other_lines():
    """Its page has it, though no test runs its line."""
    found = list(mutants("buffer/x.py", "def knobs(a=1, *, b=2,\n    c=(3, 4)):\n    return b == 5\n"))
    assert {each.line for each in found if each.is_default} == {1, 2} and not any(
        e.is_default for e in found if e.line == 3
    )


def test_a_sample_is_drawn_by_its_seed_in_the_order_of_the_files():
    found = list(mutants("buffer/x.py", SOURCE))
    once = drawn(found, 4, seed=1)
    assert once == drawn(found, 4, seed=1) and once == sorted(once, key=found.index) and len(once) == 4
    assert drawn(found, None, 0) == found == drawn(found, 1000, 0)


def test_a_fault_is_killed_survives_or_is_reached_by_no_test(tmp_path: Path):
    (tmp_path / "tried.py").write_text("def double(x):\n    return x * 2 + 0\n")
    (tmp_path / "test_tried.py").write_text(
        "import tried\ndef test_zero():\n    assert tried.double(2) == 4\ndef test_none():\n    pass\n"
    )
    wrong = Mutant("tried.py", 2, "", "def double(x):\n    return x * 3\n")
    same = Mutant("tried.py", 2, "", "def double(x):\n    return x + x\n")
    endless = Mutant("tried.py", 2, "", "def double(x):\n    while True: pass\n")
    tests = ["test_tried.py::test_zero"]
    assert [outcome(tmp_path, each, tests, 0.0) for each in (wrong, same)] == ["killed", "survived"]
    assert outcome(tmp_path, wrong, ["test_tried.py::test_none"], 0.0) == "survived"
    assert outcome(tmp_path, wrong, [], 0.0) == "unreached"
    assert outcome(tmp_path, endless, tests, -3.8) == "too long"
    assert (tmp_path / "tried.py").read_text() == "def double(x):\n    return x * 2 + 0\n", "the file is put back"


def test_a_fault_that_fills_the_memory_is_killed(tmp_path: Path):
    (tmp_path / "tried.py").write_text("def held():\n    return bytearray(1)\n")
    (tmp_path / "test_tried.py").write_text("import tried\ndef test_held():\n    assert tried.held()[0] == 0\n")
    greedy = Mutant("tried.py", 2, "all memory", "def held():\n    return bytearray(1 << 34)\n")
    assert outcome(tmp_path, greedy, ["test_tried.py::test_held"], 0.0) == "killed"


def test_a_line_that_runs_on_import_is_tested_by_all_that_reach_its_file(tmp_path: Path):
    reach = Reach(tmp_path)
    reach.by_line |= {("buffer/a.py", 1): set(), ("buffer/a.py", 5): {"slow", "quick"}, ("buffer/b.py", 1): {"other"}}
    reach.seconds |= {"slow": 2.0, "quick": 0.1}
    assert reach.tests_of(Mutant("buffer/a.py", 5, "", "")) == ["quick", "slow"]
    assert reach.tests_of(Mutant("buffer/a.py", 1, "", "")) == ["quick", "slow"]
    assert reach.tests_of(Mutant("buffer/a.py", 3, "", "")) == [], "never run"


def test_compiled_code_is_tested_by_all_that_reach_its_caller(tmp_path: Path):
    reach = Reach(tmp_path)
    (compiled, caller), *_ = COMPILED.items()
    assert compiled in files([]) and caller in files([])
    reach.by_line |= {(caller, 5): {"calls"}, (compiled, 9): set()}
    assert reach.tests_of(Mutant(compiled, 100, "", "")) == ["calls"]


def test_only_files_of_the_rooms_are_taken():
    assert files(["buffer/shares.py"]) == ["buffer/shares.py"] and "learners/losses/clipped.py" in files([])
    with pytest.raises(ValueError, match=r"scripts/train\.py is in none of"):
        files(["scripts/train.py"])
    with pytest.raises(ValueError, match="no such file"):
        files(["buffer/nothing.py"])
    mutant = Mutant("buffer/a.py", 1, "", "")
    assert room_of(mutant.path) == "buffer"
    assert summary([(mutant, "killed"), (mutant, "killed"), (mutant, "survived")]) == {
        "buffer": {"killed": 2, "survived": 1}
    }


def test_outcomes_that_a_file_has_are_not_tried_again(tmp_path: Path):
    file = tmp_path / "outcomes"
    one, two = list(mutants("buffer/x.py", SOURCE))[:2]
    Results(file).add(one, "survived")
    again = Results(file)
    assert again.of(one) == "survived" and again.of(two) is None
    assert again.of(Mutant(one.path, one.line, one.what, one.source + "# edited")) is None, "of this very source"
    Results(None).add(one, "killed")


def test_constants_that_tune_and_assertions_of_zip_are_left_alone():
    source = "_READ_BYTES = 1 << 20\nFORMAT = 6\nfor a, b in zip(x, y, strict=True):\n    f(a, b)\n"
    changed = {each.what for each in mutants("buffer/segment_file.py", source)}
    assert changed == {"6 -> 7", "f(a, b) -> left out"}
    assert "1 << 20 -> 1 >> 20" in {each.what for each in mutants("buffer/x.py", source)}


def test_what_is_left_alone_is_there_and_has_a_reason():
    for path, names in TUNING.items():
        text = (REPOSITORY / path).read_text()
        assert all(reason for reason in names.values())
        assert not [name for name in names if not re.search(rf"^(\w+, )*{name}\b.*=", text, re.MULTILINE)]
