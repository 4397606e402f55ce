"""Cores and number formats, as the system reports them."""

import os
from pathlib import Path

import pytest

from areal_like.machine import cores, has_bfloat16, has_gpu


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


OWN, V2 = "proc/self/cgroup", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({OWN: "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
        ({OWN: "0::/a/b\n", f"{V2}/a/cpu.max": "200000 100000\n"}, 2),
        ({OWN: "0::/a\n", f"{V2}/a/cpu.max": "50000 100000\n"}, 1),
    ],
)
def test_cores_are_those_that_may_be_used(tmp_path: Path, monkeypatch, files: dict[str, str], count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, files)
    assert cores(tmp_path) == count


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f\nbugs: avx512_bf16\n", False),
        ("Features : fp asimd bf16\n", True),
    ],
)
def test_bfloat16_is_a_flag_of_the_processor(tmp_path: Path, text: str, found: bool) -> None:
    write(tmp_path, {"proc/cpuinfo": text})
    assert has_bfloat16(tmp_path) is found


@pytest.mark.parametrize(("allowed", "found"), [("", False), ("-1", False), ("0", True)])
def test_a_gpu_is_a_device_that_this_process_may_use(tmp_path: Path, monkeypatch, allowed: str, found: bool) -> None:
    write(tmp_path, {"dev/nvidia0": ""})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert has_gpu(tmp_path) is found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert has_gpu(tmp_path) and not has_gpu(tmp_path / "dev")
