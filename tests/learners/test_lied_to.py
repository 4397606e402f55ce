"""The checks of a learner of several ranks on another rank's share of a batch."""

import json

from tests.forked import forked, said
from tests.learners.lied_to import TRUE


def test_a_lie_in_another_ranks_share_is_not_trained_and_staleness_is_counted_over_all_shares(tmp_path):
    with forked("tests.learners.lied_to", [[str(rank), str(tmp_path)] for rank in range(2)], tmp_path) as running:
        codes = [process.wait(120.0) for process in running]
        assert codes == [0, 0], said(tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["why"].startswith("batch 0 can't be trained: group 1 of") and "digest a lie," in found["why"]
    assert found["staleness"] == TRUE.staleness(), "not of the first share alone"
