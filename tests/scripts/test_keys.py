"""`areal-like keys`: its output and exit codes."""

import stat
from pathlib import Path

import pytest

from scripts import keys


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert keys.main([str(folder)]) == 0
    assert f"security.key_folder={folder}" in capsys.readouterr().out
    assert keys.main([str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}/server.key exists")
    assert keys.main([str(folder), "--client", "far"]) == 0
    assert str(folder / "far") in capsys.readouterr().out
    assert stat.S_IMODE((folder / "far" / "client.key_secret").stat().st_mode) == 0o600


def test_no_key_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.main([str(tmp_path / "keys")])
    keys.main([str(tmp_path / "keys"), "--client", "far"])
    said = "".join(capsys.readouterr())
    for path in (tmp_path / "keys").glob("**/*.key*"):
        for line in path.read_text().splitlines():
            if "-key" in line and "=" in line:
                assert line.partition("=")[2].strip(' "') not in said


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert keys.main([str(tmp_path / "file" / "keys")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert keys.main([str(tmp_path), "--client", "x"]) == 2
    assert "holds no server.key" in capsys.readouterr().err
