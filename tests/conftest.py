"""For all tests: hypothesis may take its time, so that a busy machine fails nothing; runs import torch once."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from areal_like.launch import forks

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

MANY_TESTS = 10
"""Of fewer, each run starts its own fork server: waiting for a common one would take as long."""


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """The runs that tests start are forked from one process that has imported torch, as those of an ablation are."""
    if len(request.session.items) < MANY_TESTS:
        yield
        return
    with forks.listening():
        yield
