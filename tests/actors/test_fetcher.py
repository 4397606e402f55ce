"""Routes of several parts, and sizes and checksums that a source announces, with sources that follow a script."""

from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from actors.fetcher import Fetcher
from actors.sources import Superseded
from areal_like.weights.replica import NOTHING, Desync, Replica
from areal_like.weights.state import TensorSpec
from areal_like.wire.messages import Manifest
from tests.actors.looped import looped


def replica_of(parts: int) -> Replica:
    replica = Replica()
    replica.shape([TensorSpec("w", "float32", (4096, 2))], 4096, parts)
    return replica


@pytest.mark.parametrize(
    ("offers", "planned"),
    [
        ({0: [2, 3], 1: [3]}, [3, 3]),  # the second part's source led further, so the first is asked again
        ({0: [2, 2], 1: [3]}, None),  # the first has nothing newer: a step without common version
    ],
)
@looped
async def test_all_parts_lead_to_one_version(offers: dict[int, list[int]], planned: list[int] | None) -> None:
    async def plan(part: int, version: int, *_: object) -> list[tuple[int, int, int, str]]:
        return [(NOTHING, offers[part].pop(0), 8, "")]

    manifest = Manifest(2, "digest", parts=["tcp://one", "tcp://two"])
    found = Fetcher(SimpleNamespace(plan=plan), replica_of(2)).plans(manifest, lambda: manifest)  # type: ignore[arg-type]
    if planned is None:
        with pytest.raises(Superseded):
            await found
    else:
        assert [hops[-1][1] for hops in await found] == planned


WHOLE, DATA = 4 * 4096 * 2, b"a delta"
CHECKSUM = xxhash.xxh3_64_hexdigest(DATA)


@pytest.mark.parametrize(
    ("hop", "reason"),
    [
        ((NOTHING, 3, WHOLE, ""), None),
        ((NOTHING, 3, WHOLE - 8, ""), "wrong size"),
        ((2, 3, len(DATA), CHECKSUM), None),
        ((2, 3, len(DATA), CHECKSUM[::-1]), "wrong checksum"),
        ((2, 3, 1 << 40, CHECKSUM), "wrong size"),
        ((2, 3, -1, CHECKSUM), "wrong size"),
    ],
)
@looped
async def test_a_hop_of_another_size_or_checksum_is_a_desync(
    hop: tuple[int, int, int, str], reason: str | None
) -> None:
    async def fetch(part: int, row: tuple, put) -> None:
        put(0, np.frombuffer(DATA, np.uint8)[: row[2]])

    route = Fetcher(SimpleNamespace(fetch=fetch), replica_of(1)).fetch(0, [hop], None)  # type: ignore[arg-type]
    if reason is None:
        assert [bytes(each) for each in (await route).messages] == ([] if hop[0] == NOTHING else [DATA])
    else:
        with pytest.raises(Desync) as error:
            await route
        assert error.value.reason == reason
