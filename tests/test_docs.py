"""The documentation as a site: it builds, its links resolve, and it loads nothing from a network."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "config.md"})
CODE = r"`((?:areal_like|actors|buffer|learners|scripts|tests|examples|configs)/[\w/.-]+\.\w+)`"
LOADED = re.compile(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]+"|<link[^>]*href="https?://[^"]+"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_and_the_pages_are_few_and_short(site: Path) -> None:
    words = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["words"]()
    assert not {name for name in words.keys() | {"config"} if not (site / name / "index.html").is_file()}
    assert "areal_like" in (site / "index.html").read_text()
    assert len(words) == 12 and sum(words.values()) <= 25_000 and max(words.values()) <= 4_800, words


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = LOADED.findall(page.read_text())
        assert not [each for each in loaded if 'rel="canonical"' not in each], page


def test_pictures_are_there() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_each_picture_is_drawn_by_one_file_or_has_its_command_there() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "plots" / "draw.py"))
    by_command = set(re.findall(r"^  (\S+\.png) +(?:python|areal-like) ", drawing["__doc__"], re.MULTILINE))
    shown = {
        png for page in [*PAGES, ROOT / "README.md"] for png in re.findall(r"plots/([\w-]+\.png)", page.read_text())
    }
    assert (
        shown == {*drawing["PICTURES"]} | by_command == {path.name for path in (ROOT / "docs" / "plots").glob("*.png")}
    )


def test_files_name_pages_and_pages_name_files_that_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.yaml", "*.sh", "*.md"], cwd=ROOT, capture_output=True, text=True
    )
    files = listed.stdout.split()
    named = {page for path in files for page in re.findall(r"docs/[a-z-]+\.md", (ROOT / path).read_text())}
    assert len(named) > 5
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        named |= {*re.findall(CODE, page.read_text())}
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]


def test_figures_in_the_readme_are_those_of_the_results() -> None:
    measured = (ROOT / "README.md").read_text().partition("## Measurements")[2].partition("\n\n[")[0]
    figures = re.findall(r"\d[\d.,]*\d|\d", " ".join(row.split("|")[2] for row in measured.splitlines()[4:]))
    results = re.findall(r"\d[\d.,]*\d|\d", (ROOT / "docs" / "results.md").read_text())
    assert len(figures) > 15 and sorted(set(figures) - set(results)) == []
