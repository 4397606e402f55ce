"""Resources of this machine: cores, whether they compute in bfloat16, memory, a GPU. Asks the system, not torch."""

import os
from pathlib import Path

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags in /proc/cpuinfo of processors that multiply matrices in bfloat16 faster than in float32 (x86; Arm)."""


def cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may run on and that its control group lets it keep busy; at least 1."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Whole cores that control groups allow."""
    found = []
    for group in _groups(root):
        match _read(group / "cpu.max").split():
            case [quota, period] if quota != "max":
                found.append(int(quota) // int(period))
    return found


def _groups(root: Path) -> list[Path]:
    """Control groups (version 2): this process's group and those above it."""
    groups = [Path()]
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            own = Path(path.lstrip("/"))
            groups += [own, *own.parents]
    return [root / "sys/fs/cgroup" / group for group in dict.fromkeys(groups)]


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process can still take, from the machine and from its control groups."""
    left = [1024 * _numbers(root / "proc/meminfo").get("MemAvailable:", 0)]
    for group in _groups(root):
        limit, used = _read(group / "memory.max").strip(), _numbers(group / "memory.stat")
        if limit.isdigit():
            left.append(int(limit) - used.get("anon", 0) - used.get("shmem", 0))  # cached files give way
    return max(0, min(left))


def _numbers(path: Path) -> dict[str, int]:
    """Of a file with a name and a number in each line."""
    return {name: int(number) for name, number, *_ in map(str.split, _read(path).splitlines()) if number.isdigit()}


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
