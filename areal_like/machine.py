"""Resources of this machine: cores, whether they compute in bfloat16, a GPU. Asks the system, not torch."""

import os
from pathlib import Path

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags in /proc/cpuinfo of processors that multiply matrices in bfloat16 faster than in float32 (x86; Arm)."""


def cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may run on and that its control group lets it keep busy; at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Whole cores that control groups (version 2) allow: this process's group and those above it."""
    groups, found = [Path()], []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            own = Path(path.lstrip("/"))
            groups += [own, *own.parents]
    for group in dict.fromkeys(groups):
        match _read(root / "sys/fs/cgroup" / group / "cpu.max").split():
            case [quota, period] if quota != "max":
                found.append(int(quota) // int(period))
    return found


def has_bfloat16(root: Path = Path("/")) -> bool:
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
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
