"""Several ranks publish their parts: together these are what one rank would publish, every bit and digest, for actors
that follow, sleep, join late, or are served by a relay. No process puts the weights together."""

import pytest

from tests.learners.publishing import LATE, VERSIONS, publish_on


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_publish_what_one_would_and_none_has_more_than_its_part(tmp_path, ranks: int) -> None:
    found = publish_on(ranks, tmp_path)
    assert found["parts"] == ranks and len(found["versions"]) == VERSIONS
    for version, seen in enumerate(found["versions"]):
        assert len(set(seen["digests"])) == 1 and all(seen["same bits"]), version
        assert seen["density"] == seen["alone"], version
    assert len({seen["digests"][0] for seen in found["versions"]}) == VERSIONS, "the weights have moved each time"
    assert found["held"] < 1.1 * found["whole"] / ranks and found["told"] < 1000 * ranks
    if ranks > 2:
        assert found["edges"], "a shard that ends within a word"
    syncs = found["syncs"]
    assert syncs["follows"]["deltas"] == syncs["behind a relay"]["deltas"] == VERSIONS - 1
    assert syncs["late"]["base_snapshots"] == 1 and syncs["late"]["deltas"] == VERSIONS - LATE - 1
    assert syncs["sleeps"]["base_snapshots"] == 1 and syncs["sleeps"]["deltas"] == 2, (
        "one of them leads over all it has missed"
    )
    assert 0 < min(seen["density"] for seen in found["versions"][1:]) < 0.1
