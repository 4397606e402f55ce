"""Checkpoints of the learner on disk: written to a temporary folder, then renamed, so each one is whole or absent.

`RUN/checkpoints/step-N/` holds the learner's own files and `meta.json`; N counts train steps: it contains batches
0..N−1."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_like.run.run_folder import sync

META = "meta.json"
FULL_BYTES = 1 << 20
"""Bytes: with less free space than this, the disk counts as full."""


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def latest(run: Path, up_to: float = math.inf) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint of a step that is at most `up_to`, if there is one."""
    found = sorted(path.parent for path in (run / "checkpoints").glob(f"step-*/{META}"))
    steps = [(int(folder.name.removeprefix("step-")), folder) for folder in found]
    return next((each for each in reversed(steps) if each[0] <= up_to), None)


def is_due(steps: int, every: int, interval: int) -> bool:
    """Is a checkpoint due after `steps` train steps? Every `every` steps (0: never), moved to the next step whose
    weights are published (every `interval` steps): only those can be resumed from."""
    return every > 0 and steps % interval == 0 and steps // every > (steps - interval) // every


def meta(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / META).read_text())
    return found


def write(run: Path, step: int, fill: Callable[[Path], None], meta: Mapping[str, object], keep: int) -> Path:
    """Make a durable checkpoint of the files that `fill` writes into a folder, then delete all but the newest `keep`.
    Does nothing if a complete checkpoint of this step exists. Raises OSError, before it deletes."""
    target = folder_of(run, step)
    if (target / META).exists():
        return target
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with _full_disk_is_named(beside):
            fill(beside)
        (beside / META).write_text(json.dumps(meta))
        for path in [*beside.rglob("*"), beside]:
            sync(path)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for old in sorted(target.parent.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return target


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
