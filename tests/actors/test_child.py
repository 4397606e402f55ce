"""Programs that end with the process that has started them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

STARTS = """
import signal, time
from actors.child import Child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
child = Child(["sh", "-c", "sleep 60 & sleep 60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def in_group(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_nothing_is_left_of_a_child_and_what_it_has_started(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    members = in_group(int(parent.stdout.readline()))
    assert len(members) >= 2, "the program and its guard"
    parent.send_signal(number)
    parent.wait(30)
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive
