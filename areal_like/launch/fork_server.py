"""A process that only imports libraries; roles are forked from it.

To import torch and transformers takes each process seconds of processor time. A fork has them at once, and shares
their memory. The server imports only libraries, never code of this repository: each role reads that itself.

The starter (`areal_like.launch.forks`) is at the other end of a socket; one packet of JSON is one message:

    start a role   → {"module", "arguments", "imports", "environment", "folder", "threads", "log", "title"}
                   ← {"pid"}             from the role's process itself, once it leads a session of its own
    a role's end   ← {"pid", "code"}     as subprocess has it: negative for a signal

When the starter closes the socket, the server ends, and PR_SET_PDEATHSIG ends the roles too. With `--listen PATH` each
starter that connects gets its own server: a fork with all imports so far. That is for many runs in a row
(`scripts.ablate`, the tests). Linux only: a pidfd reports the end of a role.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import TypedDict

from setproctitle import setproctitle

MOST_BYTES = 1 << 20
"""Largest message; most of it is the environment."""
_PR_SET_PDEATHSIG = 1


class RoleRequest(TypedDict):
    """A request to start a role: see above."""

    module: str
    arguments: list[str]
    imports: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    threads: int
    log: str
    title: str


class ForkServer:
    """Forks roles for one starter. `serve` returns in two places: in a role's process, with the function to run there;
    in the server, with None, when the starter has left."""

    def __init__(self, starter: socket.socket):
        self._starter = starter
        self._roles: dict[int, int] = {}  # pidfd → pid

    def serve(self) -> Callable[[], None] | None:
        while True:
            connection = self._starter.fileno()
            ready, _, _ = select.select([connection, *self._roles], [], [])
            for each in ready:
                if each != connection:
                    self._report_end(each)
                elif packet := self._starter.recv(MOST_BYTES):
                    if role := self._fork(json.loads(packet)):
                        return role
                else:
                    return None

    def _report_end(self, descriptor: int) -> None:
        pid = self._roles.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int]) -> bool:
        """Send a message to the starter. False: the starter is gone."""
        try:
            self._starter.send(json.dumps(message).encode())
        except ConnectionError:
            return False
        return True

    def _fork(self, request: RoleRequest) -> Callable[[], None] | None:
        setproctitle(request["title"])
        for name in request["imports"]:
            with contextlib.suppress(ImportError):  # the role will report it in its own log
                importlib.import_module(name)
        leave_finalizers()
        gc.freeze()  # present objects never become garbage: collections in roles don't touch, and so copy, them
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._roles[os.pidfd_open(pid)] = pid
            return None
        end_with(server)
        os.setsid()
        for descriptor in self._roles:
            os.close(descriptor)
        if not self._tell({"pid": os.getpid()}):
            os._exit(0)
        self._starter.close()
        return lambda: become(request, server)


def leave_finalizers() -> None:
    """What libraries made when they were imported is shared: no role takes it apart at its own end. Torch alone has
    hundreds of such objects."""
    for each in list(getattr(weakref.finalize, "_registry", ())):
        each.atexit = False


def end_with(parent: int) -> None:
    """Get SIGTERM when the parent ends; it may have ended already. (As in `run.process`, not imported here.)"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)


def become(request: RoleRequest, server: int) -> None:
    """Run as `python -m MODULE ARGUMENTS` would; returns or raises as that does."""
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(request["folder"])
    folders = [
        request["folder"],
        *request["environment"].get("PYTHONPATH", "").split(os.pathsep),
    ]  # as `python -m` does
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # an import may have set it from another environment
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(request["threads"])
    sys.argv = [request["module"], *request["arguments"], "--parent", str(server)]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


class Ending:
    """Ends a role's process when its threads have ended and its exit handlers have run. Python would then take apart
    all that the process imported, and so copy the memory that it shares: half a second of processor time or more."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)  # before libraries register theirs: the last to run

    def of(self, role: Callable[[], None]) -> None:
        self._code = 1  # as of an error, which Python reports before it runs the handlers
        try:
            role()
            self._code = 0
        except SystemExit as end:
            self._code = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
            raise
        except KeyboardInterrupt:
            self._code = None  # Python ends by the signal
            raise

    def _end(self) -> None:
        if self._code is not None:
            flush_files()
            os._exit(self._code)


def flush_files() -> None:
    """Write what files still hold that were opened since the fork, and not closed, as Python does at its end."""
    opened = [each for each in gc.get_objects() if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter)]
    for stream in (sys.stdout, sys.stderr, *opened):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def listener_at(path: str) -> socket.socket:
    """A socket that accepts connections as soon as its file exists; a client then waits for `accept`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Fork a server for each starter that connects. Returns the connection, in the forked process."""
    with listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no need to wait for servers that have ended
        while True:
            starter, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                return starter
            starter.close()


def main() -> None:
    ending = Ending()
    parser = argparse.ArgumentParser(description="Forks the processes of runs; scripts.train starts it where it helps.")
    parser.add_argument("--connection", type=int, help="the descriptor of a socket to the starter")
    parser.add_argument("--listen", metavar="PATH", help="a socket to be made, where any number of starters connect")
    parser.add_argument("--imports", default="", help="libraries to be imported at once, with commas between them")
    args = parser.parse_args()
    # Before any role changes the environment: it shows where the process title is in memory.
    setproctitle(" ".join(["forks", "areal_like", *sys.argv[1:]]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # roles unblock it when they are ready
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with(os.getppid())
    gc.disable()  # imports leave no garbage, and looking for it takes a sixth of their time
    listener = listener_at(args.listen) if args.listen else None
    for name in args.imports.split(",") if args.imports else []:
        importlib.import_module(name)
    starter = accept(listener) if listener else socket.socket(fileno=args.connection)
    role = ForkServer(starter).serve()
    if role is None:
        os._exit(0)
    ending.of(role)


if __name__ == "__main__":
    main()
