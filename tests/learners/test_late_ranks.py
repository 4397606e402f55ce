"""Ranks wait without limit for a command, and for a limited time for each other within a step."""

from tests.forked import forked, said


def test_a_rank_that_does_not_come_is_named_and_one_without_a_command_waits(tmp_path):
    with forked("tests.learners.late", [[str(rank), str(tmp_path)] for rank in range(3)], tmp_path) as running:
        codes = [process.wait(120.0) for process in running[:2]]
        assert codes == [0, 0], said(tmp_path)
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert "rank(s) [0, 1] wait for rank(s) [2], which did not come" in text
