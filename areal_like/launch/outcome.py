"""Ends of roles and runs: exceptions for the starter, exit codes in words, and the last lines of logs."""

import signal
from dataclasses import dataclass
from pathlib import Path

from areal_like.run import process
from areal_like.run.run_folder import has_stepped, room_wanted

TAIL_BYTES, TAIL_LINES = 1 << 14, 5
"""Bytes at the end of a role's log to search for its error, and lines of it to show."""
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM}
"""Signals that come from outside: a death by them is no evidence against the actor. SIGALRM ends one that was asked to
end and was too busy for it (`areal_like.run.process.end_within`)."""


def nothing() -> None:
    """Nothing to check."""


class RunFailed(RuntimeError):
    """The run cannot continue. The text has the process, its end, its output. `resumable`: could a resume help?"""

    def __init__(self, text: str, resumable: bool = True):
        super().__init__(text)
        self.resumable = resumable


class RunStopped(RuntimeError):
    """The run ended early and can be resumed. `paused`: by a signal to the learner or the loss of its node."""

    def __init__(self, text: str, paused: bool):
        super().__init__(text)
        self.paused = paused


@dataclass(frozen=True, slots=True)
class Death:
    """An actor's process that failed. `pid`: 0 if unknown here; `count`: how often this happened; `again_in`: seconds
    until its restart (None: it is left out); `by_itself`: nothing outside killed it."""

    name: str
    pid: int
    how: str
    count: int
    again_in: float | None = 0.0
    error: str = ""
    by_itself: bool = False

    def __str__(self) -> str:
        text = f"{self.name} {self.how}{f' ({self.error})' if self.error else ''}"
        if self.again_in is None:
            return f"{text}: left out, after {self.count} deaths"
        delay = f" in {self.again_in:.0f} s" if self.again_in else ""
        return f"{text}: started again{delay} (restart {self.count})"


def has_ended_well(name: str, code: int) -> bool:
    """Is the run finished, now that this role has ended? Raises RunStopped."""
    if name == "buffer" and code == process.EXIT_STOPPED:
        raise RunStopped("stopped without the learner; a resume continues from the last checkpoint", paused=False)
    if name == "learner" and code in (process.EXIT_PAUSED, process.EXIT_STOPPED):
        paused = code == process.EXIT_PAUSED
        raise RunStopped(f"{'paused' if paused else 'stopped'} at a checkpoint", paused)
    return name == "learner" and code == 0


def may_resume(run: Path, code: int) -> bool:
    """An error before the first train step would happen again."""
    own_error = 0 < code < 128 and code != process.EXIT_NO_SPACE
    return code != process.EXIT_USER_ERROR and (not own_error or has_stepped(run))


def in_words(code: int) -> str:
    if code == process.EXIT_TERMINATED:
        return "was ended by SIGTERM"
    if code == process.EXIT_NODE_FAILED:
        return "was lost with its node"
    if number := _signal_of(code):
        return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
    return f"ended with exit code {code}"


def _signal_of(code: int) -> int:
    """The number of the signal that ended a process, as subprocess, a shell or srun reports it; 0: none."""
    return -code if code < 0 else code - 128 if 128 < code < process.EXIT_NODE_FAILED else 0


def is_from_outside(code: int) -> bool:
    return code in (process.EXIT_NODE_FAILED, process.EXIT_NO_SPACE) or _signal_of(code) in _FROM_OUTSIDE


class LastWords:
    """The last lines of roles' logs: of all starts (`NAME.log`) or, `on_nodes`, of the newest one (`NAME.NODE.log`)."""

    def __init__(self, run: Path, on_nodes: bool):
        self._run, self._on_nodes = run, on_nodes
        self._begins: dict[Path, int] = {}  # bytes of a log from before the role's last start

    def begin(self, name: str) -> None:
        log = self._run / "logs" / f"{name}.log"
        self._begins[log] = log.stat().st_size if log.exists() else 0

    def of(self, name: str, code: int, restarts: int) -> tuple[str, str]:
        """The role's death in one line, or with the end of its log if it reported no error; and that error."""
        if not self._run.is_dir():
            return f"the run folder {self._run} is gone: was it removed? ({name} {in_words(code)})", ""
        again = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        path, lines = self._tail(name)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        error = errors[-1] if errors else ""
        if code == process.EXIT_NO_SPACE:
            return f"{name}{again}: {error or 'No space left on device'}: {room_wanted(self._run)}", error
        if error and code > 0:
            return f"{name}{again}: {error} (its log: {path})", error
        last = "which ends with\n" + "\n".join(f"  {line}" for line in lines) if lines else "which is empty"
        return f"{name} {in_words(code)}{again}; its log is {path}, {last}", error

    def _tail(self, name: str) -> tuple[Path, list[str]]:
        logs = self._run / "logs"
        found = [*logs.glob(f"{name}.*.log")] if self._on_nodes else []
        path = max(found, key=lambda path: path.stat().st_mtime, default=logs / f"{name}.log")
        if not path.exists():
            return path, []
        with path.open("rb") as file:
            file.seek(max(self._begins.get(path, 0), path.stat().st_size - TAIL_BYTES))
            return path, file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
