"""Processes forked from `multiprocessing`'s fork server, which has imported torch and transformers.

A fork has these imports at once and shares their memory. The server never imports code of this repository. A forked
process forks its own children from the same server, so all runs of an ablation share the imports."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from setproctitle import setproctitle

from areal_like.launch.group import blocked, environment
from areal_like.launch.outcome import nothing
from areal_like.launch.sockets import short_folder

LIBRARIES = [
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "omegaconf",
    "zmq",
    "msgspec",
]
"""Libraries that a role with a model imports: nearly all of its start time."""
CHECK_SECONDS = 0.1
_SERVER_DIED = 255
"""Exit code that `multiprocessing` reports for a child of a server that was killed."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(LIBRARIES)


@atexit.register
def _end_server() -> None:
    """Otherwise the server ends by itself, a second later: it then unloads torch."""
    if pid := forkserver._forkserver._forkserver_pid:  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Forked:
    """A process like `python -m module arguments` that leads a session; its output is appended to `log`. It gets
    SIGTERM when its starter ends. Signals in `block` stay blocked in it. The first one waits for the server's imports,
    and calls `check`, which may raise. Raises ChildProcessError if the server ends."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        block: Sequence[signal.Signals] = (),
        check: Callable[[], None] = nothing,
    ):
        what = (module, list(arguments), dict(variables), str(log.resolve()), list(block))
        log.touch()
        self._process = _context.Process(target=_run_module, args=what, daemon=True)  # ended at this process's exit
        _start(self._process, check)
        assert self._process.pid
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code = self._process.exitcode
        return -signal.SIGKILL if code == _SERVER_DIED else code  # the role's watcher then kills its whole group

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _start(process: BaseProcess, check: Callable[[], None]) -> None:
    """Start a process in a thread, and call `check` meanwhile. A new server inherits sleeping OpenMP threads, and
    blocked signals that its forks unblock; the forks do not import this process's main module."""
    died: list[Exception] = []

    def start() -> None:
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            died.append(error)

    starting = threading.Thread(target=start, daemon=True)
    variables, main, temporary = dict(os.environ), sys.modules["__main__"], tempfile.tempdir
    tempfile.tempdir = str(short_folder())  # where a new server puts its socket
    os.environ.update(environment(threads=1))
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with blocked(signal.SIGINT, signal.SIGUSR1):
            starting.start()
        while starting.is_alive():
            check()
            starting.join(CHECK_SECONDS)
    finally:
        sys.modules["__main__"], tempfile.tempdir = main, temporary
        os.environ.clear()
        os.environ.update(variables)
    if died:
        raise ChildProcessError("the fork server died; was it killed for lack of memory?") from died[0]


def _run_module(
    module: str, arguments: list[str], variables: dict[str, str], log: str, block: Sequence[signal.Signals]
) -> None:
    setproctitle(module)  # before the environment changes: that shows where the title lies in memory
    os.setsid()
    multiprocessing.current_process().daemon = False  # it may have children
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # By default a child of the server would start a server of its own.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    os.environ.clear()
    os.environ.update(variables)
    folders = [os.getcwd(), *variables.get("PYTHONPATH", "").split(os.pathsep)]  # as `python -m` does
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    tempfile.tempdir = None  # an import may have set it from another environment
    gc.freeze()  # collections don't touch, and so copy, the memory that all forks share
    threads = variables.get("OMP_NUM_THREADS", "")
    if (torch := sys.modules.get("torch")) and threads.isdigit():
        torch.set_num_threads(int(threads))
    sys.argv = [module, *arguments]
    signal.pthread_sigmask(signal.SIG_SETMASK, block)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    """Wait for the end of the process that asked for this one; its parent is the server."""
    if starter := multiprocessing.parent_process():
        starter.join()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
