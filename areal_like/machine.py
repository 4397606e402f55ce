"""Resources of this machine: cores, whether they compute in bfloat16, a GPU. Asks the system, not torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags in /proc/cpuinfo of processors that multiply matrices in bfloat16 faster than in float32 (x86; Arm)."""


def cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may run on and that its control group lets it keep busy; at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Cores that control groups allow (version 2, then 1), whole ones: of this process's group and those above it."""
    groups, found = [Path()], []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            own = Path(path.lstrip("/"))
            groups += [own, *own.parents]
    for group in dict.fromkeys(groups):
        quota = _read(root / "sys/fs/cgroup" / group / "cpu.max").split()
        old = root / "sys/fs/cgroup/cpu" / group
        quota = quota or [_read(old / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if all(re.fullmatch("[1-9][0-9]*", each) for each in quota):  # "max", "-1": no limit
            found.append(int(quota[0]) // int(quota[1]))
    return found


def has_bfloat16(root: Path = Path("/")) -> bool:
    """Whether matrices are multiplied faster in bfloat16 than in float32 here."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not BFLOAT16.isdisjoint(flags.split())
    return False


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA GPU is here that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return allowed not in ("", "-1") and any((root / "dev").glob("nvidia[0-9]*"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
