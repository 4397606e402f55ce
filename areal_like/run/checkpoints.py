"""Checkpoints of the learner on disk: written to a temporary folder, then renamed, so each one is whole or absent.

`RUN/checkpoints/step-N/` holds the learner's own files and `meta.json`: the `progress`, and the digest of each file. N
counts train steps: the checkpoint contains batches 0..N−1. `RUN/checkpoints/best` is a link to a copy, `best-N`, of the
one that a held-out measure ranks highest; it takes no more disk while the other is there."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from areal_like.errors import UserError
from areal_like.run.measures import Evaluation, best_of, measured
from areal_like.run.run_folder import sync
from areal_like.run.run_folder import write as write_file

META, BEST, FIGURE = "meta.json", "best", "best.json"
Fill = Callable[[Path], None]
"""Writes a checkpoint's files into a folder."""
Saving = contextlib.AbstractContextManager[Fill]
"""Entered at the time of a state; its value then writes that state into a folder."""
READ_BYTES = 1 << 24
LAST_WRITE_SECONDS = 60.0
"""Time, after an error of the run, for the end of a write under way."""
FULL_BYTES = 1 << 20
"""Bytes: with less free space than this, the disk counts as full."""


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def latest(run: Path, up_to: float = math.inf) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint of a step that is at most `up_to`, if there is one."""
    steps = [each for each in _folders(run / "checkpoints") if (each[1] / META).exists()]
    return next((each for each in reversed(steps) if each[0] <= up_to), None)


def _folders(place: Path) -> list[tuple[int, Path]]:
    """(step, folder) of checkpoints; a folder with another name is none."""
    named = [(folder.name.removeprefix("step-"), folder) for folder in place.glob("step-*")]
    return sorted((int(step), folder) for step, folder in named if step.isascii() and step.isdecimal())


def steps_done(run: Path) -> int:
    """Train steps of the newest whole checkpoint."""
    found = latest(run)
    return found[0] if found else 0


def is_due(steps: int, every: int, interval: int) -> bool:
    """Is a checkpoint due after `steps` train steps? Every `every` steps (0: never), moved to the next step whose
    weights are published (every `interval` steps): only those can be resumed from."""
    return every > 0 and steps % interval == 0 and steps // every > (steps - interval) // every


class Damaged(UserError):
    """A file of a checkpoint is not the one that was written."""

    def __init__(self, folder: Path, name: str):
        whole = latest(folder.parents[1], up_to=int(folder.name.rpartition("-")[2]) - 1)
        rest = f"from {whole[1].name}" if whole else "from the start"
        super().__init__(f"{folder / name} is damaged: remove {folder}, and the run resumes {rest}")


def progress(folder: Path) -> dict[str, Any]:
    """The progress at a checkpoint. Raises Damaged."""
    return dict(_meta(folder)["progress"])


def check(folder: Path) -> None:
    """Compare all files of a checkpoint with their digests. Raises Damaged."""
    for name, digest in _meta(folder)["files"].items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise Damaged(folder, name)


def _meta(folder: Path) -> dict[str, Any]:
    try:
        digest, text = (folder / META).read_bytes().split(b"\n")
        if digest != xxhash.xxh3_128_hexdigest(text).encode():
            raise ValueError
        return dict(json.loads(text))
    except ValueError:
        raise Damaged(folder, META) from None


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def is_whole(run: Path, step: int) -> bool:
    """Is there a complete checkpoint of this step?"""
    return (folder_of(run, step) / META).exists()


def best(run: Path) -> Path | None:
    """The folder of the best checkpoint."""
    link = run / "checkpoints" / BEST
    return link.resolve() if (link / META).is_file() else None


def evaluated(evaluations: Sequence[Evaluation], measure: str | None, interval: int) -> float:
    """The step after which checkpoints may still become the best one, by a measure (None: of none)."""
    return interval * max((each["version"] for each in evaluations), default=0) if measure else math.inf


def keep_best(run: Path, evaluations: Sequence[Evaluation], measure: str, interval: int) -> None:
    """Keep the checkpoint of the best evaluation, if it is written, and better than the one kept. `interval`: train
    steps per version."""
    evaluation, _ = best_of(evaluations, measure)
    value = measured(evaluation, measure) if evaluation else None
    if evaluation is None or value is None or not is_whole(run, step := evaluation["version"] * interval):
        return
    link = run / "checkpoints" / BEST
    known = json.loads((link / FIGURE).read_bytes()) if (link / FIGURE).is_file() else {}
    if known.get("measure") == measure and known["value"] >= value:
        return
    name = f"{BEST}-{step:08d}"
    folder = link.with_name(f"{name}-again" if link.resolve().name == name else name)
    copy, beside = link.with_name(f".{name}.tmp"), link.with_name(f".{BEST}.tmp")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder_of(run, step), copy, copy_function=_linked)
    write_file(copy / FIGURE, json.dumps({"measure": measure, "value": value, "step": step}))
    shutil.rmtree(folder, ignore_errors=True)
    copy.rename(folder)
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    beside.replace(link)
    sync(link.parent)
    _remove_other_bests(link)


def _remove_other_bests(link: Path) -> None:
    """Remove the copies that are not, or no more, the best checkpoint."""
    for copy in link.parent.glob(f"{BEST}-*") if link.is_symlink() else ():
        if copy.name != link.readlink().name:
            shutil.rmtree(copy)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def write(
    run: Path, step: int, fill: Fill, progress: Mapping[str, object], keep: int, spared: float = math.inf
) -> Path:
    """Make a durable checkpoint of the files that `fill` writes into a folder, then delete all but the newest `keep`
    and those of steps after `spared`. Raises OSError, before it deletes."""
    target = folder_of(run, step)
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with _full_disk_is_named(beside):
            fill(beside)
        files = {path.relative_to(beside).as_posix(): _digest(path) for path in beside.rglob("*") if path.is_file()}
        text = json.dumps({"progress": progress, "files": files}).encode()
        (beside / META).write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
        for path in [*beside.rglob("*"), beside]:
            sync(path)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for at, old in _folders(target.parent)[:-keep]:
        if at <= spared:
            shutil.rmtree(old)
    return target


def in_thread(saving: Saving, work: Callable[[Fill], None]) -> threading.Thread:
    """Enter `saving` here. A thread does `work` with its value, and then leaves it."""
    entered = contextlib.ExitStack()
    fill = entered.enter_context(saving)

    def run() -> None:
        with entered:
            work(fill)

    thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    thread.start()
    return thread


class CheckpointWriter:
    """Writes checkpoints of a run beside it, one at a time: in a thread. The methods raise an error of the thread. It
    removes all that a process left half written."""

    def __init__(self, run: Path, keep: int):
        for left in (run / "checkpoints").glob(".*.tmp"):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        _remove_other_bests(run / "checkpoints" / BEST)
        self._run, self._keep, self._step = run, keep, 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, step: int, saving: Saving, progress: Mapping[str, object], spared: float = math.inf) -> None:
        """Enter `saving`, and let the thread make a checkpoint, as `write` does. None may be under way."""

        def work(fill: Fill) -> None:
            try:
                write(self._run, step, fill, progress, self._keep, spared)
            except BaseException as error:
                self._error = error

        self._step, self._thread = step, in_thread(saving, work)

    def written(self, wait: bool) -> int | None:
        """The step of a checkpoint that has become durable since the last call; None: of none. `wait` for the end of a
        write under way."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        if self._error:
            raise self._error
        return self._step

    def close(self) -> None:
        """Give a write under way some time."""
        if self._thread:
            self._thread.join(LAST_WRITE_SECONDS)


@contextlib.contextmanager
def _full_disk_is_named(folder: Path) -> Iterator[None]:
    """Raise OSError if the disk is full: libraries that write tensors only report that writing failed."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if shutil.disk_usage(folder).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise
