"""Decides when compiled kernels are used: for weights large enough to pay for loading numba, where numba is installed.

Small models, and processes that never touch weights, avoid the import (half a second).
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

log = logging.getLogger(__name__)
COMPILED_FROM = 1 << 20
"""Bytes of weights."""


def kernels_for(nbytes: int) -> ModuleType | None:
    """`areal_like.weights.kernels` if it pays for this number of bytes; None: use NumPy."""
    return _kernels() if nbytes >= COMPILED_FROM else None


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("areal_like.weights.kernels")
    except ImportError as error:
        log.warning("weights are compared by NumPy, which is slow for large models: numba can't be used (%s)", error)
        return None
