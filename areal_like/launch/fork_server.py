"""A process in which nothing but imports has run, and from which roles are forked.

Importing torch and transformers takes seconds of a processor in each process that does it; a fork has them at once, and
shares their memory. What is imported here are libraries, never code of this repository: that is read anew by each role.

The starter (`areal_like.launch.forks`) is at the other end of a socket; one packet of JSON is one message:

    start a role   → {"module", "arguments", "imports", "environment", "folder", "threads", "log", "title"}
                   ← {"pid"}             from the role's process itself, once it leads a session of its own
    a role's end   ← {"pid", "code"}     as subprocess has it: negative for a signal

When the socket is closed the server ends, and with it, by PR_SET_PDEATHSIG, the roles: it stands for the starter. With
`--listen PATH` it hands each starter that connects a server of its own, forked with all that has been imported so far;
that is for many runs one after the other (`scripts.ablate`, the tests). Linux only: the ends of roles come by pidfd.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import TypedDict

from setproctitle import setproctitle

MOST_BYTES = 1 << 20
"""Of a message; an environment is most of it."""
_PR_SET_PDEATHSIG = 1


class Request(TypedDict):
    """Of a role: see above."""

    module: str
    arguments: list[str]
    imports: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    threads: int
    log: str
    title: str


class Server:
    """Forks what one starter asks for. `serve` returns twice: in a role's process what is to be run there, and None in
    the server when the starter has left."""

    def __init__(self, starter: socket.socket):
        self._starter = starter
        self._roles: dict[int, int] = {}  # pidfd → pid

    def serve(self) -> Callable[[], None] | None:
        while True:
            connection = self._starter.fileno()
            ready, _, _ = select.select([connection, *self._roles], [], [])
            for each in ready:
                if each != connection:
                    self._bury(each)
                elif packet := self._starter.recv(MOST_BYTES):
                    if role := self._fork(json.loads(packet)):
                        return role
                else:
                    return None

    def _bury(self, descriptor: int) -> None:
        pid = self._roles.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int]) -> bool:
        """False: the starter is gone."""
        try:
            self._starter.send(json.dumps(message).encode())
        except ConnectionError:
            return False
        return True

    def _fork(self, request: Request) -> Callable[[], None] | None:
        setproctitle(request["title"])
        for name in request["imports"]:
            with contextlib.suppress(ImportError):  # the role will say it in its own log
                importlib.import_module(name)
        gc.freeze()  # what is here now never becomes garbage: collections of the roles need not touch, and so copy, it
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


def end_with(parent: int) -> None:
    """SIGTERM when the parent ends; it may have ended already. (As `areal_like.process`, not imported here.)"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)


def become(request: Request, server: int) -> None:
    """Be what `python -m MODULE ARGUMENTS` would be; returns or raises as that does."""
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(request["folder"])
    sys.path[:0] = [request["folder"]] * (request["folder"] not in sys.path)  # as `python -m` does
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # an import may have asked for it in another environment
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(request["threads"])
    sys.argv = [request["module"], *request["arguments"], "--parent", str(server)]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def listener_at(path: str) -> socket.socket:
    """A socket that can be connected to as soon as the file is there; who connects waits until it is accepted."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Fork a server for each starter that connects; returns the connection in that one's process."""
    with listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that have ended need no burial
        while True:
            starter, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                return starter
            starter.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Forks the processes of runs; scripts.train starts it where it helps.")
    parser.add_argument("--connection", type=int, help="the descriptor of a socket to the starter")
    parser.add_argument("--listen", metavar="PATH", help="a socket to be made, where any number of starters connect")
    parser.add_argument("--imports", default="", help="libraries to be imported at once, with commas between them")
    args = parser.parse_args()
    # Before any role changes the environment: the place of a title is found by it.
    setproctitle(" ".join(["forks", "areal_like", *sys.argv[1:]]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # roles say when they are ready for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with(os.getppid())
    listener = listener_at(args.listen) if args.listen else None
    for name in args.imports.split(",") if args.imports else []:
        importlib.import_module(name)
    starter = accept(listener) if listener else socket.socket(fileno=args.connection)
    role = Server(starter).serve()
    if role is None:
        os._exit(0)
    role()


if __name__ == "__main__":
    main()
