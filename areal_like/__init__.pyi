from collections.abc import Mapping

from areal_like.run.api import Run as Run
from areal_like.run.api import train as train

def check(
    component: str,
    kind: str | None = None,
    knobs: Mapping[str, object] | None = None,
    *,
    answer: str = ...,
    response: str = ...,
    task: str = ...,
) -> list[str]: ...
