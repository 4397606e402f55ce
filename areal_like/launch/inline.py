"""Runs a plan in the starter's own process: each role is a thread, and they take turns (`areal_like.turns`).

For debugging, notebooks and tests. Buffer, learner and actors run the same code and send the same messages as in
separate processes. One of them runs at a time, in the order of the plan. An error of any role ends the run: RunFailed,
with that error as its cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import secrets
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from areal_like import turns
from areal_like.config.run_config import Config, load_resolved
from areal_like.launch.outcome import Death, RunFailed, has_ended_well, may_resume, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import RestartLimits
from areal_like.launch.sockets import SocketFolder, sweep
from areal_like.run.process import EXIT_NO_SPACE, EXIT_TERMINATED, Orders, Role, Terminated, explain
from areal_like.run.run_folder import config_file, room_wanted

END_SECONDS = 5.0
"""Time for the roles to end; then an exception is raised in those that have not, and they get the same time again."""


class InlineOrders(Orders):
    """Orders as calls of the launcher; a process gets them as signals."""

    def __init__(self) -> None:
        self._end: Callable[[], object] | None = None
        self._pause: Callable[[], object] | None = None
        self._paused = False

    def on_end(self, begin: Callable[[], object], seconds: int = 0) -> None:
        self._end = begin

    def on_pause(self, begin: Callable[[], object]) -> None:
        self._pause = begin
        if self._paused:
            begin()

    def end_within(self, seconds: int) -> None:
        """Does nothing: only the launcher ends this role."""

    def pause(self) -> None:
        self._paused = True
        if self._pause:
            self._pause()

    def end(self) -> bool:
        """Ask the role to end. False: the role has no handler for this."""
        if self._end:
            self._end()
        return self._end is not None


class RoleThread:
    """A role's thread. After its end, `error` holds its exception (None: no error)."""

    def __init__(self, spec: RoleSpec, role: Role, member: turns.Member):
        self.spec, self.role, self.member = spec, role, member
        self.ended = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=member.turns.run, args=(member, self._live), name=role.name, daemon=True)

    def _live(self) -> None:
        try:
            importlib.import_module(self.spec.module).main(self.role)
        except BaseException as error:
            self.error = error
            if not isinstance(error, SystemExit):
                logging.error("ending after an error", exc_info=error)
        finally:
            self.ended = True

    def tell_to_end(self) -> None:
        assert isinstance(self.role.orders, InlineOrders)
        if not self.role.orders.end():
            self.member.error = Terminated(EXIT_TERMINATED)

    def interrupt(self) -> None:
        """Raise an exception in the thread. This ends an endless loop in Python, but not one in C."""
        if self.thread.ident and self.thread.is_alive():
            number = ctypes.c_ulong(self.thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(Terminated))

    def place(self) -> str:
        """The thread's present place in the code."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-3:]) if frame else ""

    def is_at_prompt(self) -> bool:
        """Does it wait for the user, at the debugger's prompt?"""
        frame = sys._current_frames().get(self.thread.ident or 0)
        above = traceback.walk_stack(frame) if frame else ()
        return any(each.f_globals.get("__name__") == "pdb" for each, _ in above)


