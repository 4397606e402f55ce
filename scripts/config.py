"""Every key of a config: `areal-like config [PART ...]`, e.g. `learner`, `loss.dg`, `buffer`, `run.steps`.

A part is a section, a kind of component (`loss`), one component (`loss.dg`, your own as `loss.mine:Loss`), or one key.
Type, default, range and meaning are read from the code and from `configs/base.yaml`; nothing is imported.
The documentation's site has a page of all parts (`docs/hooks.py`).
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from areal_like.config.annotations import type_and_range
from areal_like.config.layers import PRESETS
from areal_like.config.registry import COMPONENTS, PARTS, ConfigError, described, key_hint
from areal_like.config.schema import RANGES, SECTIONS, Config
from areal_like.config.signatures import REQUIRED, Knob, signature
from areal_like.places import CONFIGS

from .console.arguments import command, refusing
from .console.output import console

_LINE = re.compile(r"(?P<indent> *)(?P<key>[a-z_]+): *(?P<value>\{[^#]*\}|[^#]*?) *(# *(?P<comment>.*))?$")
_MORE = re.compile(r" *# (?P<comment>.*)$")
Base = dict[str, tuple[str, str]]
"""Dotted key → (default, meaning) of `configs/base.yaml`."""
Row = tuple[str, str, str, str, str]
"""Name, type, default, range and meaning of a key; no meaning if the part's text explains it."""


def said(text: str) -> Base:
    """Dotted key → (default, meaning) of a yaml text: its line's comment, and the comment lines directly below."""
    found: Base = {}
    section = key = ""
    for line in text.splitlines():
        if match := _LINE.match(line):
            section = section if match["indent"] else match["key"]
            key = f"{section}.{match['key']}" if match["indent"] else section
            found[key] = match["value"], match["comment"] or ""
        elif (more := _MORE.match(line)) and line[:1] == " " and key:
            default, meaning = found[key]
            found[key] = default, f"{meaning} {more['comment']}"
        else:
            key = ""
    return found


def of_fields(title: str, fields: Iterable[dataclasses.Field[Any]], base: Base, prefix: str = "") -> str:
    """A section of the config, or the keys at its top."""
    rows = []
    for each in fields:
        kind, limits = type_and_range(str(each.type))
        default, meaning = base.get(f"{prefix}{each.name}", ("", ""))
        rows.append((each.name, kind, default, limits, meaning))
    return "\n\n".join(filter(None, [f"## {title}", base.get(title, ("", ""))[1], table(rows)]))


def component(kind: str, name: str, seen: dict[Row | str, str] | None = None) -> str:
    """A component, e.g. `loss`, `dg`. A row or paragraph in `seen` is that of the first component that has it, which is
    named for it. Raises ConfigError."""
    found, seen, owners = described(kind, name), {} if seen is None else seen, dict[str, list[Row]]()
    for row in rows_of(found.knobs):
        owners.setdefault(seen.setdefault(row, name), []).append(row)
    own = owners.pop(name, [])
    shared = [f"As {other}: {', '.join(f'`{row[0]}`' for row in rows)}.\n" for other, rows in owners.items()]
    paragraphs = re.sub(r"^ {4,}", "", found.docstring, flags=re.MULTILINE).split("\n\n")  # no code
    new = [each for each in paragraphs if seen.setdefault(each, name) == name]
    text = "\n\n".join(new or [f"See {seen[paragraphs[0]]}."])
    return "\n".join([f"### {kind}: {name}\n", *([table(own)] if own or not shared else []), *shared, f"{text}\n"])


def rows_of(knobs: Mapping[str, Knob]) -> list[Row]:
    rows = []
    for name, knob in knobs.items():
        default = "(must be set)" if knob.default is REQUIRED else "null" if knob.default is None else str(knob.default)
        kind, limits = type_and_range(ast.unparse(knob.annotation)) if knob.annotation else ("", "")
        rows.append((name, kind, default, limits, ""))
    return rows


def table(rows: Sequence[Row]) -> str:
    if not rows:
        return "No knobs.\n"
    columns = 5 if any(row[4] for row in rows) else 4
    head = ("key", "type", "default", "range", "meaning")[:columns]
    lines = [f"| {' | '.join(head)} |", "|---" * columns + "|"]
    for row in rows:
        quoted = [f"`{each}`" if each else "" for each in row[:3]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*quoted, *row[3:columns])) + " |")
    return "\n".join(lines) + "\n"


