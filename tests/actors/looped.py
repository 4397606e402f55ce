"""Tests that are coroutines: each runs in an event loop of its own."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run
