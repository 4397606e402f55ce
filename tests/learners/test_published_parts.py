"""Several ranks publish their parts: together these are what one rank would publish, for an actor that follows."""

import pytest

from tests.learners.publishing import VERSIONS, publish_on


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_publish_what_one_would_and_none_has_more_than_its_part(tmp_path, ranks: int) -> None:
    found = publish_on(ranks, tmp_path)
    for version, seen in enumerate(found["versions"]):
        assert len(set(seen["digests"])) == 1 and seen["same bits"], version
    assert len({seen["digests"][0] for seen in found["versions"]}) == VERSIONS, "the weights have moved each time"
    assert found["parts"] == ranks and found["held"] < 1.1 * found["whole"] / ranks
    assert ranks == 2 or found["edges"], "a shard that ends within a word"
    assert found["deltas"] == VERSIONS - 1 and 0 < found["versions"][-1]["density"] < 0.1
