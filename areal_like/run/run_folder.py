"""Changes of a run folder by a start: a finished run stays as it is until its successor has made a step.

A resume writes its config and record to `RUN/next/`. With the first train step the learner puts them in the place of
the earlier ones (`note_step`); a start that ends before that leaves the folder's record as it was (`discard`)."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from areal_like.config.registry import ConfigError
from areal_like.config.schema import OWN, Config
from areal_like.run.measures import Evaluation, best_of
from areal_like.run.metrics import Row

NEXT = "next"
CONFIG, RECORD, SUMMARY = "config.yaml", "run.json", "summary.json"
SUBMITTED, PUBLISHED = "submitted.yaml", "published.log"
"""The config that a job of a batch system resumes with."""
KINDS: dict[str, type] = {"data": dict, "steps": int, "evaluations": list, "faults": dict, "ledger": dict}
"""Of what a record or a summary holds."""
RENDEZVOUS = "rendezvous"
"""The run's folder of endpoints; it is there while the run is."""
LOCK = "lock"
"""Held by the process that starts the run, until it ends."""
STEPPED, NOTES = "stepped", "notes"
"""In the rendezvous: this start has made a train step."""


def config_file(run: Path) -> Path:
    """The config that processes of the run read: the one to come where there is one."""
    pending = run / NEXT / CONFIG
    return pending if pending.is_file() else run / CONFIG


def note_step(run: Path) -> None:
    """Record that a train step is made: the folder belongs to this start. Cheap when repeated. The summary goes first,
    so a process killed in between leaves a run that can be resumed; the config goes last."""
    (run / RENDEZVOUS).mkdir(exist_ok=True)
    (run / RENDEZVOUS / STEPPED).touch()
    if not (run / NEXT).is_dir():
        return
    (run / SUMMARY).unlink(missing_ok=True)
    for name in (RECORD, CONFIG):
        with contextlib.suppress(FileNotFoundError):
            (run / NEXT / name).replace(run / name)
    sync(run)
    discard(run)


def note(run: Path, text: str) -> None:
    """Let the run's starter show a line."""
    (run / RENDEZVOUS).mkdir(exist_ok=True)
    with (run / RENDEZVOUS / NOTES).open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def notes_of(run: Path) -> list[str]:
    """The whole lines of `note` since the start."""
    with contextlib.suppress(OSError):
        return (run / RENDEZVOUS / NOTES).read_text(encoding="utf-8").split("\n")[:-1]
    return []


def summary_of(run: Path) -> Row | None:
    """Summary of the run; None until it has ended. Raises ConfigError for a damaged file."""
    return _read(run / SUMMARY)


def data_of(run: Path) -> dict[str, str]:
    """Split → number and digest of its rows, as the run has them; none where it is unknown. Raises ConfigError."""
    return dict(record_of(run).get("data", {}))


def record_of(run: Path) -> Row:
    """The command, commit, start and data of a run; empty without its file. Raises ConfigError."""
    return _read(run / RECORD) or {}


def _read(path: Path) -> Row | None:
    if not path.is_file():
        return None
    try:
        found = dict(json.loads(path.read_bytes()))  # numbers may be infinite
        for name, kind in KINDS.items():
            if not isinstance(found.get(name, kind()), kind):
                raise TypeError(f"{name}: expected {kind.__name__}")
        return found
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it to read the rest of the run") from None


def progress_of(run: Path, meta: Row, steps: int) -> Row:
    """Progress (`meta`) at the checkpoint of `steps`, at a run's end with its time and its last evaluations. Raises
    ConfigError."""
    ended = summary_of(run) or {}
    known: Row = {name: ended[name] for name in ("seconds", "evaluations") if name in ended}
    return {**meta, **known} if ended.get("steps") == steps else meta


def has_stepped(run: Path) -> bool:
    return (run / RENDEZVOUS / STEPPED).exists()


def is_going_on(run: Path) -> bool:
    """Does the run have processes? The rendezvous of a killed run stays; only its buffer's machine can detect that."""
    if not (run / RENDEZVOUS).is_dir():
        return False
    try:
        offered = json.loads((run / RENDEZVOUS / "buffer.json").read_bytes())
    except (OSError, ValueError):
        return _is_held(run / LOCK) or not (run / RENDEZVOUS / STEPPED).exists()  # it starts, or has no buffer
    return offered.get("host") != socket.gethostname() or _lives(offered.get("pid")) or _is_held(run / LOCK)


def _lives(pid: object) -> bool:
    with contextlib.suppress(OSError, TypeError, OverflowError):
        if not Path("/proc/self").exists():  # no Linux
            os.kill(pid, 0)  # type: ignore[arg-type]
            return True
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def _is_held(path: Path) -> bool:
    """Does a run's starter hold it, though its buffer is missing? Ask only then: asking locks others out meanwhile."""
    with contextlib.suppress(FileNotFoundError, PermissionError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def room_wanted(folder: Path) -> str:
    while not folder.is_dir():
        folder = folder.parent
    disk = os.statvfs(folder)
    return f"make room ({disk.f_bavail * disk.f_frsize / 1e6:.1f} MB are free on the disk of {folder})"


def discard(run: Path) -> None:
    shutil.rmtree(run / NEXT, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, text: str) -> None:
    """Replace a file's text, durably: a reader sees the old one or the new one. Raises OSError."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def reason_to_stop(config: Config, steps: int, seconds: float, evaluations: Sequence[Evaluation]) -> str:
    """Why a run ends after `steps` train steps and `seconds`, in words; "" while it continues."""
    run, measure = config.run, config.checkpoint.best or f"{OWN}/reward"
    if steps >= run.steps:
        return f"{run.steps} steps are done"
    if run.max_seconds is not None and seconds >= run.max_seconds:
        return f"{run.max_seconds} seconds have passed"
    if run.early_stop is not None and best_of(evaluations, measure)[1] >= run.early_stop:
        return f"{measure} has not got better in {run.early_stop} evaluations"
    if run.target_reward is None or not evaluations:
        return ""
    reached = evaluations[-1]["reward"] >= run.target_reward
    return f"the held-out reward has reached {run.target_reward}" if reached else ""
