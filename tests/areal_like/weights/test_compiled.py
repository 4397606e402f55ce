"""When numba is loaded, and the fallback if it can't be loaded or can't keep its compiled code."""

import subprocess
import sys

import numpy as np

from areal_like.weights import digest as compiled
from areal_like.weights.digest import lanes_of


def test_small_weights_and_the_buffer_do_without_numba() -> None:
    code = (
        "import sys, numpy as np, buffer.main, learners.publication, actors.subscriber\n"
        "from areal_like.weights.state import State, TensorSpec\n"
        "State([TensorSpec('w', 'bfloat16', (100, 100))]).digest()\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_numba_numpy_does(monkeypatch) -> None:
    words = np.arange(compiled.COMPILED_FROM // 4, dtype=np.uint64)
    fast = lanes_of(words, 7)
    monkeypatch.setattr(compiled.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    compiled._kernels.cache_clear()
    try:
        assert compiled.kernels_for(words.nbytes) is None
        np.testing.assert_array_equal(lanes_of(words, 7), fast)
    finally:
        compiled._kernels.cache_clear()
