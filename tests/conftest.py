"""For all tests: hypothesis may take its time, so that a busy machine fails nothing.

Files that start many processes and wait for them come first, so that several workers (`-n`, with `--dist loadfile
--no-loadscope-reorder`) end at the same time.
"""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

LONG = ("slurm", "integration", "faults")
"""Folders with the longest files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> int:
        folder = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=order)  # stable: the order within files stays
