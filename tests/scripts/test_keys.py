"""`areal-like keys`: its output and exit codes."""

from pathlib import Path

import pytest

from scripts import keys


def test_keys_are_made_once_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert keys.main([str(folder)]) == keys.main([str(folder), "--client", "far"]) == 0
    assert (folder / "far" / "client.key_secret").stat().st_mode & 0o777 == 0o600
    for wrong in ([str(folder)], [str(tmp_path / "none"), "--client", "x"]):
        with pytest.raises(SystemExit, match="2"):
            keys.main(wrong)
    said = "".join(capsys.readouterr())
    assert f"security.key_folder={folder}" in said and str(folder / "far") in said
    for line in (line for path in folder.glob("**/*.key*") for line in path.read_text().splitlines()):
        if "-key" in line and "=" in line:
            assert line.partition("=")[2].strip(' "') not in said
