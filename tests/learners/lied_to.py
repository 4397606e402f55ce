"""Two ranks of a learner. An actor has lied about the weights that made a group; the second rank gets it in its share.

python -m tests.learners.lied_to RANK FOLDER

The first rank leaves in FOLDER/found.json why it did not train that batch, and the staleness of the one in its place.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal_like.types import Batch
from learners.attestation import Attestation, RunRecord
from learners.collectives import Ranks, join
from learners.follower import LeadingTrainer, follow
from learners.untrainable import Untrainable
from tests.learners.batches import make_batch
from tests.learners.ranked import Case, learner_of, share
from tests.seeds import seeded

TRUE = replace(make_batch(seeded(0), version=1), version=2)
LIE = replace(TRUE, groups=[replace(each, digests=dict.fromkeys(each.digests, "a lie")) for each in TRUE.groups])


class Client:
    """Serves the second rank its shares: a false one, and its replacement."""

    redo = 0

    def __init__(self) -> None:
        self.shares = [share(each, 1, 2) for each in (LIE, TRUE)]

    def want_share(self, index: int, rank: int) -> None: ...

    def batch(self) -> tuple[Batch, dict[str, Any]]:
        if not self.shares:
            sys.exit()
        return self.shares.pop(0), {}


def lead(trainer: LeadingTrainer, folder: Path) -> dict[str, Any]:
    attestation, why, mine = Attestation(folder), "", share(TRUE, 0, 2)
    for version, digest in {pair for group in TRUE.groups for pair in group.digests.items()}:
        attestation.add(version, digest)
    try:
        trainer.train(mine)
    except Untrainable as fault:
        why = str(fault)
    trainer.train(replace(mine, redo=1))
    return {"why": why, "staleness": trainer.staleness()}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    join(rank, 2, folder / "store", local=True)
    learner = learner_of(Case(), 2)
    if rank:
        follow(learner, Client(), None, RunRecord(folder))  # type: ignore[arg-type]
    found = lead(LeadingTrainer(learner), folder)
    (folder / "found.json").write_text(json.dumps(found))
    Ranks(2).broadcast(("train", [1, 1]))  # there is no other share: the second rank ends


if __name__ == "__main__":
    main()
