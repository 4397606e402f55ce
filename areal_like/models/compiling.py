"""Functions of models that torch compiles, in learners and in the embedded engine."""

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


class Compiling:
    """Has torch compile functions. If one breaks the compiler, all are computed without it from then on."""

    def __init__(self, on: bool):
        self.on = on

    def wrap(
        self, function: Callable[..., Any], name: str, plain: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """`name`: for the warning. `plain`: the same function in the form that is fast without a compiler."""
        compiled = torch.compile(function, dynamic=True)  # for rows of any length

        def compute(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                try:
                    return compiled(*args, **kwargs)
                except torch._dynamo.exc.TorchDynamoException as error:
                    self.on = False
                    log.warning("torch can't compile %s, so they are not compiled: %s", name, error)
            return (plain or function)(*args, **kwargs)

        return compute