class Threads:
    """The roles of the run in the folder `run`. No role is restarted."""

    def __init__(self, run: Path):
        self.run = run
        self.deaths: list[Death] = []
        self.left_out: dict[str, str] = {}
        self._lives: list[RoleThread] = []
        self._turns: turns.TurnOrder | None = None

    def start(self, roles: list[RoleSpec], sockets: Path, config: Config) -> None:
        """Start the roles; they begin to run when this thread first waits."""
        self._turns = turns.TurnOrder()
        starter = self._turns.join("starter")
        turns.become(starter)
        for spec in roles:
            role = Role(spec.name, self.run, sockets, config, orders=InlineOrders())
            self._lives.append(RoleThread(spec, role, self._turns.join(spec.name, before=starter)))
        for life in self._lives:
            life.thread.start()

    def pause(self) -> None:
        for life in self._lives:
            if life.role.name == "learner" and isinstance(life.role.orders, InlineOrders):
                life.role.orders.pause()

    def poll(self) -> bool:
        """Like `Children.poll`. The cause of a RunFailed is the error of the failed role."""
        for life in self._lives:
            if life.ended and has_ended_well(life.role.name, _code(life.error)):
                return True
            if life.ended:
                self._fail(life.role.name, life.error)
        return False

    def _fail(self, name: str, error: BaseException | None) -> None:
        """Raises RunFailed."""
        text, code = explain(error) if isinstance(error, Exception) else (f"it ended: {error!r}", 1)
        room = f": {room_wanted(self.run)}" if code == EXIT_NO_SPACE else ""
        raise RunFailed(f"{name}: {text}{room}", may_resume(self.run, code)) from error

    def end(self) -> None:
        """End every thread. A thread in an endless loop outside of Python can't be ended; it is reported."""
        if self._turns:
            for life in self._lives:
                if not life.ended:
                    life.tell_to_end()
            self._turns.end()
            turns.become(None)
            self._join()
            for life in self._lives:
                life.interrupt()
            self._join()
        stuck = [life for life in self._lives if life.thread.is_alive()]
        for life in stuck:
            if not life.is_at_prompt():
                print(f"{life.role.name} does not end; it is here:\n{life.place()}", file=sys.stderr)
        if self._turns and not stuck:
            self._turns.close()
        self._turns = None

    def _join(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for life in self._lives:
            if life.thread.ident and not life.is_at_prompt():
                life.thread.join(max(0.0, deadline - time.monotonic()))


class InlineLauncher:
    """`ready_timeout`: seconds that roles wait for one another at the start."""

    ACROSS_HOSTS = False
    ONE_PROCESS = True

    def __init__(self, run: Path, limits: RestartLimits, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 1e7):
        self.run, self.ready_timeout = run, ready_timeout
        self.running = Threads(run)
        self._left = contextlib.ExitStack()  # changes to undo at the end

    def submission(self, roles: list[RoleSpec]) -> None:
        return None

    def placement(self, roles: list[RoleSpec]) -> str:
        return "all of them are threads of this process, and an error in any of them ends the run\n"

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        (self.run / "logs").mkdir(exist_ok=True)
        config = load_resolved(config_file(self.run))
        self._left.enter_context(_logs(self.run / "logs", [role.name for role in roles]))
        self._left.enter_context(_terminal())
        self._left.enter_context(_torch_threads())
        self.running.start(roles, self._sockets(config), config)

    def _sockets(self, config: Config) -> Path:
        """The folder of the sockets, or a name that stands for it within this process."""
        if config.buffer.transport == "inproc":
            return Path(f"areal-{secrets.token_hex(8)}")
        sweep()
        folder = SocketFolder()
        self._left.callback(folder.remove)
        return folder.path

    def stop(self) -> None:
        self.running.end()
        self._left.close()


def _code(error: BaseException | None) -> int:
    """The exit code that a process would have."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)


class _RoleFilter(logging.Filter):
    """Log records of one role: from its thread, from that thread's helpers, and, from unknown threads, of its room."""

    def __init__(self, name: str, names: list[str]):
        super().__init__()
        self._name, self._names = name, names

    def filter(self, record: logging.LogRecord) -> bool:
        speaker = (record.threadName or "").partition(" ")[0]
        if speaker in self._names:
            return speaker == self._name
        return record.name.partition(".")[0].removesuffix("s") == self._name.partition("-")[0]


@contextlib.contextmanager
def _logs(folder: Path, names: list[str]) -> Iterator[None]:
    """Write one log per role, as processes do; errors also go to standard error."""
    root, level = logging.getLogger(), logging.getLogger().level
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.ERROR)
    terminal.setFormatter(logging.Formatter("%(threadName)s: %(message)s"))
    handlers: list[logging.Handler] = [terminal]
    for name in names:
        file = logging.FileHandler(folder / f"{name}.log", errors="backslashreplace")  # as on standard error
        file.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
        file.addFilter(_RoleFilter(name, names))
        handlers.append(file)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Restore the terminal at the end, even if a thread still is at a debugger's prompt."""
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


@contextlib.contextmanager
def _torch_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end: roles set it for the whole process."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(before)
