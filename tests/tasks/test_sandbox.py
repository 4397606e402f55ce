"""Programs with errors and programs that attack; none gets more than a wrong answer."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areal_like.tasks.sandbox import OutOfTime, SandboxLimits, run

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
@pytest.mark.parametrize("loop", ["while True: pass", "import time\ntime.sleep(3600)", "return (10**9)**(10**9)"])
def test_an_endless_program_is_killed(loop, isolation):
    with pytest.raises(OutOfTime):
        answer(loop, isolation, seconds=0.8)


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        "return len('x' * (1 << 30))",
        "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
        "return 'x' * (4 << 20)",
        "value = []\nfor _ in range(100000): value = [value]\nreturn value",
        "return float('nan')",
        "return {1, 2}",
    ],
)
def test_too_much_memory_too_much_output_and_odd_values_are_no_answer(body, isolation):
    assert answer(body, isolation) is None


@BOTH
def test_no_process_is_started(isolation):
    body = "import os\ntry:\n    return os.fork() >= 0\nexcept OSError:\n    return 'refused'"
    assert answer(body, isolation) == ["refused"]
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    with pytest.raises(OutOfTime):
        answer(bomb, isolation, seconds=0.8)
    assert answer("import _thread\n_thread.start_new_thread(print, ())\nreturn 1") is None


@BOTH
def test_no_file_of_the_machine_can_be_read(isolation, tmp_path):
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    for path in (secret, Path(sys.executable), Path("/etc/passwd"), Path(f"/proc/{os.getpid()}/cmdline")):
        assert answer(f"return len(open({str(path)!r}, 'rb').read())", isolation) is None


def test_no_network():
    """By system calls, since other modules can't be imported anyway."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = b"\x02\x00" + server.getsockname()[1].to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
        body = f"import ctypes\nLIBC = ctypes.CDLL(None)\nreturn LIBC.connect(LIBC.socket(2, 1, 0), {address!r}, 16)"
        assert answer(body) == [-1]
        assert answer(body, "weak") is None
    assert answer("import socket\nreturn 1") is None


def test_no_socket_is_made_of_families_without_namespaces_either():
    """vsock (40) reaches the host of a virtual machine from an empty network namespace."""
    body = "import ctypes\nLIBC = ctypes.CDLL(None)\n"
    body += "return [LIBC.socket(family, kind, 0) for family in range(46) for kind in (1, 2, 3, 5)]"
    assert answer(body) == [[-1] * 46 * 4]


def test_no_other_process_is_seen_and_no_right_is_left():
    assert answer("import os\nreturn [os.getpid(), os.getppid()]") == [[1, 0]]
    assert answer(f"import os\nos.kill({os.getpid()}, 0)\nreturn 1") is None
    for attempt in ("LIBC.unshare(0x10000000)", "LIBC.chroot(b'/')", "LIBC.mount(b'x', b'/', b'proc', 0, None)"):
        body = f"import ctypes\nLIBC = ctypes.CDLL(None)\nreturn {attempt}"
        assert answer(body) == [-1]
    assert answer("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))\nreturn 1") is None


def test_what_is_expected_is_not_there():
    """Everything that a program can reach is searched for a value that only the caller has."""
    body = (
        "import gc, sys\nfound = []\nframe = sys._getframe()\nwhile frame:\n    found.append(repr(frame.f_globals))\n"
    )
    body += "    found.append(repr(frame.f_locals))\n    frame = frame.f_back\n"
    body += "return '86' + '753' in ''.join(found)"
    assert answer(body) == [False]
    assert answer("import __main__\nreturn sorted(k for k in __main__.__dict__ if 'expect' in k)") == [[]]


def test_a_program_that_writes_its_own_results_has_only_given_answers():
    forged = "import os\nfor fd in range(16):\n    try: os.write(fd, b'[true]\\n' * 3)\n    except OSError: pass\n"
    assert run(forged + ADD, "f", [[1, 2]]) == [[True]], "without the expected value there is nothing to forge"
    assert run(
        "import os\nfor fd in range(16):\n    try: os.ftruncate(fd, 0)\n    except OSError: pass\n" + ADD, "f", [[1, 2]]
    ) in ([[3]], [None])


def gone(pids: list[int], deadline: float) -> bool:
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


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
        assert len(found) == 2 and gone(found, time.monotonic() + 20)
