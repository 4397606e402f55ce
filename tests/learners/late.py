"""Three ranks. The first gives its command late, and comes to the collective a little after the second. The last does
not come.

python -m tests.learners.late RANK FOLDER
"""

import sys
import time
from pathlib import Path

import torch

from learners.collectives import Ranks, join
from learners.follower import LostRankError, naming_lost_ranks

SECONDS = 3.0
"""The time-out of collectives."""


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    join(rank, 3, folder / "store", local=True, seconds=SECONDS)
    ranks = Ranks(3)
    if rank == 0:
        time.sleep(SECONDS + 1)  # as if it waited for a batch
    assert ranks.broadcast("train" if rank == 0 else None) == "train"
    time.sleep((1.0, 0.0, 600.0)[rank])
    try:
        with naming_lost_ranks():
            ranks.sum(1.0)
    except LostRankError as error:
        (folder / f"{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
