"""For mkdocs: pages for README, CONTRIBUTING, CHANGELOG and all keys of a config; links to code become names.

`python docs/hooks.py` prints the words of each page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
KEYS = """# Keys of a config

Generated from the code and `configs/base.yaml`; `areal-like config PART` shows a part of it in the terminal.
A component is written `{name: NAME, knob: value}`, or by overrides `loss=ppo loss.clip=0.1`.

"""


def words() -> dict[str, int]:
    """Page → its words; without decisions and the generated keys."""
    pages = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / name for name in ("dev-log.md", "config.md")})
    return {page.stem: len(page.read_text(encoding="utf-8").split()) for page in pages}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    from scripts.config import reference

    for name, page in (("README.md", "index.md"), ("CONTRIBUTING.md",) * 2, ("CHANGELOG.md",) * 2):
        text = re.sub(r"(\]\()docs/", r"\1", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "config.md", content=KEYS + reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """`../learners/x.py` and, from the README, `learners/x.py` are named, not linked: a site has no such pages."""
    markdown = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), markdown)  # as GitHub shows it in tables
    markdown = markdown.replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md").replace(
        "[examples/](examples/README.md)", "`examples/`"
    )
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|(?=[\w]+/))[\w./-]+\.(?:py|yaml|sh)[^)]*\)", r"\1", markdown)


if __name__ == "__main__":
    found = words()
    for page, count in {**found, "all": sum(found.values())}.items():
        print(f"{count:7,} {page}")
