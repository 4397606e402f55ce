"""Chooses the Ray cluster of a run: one that answers, or a new one for this run.

Ray itself waits for a cluster without limit, ignores signals meanwhile, and writes its problems to the terminal. So a
separate process asks first (`answering`), with a time limit. Then the starter connects."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from areal_like.launch.outcome import RunFailed

LOCAL = "local"
"""The address that always means a new cluster for the run."""
ANSWER_SECONDS = 45.0
"""Seconds that a cluster has to answer, including the start of Python."""
POLL_SECONDS = 0.1
_NONE = 3
_PROBE = f"""
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
except ConnectionError as error:
    print(error, file=sys.stderr)
    sys.exit({_NONE})
print(ray.get_runtime_context().gcs_address)
"""


def answering(address: str, check: Callable[[], None], seconds: float = ANSWER_SECONDS) -> str | None:
    """The address of the cluster that `address` means; None: "auto" found none. Calls `check` while it waits, which may
    raise. Raises RunFailed."""
    command = [sys.executable, "-c", _PROBE, address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asking = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + seconds
    try:
        while (code := asking.poll()) is None and time.monotonic() < deadline:
            check()
            time.sleep(POLL_SECONDS)
    finally:
        asking.kill()
        out, errors = asking.communicate()
    if code == 0:
        return str(out.split()[-1])
    if code == _NONE and address == "auto":
        return None
    which = "the Ray cluster that this machine belongs to" if address == "auto" else f"launcher.address={address}"
    last = " ".join(errors.strip().rpartition("\n")[2].split()) or "it printed nothing"
    how = f"no answer within {seconds:.0f} s" if code is None else f"no Ray cluster answers there ({last})"
    token = "Unauthenticated" in errors or "AuthToken" in errors
    more = "; it wants a token (RAY_AUTH_MODE, RAY_AUTH_TOKEN): is it another user's?" if token else ""
    raise RunFailed(f"{which}: {how}{more}; launcher.address={LOCAL} starts one of the run's own")
