"""`python -m tests.faults.on_host MODULE NAMESPACE ARGUMENTS` is `python -m MODULE ARGUMENTS` in a network namespace.

For forks of a server that has imported torch; `ip netns exec` starts a process that imports it anew.
"""

import ctypes
import os
import runpy
import sys

CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, into a network namespace. Raises OSError."""
    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(
                ctypes.get_errno(), f"can't enter the namespace {namespace}: {os.strerror(ctypes.get_errno())}"
            )


if __name__ == "__main__":
    module, namespace = sys.argv[1:3]
    del sys.argv[1:3]
    enter(namespace)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
