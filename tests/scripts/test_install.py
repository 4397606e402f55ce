"""`scripts/install.sh`: torch is pip's, uv receives pip's configuration, and pip installs what uv can't."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = r"""#!/bin/sh
case "$*" in
    *"config list") printf "%s\n" ":env:.find-links='/w /x'" "global.find-links='/y'" "global.index-url='http://i'" ;;
    *) echo "pip: $*" ;;
esac
"""
UV = """#!/bin/sh
echo "uv: $* links=$UV_FIND_LINKS index=$UV_DEFAULT_INDEX"
exit %d
"""


@pytest.mark.parametrize("code", [0, 2])
def test_pip_installs_what_uv_can_not(tmp_path: Path, code: int) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python", PIP), ("uv", UV % code)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    unset = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    command = ["bash", str(ROOT / "scripts" / "install.sh"), str(tmp_path), "-c", "bounds.txt", "some package"]
    done = subprocess.run(command, env=unset, capture_output=True, text=True, timeout=60, check=True)
    torch, *said = done.stdout.splitlines()
    assert torch.startswith("pip: ") and "install --quiet torch==" in torch
    assert said[0].startswith("uv: pip install ") and "bounds.txt some package links=/w,/x index=http://i" in said[0]
    assert [line.startswith("pip: ") and line.endswith(" -c bounds.txt some package") for line in said[1:]] == [
        True
    ] * bool(code)
