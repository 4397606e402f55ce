"""Runs a plan in the starter's own process: each role is a thread, and they take turns (`areal_like.turns`).

For debugging, notebooks and tests. Roles run the same code and send the same messages as in separate processes. An
error of any role ends the run: RunFailed, with that error as its cause."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from areal_like import turns
from areal_like.config.run_config import load_resolved
from areal_like.launch.children import Launcher, RestartLimits
from areal_like.launch.outcome import Death, RunFailed, has_ended_well, may_resume, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.sockets import SocketFolder, sweep
from areal_like.run.process import EXIT_NO_SPACE, EXIT_TERMINATED, Orders, Role, Terminated, explain
from areal_like.run.run_folder import config_file, room_wanted

END_SECONDS = 5.0
"""Time for the roles to end; then an exception is raised in those that have not, and they get the same time again."""
LOG = "inline.log"


class RoleThread(Orders):
    """A role's thread; its orders are calls of the launcher. `error`: the exception that ended it (None: none)."""

    def __init__(self, spec: RoleSpec, member: turns.Member):
        self.name, self.module, self.member = spec.name, spec.module, member
        self.role: Role | None = None
        self.thread = threading.Thread(target=member.turns.run, args=(member, self._run), name=spec.name, daemon=True)
        self.ended = self._paused = False
        self.error: BaseException | None = None
        self._pause: Callable[[], object] = nothing
        self.ask_to_end: Callable[[], object] = lambda: setattr(member, "error", Terminated(EXIT_TERMINATED))

    def start(self, role: Role) -> None:
        self.role = role
        self.thread.start()

    def _run(self) -> None:
        try:
            importlib.import_module(self.module).main(self.role)
        except BaseException as error:
            self.error = error
            if not isinstance(error, SystemExit):
                logging.error("ending after an error", exc_info=error)
        finally:
            self.ended = True

    def on_end(self, begin: Callable[[], object], seconds: int = 0) -> None:
        self.ask_to_end = begin

    def on_pause(self, begin: Callable[[], object]) -> None:
        self._pause = begin
        if self._paused:
            begin()

    def pause(self) -> None:
        self._paused = True
        self._pause()

    def end_within(self, seconds: int) -> None:
        """Does nothing: only the launcher ends this role."""

    def interrupt(self) -> None:
        """Raise an exception in the thread. This ends an endless loop in Python, but not one in C."""
        if self.thread.ident and self.thread.is_alive():
            number = ctypes.c_ulong(self.thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(Terminated))

    def is_at_prompt(self) -> bool:
        """Does it wait for the user, at the debugger's prompt?"""
        frame = sys._current_frames().get(self.thread.ident or 0)
        above = traceback.walk_stack(frame) if frame else ()
        return any(each.f_globals.get("__name__") == "pdb" for each, _ in above)


class InlineLauncher(Launcher):
    """`ready_timeout`: seconds that roles wait for one another. It is its own `running`, without restarts."""

    ONE_PROCESS = True

    def __init__(self, run: Path, limits: RestartLimits, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 1e7):
        self.run, self.running = run, self
        self.deaths: list[Death] = []
        self.left_out: dict[str, str] = {}
        self._roles: list[RoleThread] = []
        self._turns: turns.TurnOrder | None = None
        self._left = contextlib.ExitStack()  # changes to undo at the end

    def placement(self, roles: list[RoleSpec]) -> str:
        return "all of them are threads of this process, and an error in any of them ends the run\n"

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        """Start the roles; they begin to run when this thread first waits."""
        config = load_resolved(config_file(self.run))
        self._log()
        with contextlib.suppress(OSError, ValueError, termios.error):  # a thread may still be at a debugger's prompt
            terminal = sys.stdin.fileno()
            self._left.callback(termios.tcsetattr, terminal, termios.TCSADRAIN, termios.tcgetattr(terminal))
        if torch := sys.modules.get("torch"):  # roles set it for the whole process
            self._left.callback(torch.set_num_threads, torch.get_num_threads())
        if config.buffer.transport == "inproc":
            sockets = Path(f"areal-{secrets.token_hex(8)}")  # a name within this process
        else:
            sweep()
            folder = SocketFolder()
            self._left.callback(folder.remove)
            sockets = folder.path
        self._turns = turns.TurnOrder()
        starter = self._turns.join("starter")
        turns.become(starter)
        self._roles = [RoleThread(spec, self._turns.join(spec.name, before=starter)) for spec in roles]
        for each in self._roles:
            each.start(Role(each.name, self.run, sockets, config, orders=each))

    def _log(self) -> None:
        """Write one log of all roles; errors also go to standard error."""
        (self.run / "logs").mkdir(exist_ok=True)
        terminal, root = logging.StreamHandler(), logging.getLogger()
        terminal.setLevel(logging.ERROR)
        terminal.setFormatter(logging.Formatter("%(threadName)s: %(message)s"))
        file = logging.FileHandler(self.run / "logs" / LOG, errors="backslashreplace")  # as on standard error
        file.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(levelname)s %(message)s"))
        for handler in (terminal, file):
            self._left.callback(handler.close)
            self._left.callback(root.removeHandler, handler)
            root.addHandler(handler)
        self._left.callback(root.setLevel, root.level)
        root.setLevel(logging.INFO)

    def pause(self) -> None:
        for each in self._roles:
            if each.name == "learner":
                each.pause()

    def poll(self) -> bool:
        """Like `Children.poll`. The cause of a RunFailed is the error of the failed role."""
        for each in self._roles:
            if not each.ended:
                continue
            if has_ended_well(each.name, _code(each.error)):
                return True
            error = each.error
            text, code = explain(error) if isinstance(error, Exception) else (f"it ended: {error!r}", 1)
            room = f": {room_wanted(self.run)}" if code == EXIT_NO_SPACE else ""
            raise RunFailed(f"{each.name}: {text}{room}", may_resume(self.run, code)) from error
        return False

    def stop(self) -> None:
        """End every thread. A thread in an endless loop outside of Python can't be ended; it is reported."""
        if self._turns:
            for each in self._roles:
                if not each.ended:
                    each.ask_to_end()
            self._turns.end()
            turns.become(None)
            self._join()
            for each in self._roles:
                each.interrupt()
            self._join()
            stuck = [each for each in self._roles if each.thread.is_alive()]
            if busy := [each.name for each in stuck if not each.is_at_prompt()]:
                print(f"{', '.join(busy)}: still running, although asked to end", file=sys.stderr)
            if not stuck:
                self._turns.close()
            self._turns = None
        self._left.close()

    def _join(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for each in self._roles:
            if each.thread.ident and not each.is_at_prompt():
                each.thread.join(max(0.0, deadline - time.monotonic()))


def _code(error: BaseException | None) -> int:
    """The exit code that a process would have."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)
