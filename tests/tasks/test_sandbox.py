"""Programs with errors and programs that attack; none gets more than a wrong answer."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from actors.reward_pool import MACHINE
from areal_like.tasks import sandbox
from areal_like.tasks.sandbox import OutOfTime, SandboxError, SandboxLimits, run
from areal_like.tasks.unit_tests import same, unit_tests
from tests.actors.test_reward_pool import ends

ADD = "def f(a, b):\n    return a + b\n"
BOTH = pytest.mark.parametrize("isolation", ["full", "weak"])


def answer(body: str, isolation: str = "full", **bounds):
    """What `f()` with this body returns: a list of one, or None."""
    indented = "\n    ".join(body.splitlines())
    return run(f"def f():\n    {indented}\n", "f", [[]], SandboxLimits(**bounds), isolation)[0]


@BOTH
def test_values_come_back_in_the_order_of_the_calls(isolation):
    calls = [[1, 2], ["x", "½"], [[1], [{"k": None}]], [1, "x"]]
    assert run(ADD, "f", calls, isolation=isolation) == [[3], ["x½"], [[1, {"k": None}]], None]


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time\ntime.sleep(3600)",
        "return (10**9)**(10**9)",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ],
)
def test_an_endless_program_is_killed(body, isolation):
    """One that sleeps is ended by the far limit on wall time."""
    with pytest.raises(OutOfTime):
        answer(body, isolation, seconds=0.1)


@BOTH
def test_time_without_the_processor_is_no_time_of_a_program(isolation, monkeypatch):
    monkeypatch.setattr(sandbox, "WALL", 1e6)
    assert answer("import time\ntime.sleep(0.2)\nreturn 1", isolation, seconds=1e-3) == [1]


def test_a_sandbox_that_does_not_start_is_a_fault_of_the_machine(monkeypatch):
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.0)
    with pytest.raises(SandboxError) as error:
        answer("return 1", "weak")
    assert isinstance(error.value, MACHINE)


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
        "return 'x' * (4 << 20)",
        "value = []\nfor _ in range(100000): value = [value]\nreturn value",
        "return float('nan')",
        "return {1, 2}",
        "import os\nreturn os.fork()",
        "import socket\nreturn 1",
        f"return len(open({sys.executable!r}, 'rb').read())",
        pytest.param(f"return len(open('/proc/{os.getpid()}/cmdline').read())", id="another process"),
    ],
)
def test_programs_get_no_answer(body, isolation):
    """Too much memory, too much output, odd values, processes, sockets, files."""
    assert answer(body, isolation) is None


ATTEMPT = "import ctypes\nLIBC = ctypes.CDLL(None)\nreturn "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # vsock (40) would reach the host of a virtual machine from an empty network namespace
        (f"{ATTEMPT}[LIBC.socket(family, kind, 0) for family in range(46) for kind in (1, 2, 3, 5)]", [-1] * 46 * 4),
        (f"{ATTEMPT}LIBC.unshare(0x10000000)", -1),
        (f"{ATTEMPT}LIBC.chroot(b'/')", -1),
        (f"{ATTEMPT}LIBC.mount(b'x', b'/', b'proc', 0, None)", -1),
        ("import os\nreturn [os.getpid(), os.getppid()]", [1, 0]),
    ],
)
def test_no_socket_no_right_and_no_other_process_is_left(body, expected):
    assert answer(body) == [expected]
    assert answer(f"import os\nos.kill({os.getpid()}, 0)\nreturn 1") is None
    assert answer("import _thread\n_thread.start_new_thread(print, ())\nreturn 1") is None
    assert answer("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))\nreturn 1") is None


def test_expected_values_are_not_there():
    """Everything that a program can reach is searched for a value that only the caller has."""
    body = "import sys\nfound = []\nframe = sys._getframe()\nwhile frame:\n    found.append(repr(frame.f_globals))\n"
    body += "    found.append(repr(frame.f_locals))\n    frame = frame.f_back\n"
    assert answer(body + "return '86' + '753' in ''.join(found)") == [False]
    forged = "import os\nfor fd in range(16):\n    try: os.write(fd, b'[true]\\n' * 3)\n    except OSError: pass\n"
    assert run(forged + ADD, "f", [[1, 2]]) == [[True]], "there is nothing to forge"


def score(program: str, **more) -> float:
    tests = {"function": "f", "cases": [[[1, 2], 3], [[2, 2], 4]]} | more
    try:
        return unit_tests(json.dumps(tests), program)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("program", "more", "expected"),
    [
        ("def f(a, b): return a + b", {}, 1.0),
        ("def f(a, b): return a * b", {}, 0.0),
        ("def f(a, b): return a * b", {"credit": "share"}, 0.5),
        ("So:\n```python\nnonsense\n```\nor\n```python\ndef f(a, b): return a + b\n```\nDone.", {}, 1.0),
        ("def f(a, b):\n  while True: pass", {"seconds": 1.0}, 0.0),
        ("class Same(int):\n    def __eq__(self, other): return True\ndef f(a, b): return Same(9)", {}, 0.0),
        ("import json\njson.dumps = lambda *a, **k: '[true]'\ndef f(a, b): return 0", {}, 0.0),
        ("import os\nos._exit(0)", {}, 0.0),
    ],
)
def test_a_program_is_scored_by_its_cases_and_cannot_reach_the_comparison(program, more, expected):
    assert score(program, **more) == expected


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [(1, 1.0, True), (0.1 + 0.2, 0.3, True), (True, 1, False), (1, True, False), ([1, [2]], [1, [2]], True),
     ([1], [1, 2], False), ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"b": 1}, False), (10**400, 0.5, False),
     ("1", 1, False), (None, 0.0, False)],
)  # fmt: skip
def test_values_are_compared_as_json(value, expected, equal):
    assert same(value, expected) is equal


def test_nothing_is_left_behind_when_the_caller_is_killed_while_the_sandbox_is_set_up():
    """The kernel clears the parent-death signal when the user changes: the caller ends right then."""
    inside = (
        "import os, sys, time; from areal_like.tasks import sandboxed; caller, fork = os.getppid(), os.fork\n"
        "def forked():\n"
        "    child = fork()\n"
        "    if child:\n"
        "        print(os.getpid(), child, flush=True)\n"
        "        while os.getppid() == caller: time.sleep(0.01)\n"
        "    return child\n"
        "os.fork = forked\n"
        "sandboxed.lock_in('full', caller)\n"
        "time.sleep(3600)\n"
    )
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inside!r}])"]
    path = os.environ | {"PYTHONPATH": os.getcwd()}
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,  # that the other user may enter, unlike pytest's
        subprocess.Popen(command, stdout=subprocess.PIPE, env=path, cwd=folder) as caller,
    ):
        found = [int(each) for each in caller.stdout.readline().split()]
        caller.kill()
        assert len(found) == 2 and ends(*found)
