"""Chooses the Ray cluster of a run: one that answers, or a new one for this run.

Ray itself waits for a cluster without limit, ignores signals meanwhile, and writes its problems to the terminal. So a
separate process asks first (`answering`), with a time limit. Then the starter connects."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

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
    said, code = _ask(address, check, seconds)
    if code == 0:
        return said[0][-1]
    if code == _NONE and address == "auto":
        return None
    which = "the Ray cluster that this machine belongs to" if address == "auto" else f"launcher.address={address}"
    last = said[1][-1] if said[1] else "it printed nothing"
    how = f"no answer within {seconds:.0f} s" if code is None else f"no Ray cluster answers there ({last})"
    token = "Unauthenticated" in last or "AuthToken" in " ".join(said[1])
    more = "; it wants a token (RAY_AUTH_MODE, RAY_AUTH_TOKEN): is it another user's?" if token else ""
    raise RunFailed(f"{which}: {how}{more}; launcher.address={LOCAL} starts one of the run's own")


def _ask(address: str, check: Callable[[], None], seconds: float) -> tuple[tuple[list[str], list[str]], int | None]:
    """(lines of standard output, of standard error), exit code. An exit code of None: it took too long."""
    command = [sys.executable, "-c", _PROBE, address]
    asking = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = asking.communicate(timeout=POLL_SECONDS)
                return (_lines(out), _lines(err)), asking.returncode
            check()
            if time.monotonic() > deadline:
                asking.kill()
                out, err = asking.communicate()
                return (_lines(out), _lines(err)), None
    finally:
        asking.kill()
        asking.wait()


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def require_token() -> None:
    """Make a new cluster refuse clients without its token. Ray binds to all addresses of a host, so any client could
    run any code. Call this before Ray is imported."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def check_place(kind: str, place: Mapping[str, object]) -> None:
    """Raises ValueError for a place that Ray does not accept: Ray would wait without limit, or crash."""
    for name, amount in place.items():
        good = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount < float("inf")
        if not good or (name == "GPU" and float(amount) > 1 and float(amount) % 1):  # type: ignore[arg-type]
            raise ValueError(f"launcher.{kind}_place: {name}: {amount!r} is no amount that a place can have")
    if not any(place.values()):
        raise ValueError(f"launcher.{kind}_place: a place needs something of something, e.g. {{CPU: 1}}")