def part(name: str, base: Base) -> Iterator[str]:
    """The Markdown of a part; also for `loss=dg`, as on the command line. Raises ConfigError."""
    name = name.replace("=", ".") if name.partition("=")[0] in (*COMPONENTS, *PRESETS) else name
    kind, _, rest = name.partition(".")
    if name in SECTIONS:
        yield of_fields(name, dataclasses.fields(SECTIONS[name]), base, f"{name}.")
    elif name in COMPONENTS or name in PRESETS:
        yield f"## {name}\n\n{base.get(name, ('', ''))[1]}\n"
        seen: dict[Row | str, str] = {}
        yield from (component(name, each, seen) for each in COMPONENTS.get(name, ()))
        yield preset_table(sorted((CONFIGS / name).glob("*.yaml")))
        yield from (_knob_part(path) for path in PARTS if path.startswith(f"{name}."))
    elif name in PARTS:
        yield _knob_part(name)
    elif (file := CONFIGS / kind / f"{rest}.yaml").is_file():
        yield preset_table([file])
        yield from (component(kind, rest) for known in COMPONENTS.get(kind, {}) if known == rest)
    elif name in base:
        default, meaning = base[name]
        yield f"`{name}`: {meaning} (default: `{default}`; range: {RANGES.get(name) or 'any'})"
    elif having := {each: described(kind, each).knobs for each in COMPONENTS.get(kind, ())}:
        found = {each: knobs[rest] for each, knobs in having.items() if rest in knobs}
        for each, knob in found.items():
            rows = table(rows_of({rest: knob}))
            yield f"### {name} of {kind}={each}\n\n{rows}\nmore: areal-like config {kind}.{each}\n"
        if not found:
            yield component(kind, rest)
    else:
        parts = [(kind, each) for kind in COMPONENTS for each in COMPONENTS[kind]]
        known = [*SECTIONS, *COMPONENTS, *base, *(f"{kind}.{each}" for kind, each in parts)]
        known += [f"{file.parent.name}.{file.stem}" for file in CONFIGS.glob("*/*.yaml")]
        known += [f"{kind}.{knob}" for kind, each in parts for knob in described(kind, each).knobs]
        ends = next((each for each in known if each.endswith(f".{name.replace('=', '.')}")), None)
        hint = f" Did you mean {ends!r}?" if ends else key_hint(name.replace("=", "."), known)
        raise ConfigError(f"a config has no part {name!r}.{hint}")


def preset_table(files: Sequence[Path]) -> str:
    """Choices that are files, e.g. `algorithm=grpo`: what each sets, and its own description."""
    rows = ""
    for file in files:
        text = file.read_text(encoding="utf-8")
        about = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        sets = " ".join(f"{key}={value}" for key, (value, _) in said(text).items() if value)
        rows += f"| `{file.parent.name}={file.stem}` | `{sets}` | {about} |\n"
    return f"| choice | sets | |\n|---|---|---|\n{rows}" if rows else ""


def _knob_part(path: str) -> str:
    return f"### {path}\n\n{table(rows_of(signature(PARTS[path]).knobs))}"


def top_keys() -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(Config) if each.name not in {*SECTIONS, *COMPONENTS}]


def reference() -> str:
    """All parts, each text once."""
    base = said((CONFIGS / "base.yaml").read_text(encoding="utf-8"))
    parts = [text for name in (*SECTIONS, *COMPONENTS, *PRESETS) for text in part(name, base)]
    return "\n".join([of_fields("top level", top_keys(), base), *parts]).rstrip() + "\n"


def overview() -> str:
    lines = [f"keys: {', '.join(each.name for each in top_keys())}", f"sections: {', '.join(SECTIONS)}"]
    for kind in (*COMPONENTS, *PRESETS):
        names = dict.fromkeys(
            [*COMPONENTS.get(kind, ()), *sorted(file.stem for file in (CONFIGS / kind).glob("*.yaml"))]
        )
        lines.append(f"{kind}: {', '.join(names)}")
    return "\n".join([*lines, "more: areal-like config PART, e.g. loss.dg, learner, buffer, run.steps"])


def main(argv: list[str] | None = None) -> int:
    parser = command("config", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="e.g. learner, loss.dg, run.steps (default: overview)")
    args = parser.parse_args(argv)
    base, out = said((CONFIGS / "base.yaml").read_text(encoding="utf-8")), console()
    with refusing():
        found = [text for name in args.parts for text in part(name, base)]
    for text in found:
        out.print(Markdown(text))
    if not args.parts:
        out.print(overview())
    return 0


if __name__ == "__main__":
    sys.exit(main())
