"""Every key of a config: `areal-like config [PART ...]`, e.g. `learner`, `loss.dg`, `buffer`, `run.steps`.

Without PART: all parts by name. A part is a section (`run`, `buffer`), a kind of component (`loss`), one component
(`loss.dg`, `learner.torch`, your own as `loss.mine:Loss`), or one key. Shown are type, default, range and meaning, read
from the code and from `configs/base.yaml`; nothing is imported. `--markdown FILE` writes all parts (`docs/config.md`).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.markdown import Markdown

from areal_like.config.layers import PRESETS
from areal_like.config.ranges import RANGES
from areal_like.config.registry import COMPONENTS, PARTS, ConfigError, described, key_hint
from areal_like.config.schema import SECTIONS, Config
from areal_like.config.signatures import REQUIRED, Knob, signature
from areal_like.places import CONFIGS

from .console.arguments import command, new_file, refuse
from .console.output import console

_LINE = re.compile(r"(?P<indent> *)(?P<key>[a-z_]+): *(?P<value>\{.*\}|[^#]*?) *(# *(?P<comment>.*))?$")
_MORE = re.compile(r" *# (?P<comment>.*)$")


@dataclass
class Key:
    """One line of the reference. It has no meaning if the part's text explains the key."""

    name: str
    kind: str
    default: str
    range: str = ""
    meaning: str = ""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("config", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="e.g. learner, loss.dg, buffer, run.steps")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write all parts to this file")
    return parser.parse_args(argv)


# ---- what base.yaml says --------------------------------------------------------------------------------------------


def said(text: str) -> dict[str, tuple[str, str]]:
    """Dotted key → (default, meaning) of a yaml text with comments: a comment belongs to its line's key, and so do the
    comment lines directly below."""
    found: dict[str, tuple[str, str]] = {}
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


# ---- parts ----------------------------------------------------------------------------------------------------------


def section(name: str, base: dict[str, tuple[str, str]]) -> str:
    """A section of the config, e.g. `buffer`."""
    keys = []
    for field in dataclasses.fields(SECTIONS[name]):
        default, meaning = base.get(f"{name}.{field.name}", ("", ""))
        keys.append(Key(field.name, str(field.type), default, RANGES.get(f"{name}.{field.name}", ""), meaning))
    about = f"{base[name][1]}\n\n" if base[name][1] else ""
    return f"## {name}\n\n{about}{table(keys)}"


def top_keys(base: dict[str, tuple[str, str]]) -> str:
    """The keys that are in no section and name no component."""
    keys = [
        Key(field.name, str(field.type), *_default_and_meaning(field.name, base))
        for field in dataclasses.fields(Config)
        if field.name not in SECTIONS and field.name not in COMPONENTS
    ]
    return f"## top level\n\n{table(keys)}"


def _default_and_meaning(name: str, base: dict[str, tuple[str, str]]) -> tuple[str, str, str]:
    default, meaning = base.get(name, ("", ""))
    return default, RANGES.get(name, ""), meaning


def component(kind: str, name: str) -> str:
    """A component, e.g. `loss`, `dg`. Raises ConfigError."""
    found, text = described(kind, name)
    knobs = table([_key(knob, each) for knob, each in found.knobs.items()]) if found.knobs else "No knobs.\n"
    return f"### {kind}: {name}\n\n{knobs}\n{_as_text(text)}\n"


def _key(name: str, knob: Knob) -> Key:
    kind, limits = _type_and_range(knob.annotation)
    if knob.default is REQUIRED:
        return Key(name, kind, "(must be set)", limits)
    return Key(name, kind, "null" if knob.default is None else str(knob.default), limits)


def _type_and_range(annotation: ast.expr | None) -> tuple[str, str]:
    """`Annotated[float, "(0, 1]"] | None` → ("float | None", "(0, 1]")."""
    if annotation is None:
        return "", ""
    limits = [node.slice.elts[1] for node in ast.walk(annotation) if _is_annotated(node)]  # type: ignore[attr-defined]
    plain = ast.unparse(_Plain().visit(ast.parse(ast.unparse(annotation), mode="eval")))
    return plain, ", ".join(str(ast.literal_eval(each)) for each in limits[:1])


def _is_annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated"


class _Plain(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return node.slice.elts[0] if _is_annotated(node) and isinstance(node.slice, ast.Tuple) else node


def _as_text(docstring: str) -> str:
    """A docstring as Markdown: its indented lines are no code."""
    return "\n".join(line.lstrip() if line.startswith("    ") else line for line in docstring.splitlines())


def table(keys: list[Key]) -> str:
    rows = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    if not any(key.meaning for key in keys):
        rows = ["| key | type | default | range |", "|---|---|---|---|"]
    for key in keys:
        quoted = [f"`{each}`" if each else "" for each in (key.name, key.kind, key.default)]
        cells = [*quoted, key.range]
        cells += [key.meaning] if len(rows[0].split("|")) == 7 else []
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


# ---- choosing -------------------------------------------------------------------------------------------------------


def part(name: str, base: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The Markdown of a part; also for `loss=dg`, as on the command line. Raises ConfigError."""
    name = name.replace("=", ".") if name.partition("=")[0] in (*COMPONENTS, *PRESETS) else name
    kind, _, rest = name.partition(".")
    if name in SECTIONS:
        yield section(name, base)
    elif name in COMPONENTS:
        yield f"## {name}\n\n{base.get(name, ('', ''))[1]}\n"
        yield from (component(name, each) for each in COMPONENTS[name])
        yield from (preset(file) for file in sorted((CONFIGS / name).glob("*.yaml")))
        yield from (_knob_part(path) for path in PARTS if path.startswith(f"{name}."))
    elif name in PRESETS:
        yield f"## {name}\n\n{base[name][1]}\n"
        yield from (preset(file) for file in sorted((CONFIGS / name).glob("*.yaml")))
    elif name in PARTS:
        yield _knob_part(name)
    elif (file := CONFIGS / kind / f"{rest}.yaml").is_file():
        yield preset(file)
        yield from (component(kind, rest) for known in COMPONENTS.get(kind, {}) if known == rest)
    elif name in base:
        default, meaning = base[name]
        yield f"`{name}`: {meaning} (default: `{default}`; range: {RANGES.get(name) or 'any'})"
    elif having := [each for each in COMPONENTS.get(kind, ()) if rest in described(kind, each)[0].knobs]:
        yield from (_one_knob(kind, each, rest) for each in having)
    elif kind in COMPONENTS and rest:
        yield component(kind, rest)
    else:
        known = [*SECTIONS, *COMPONENTS, *base, *(f"{kind}.{each}" for kind in COMPONENTS for each in COMPONENTS[kind])]
        known += [f"{file.parent.name}.{file.stem}" for file in CONFIGS.glob("*/*.yaml")]
        ends = next((each for each in known if each.endswith(f".{name.replace('=', '.')}")), None)
        hint = f" Did you mean {ends!r}?" if ends else key_hint(name.replace("=", "."), known)
        raise ConfigError(f"a config has no part {name!r}.{hint}")


def preset(file: Path) -> str:
    """A choice that is a file, e.g. `algorithm=grpo`: what it sets, and its own description."""
    lines = file.read_text().splitlines()
    about = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return f"### `{file.parent.name}={file.stem}` sets\n\n{about}\n\n```yaml\n{text}\n```\n"


def _one_knob(kind: str, name: str, knob: str) -> str:
    found = described(kind, name)[0].knobs[knob]
    return (
        f"### {kind}.{knob} of {kind}={name}\n\n{table([_key(knob, found)])}\nmore: areal-like config {kind}.{name}\n"
    )


def _knob_part(path: str) -> str:
    module, _, attribute = PARTS[path].partition(":")
    found = signature(module, attribute)
    return f"### {path}\n\n{table([_key(name, knob) for name, knob in found.knobs.items()])}"


def reference() -> str:
    """All parts, as `docs/config.md` has them."""
    base = said((CONFIGS / "base.yaml").read_text())
    head = (
        "# Keys of a config\n\n"
        "Generated by `areal-like config --markdown docs/config.md` from the code and `configs/base.yaml`. "
        "A component is written `{name: NAME, knob: value}`, or by overrides `loss=ppo loss.clip=0.1`.\n"
    )
    parts = [text for name in (*SECTIONS, *COMPONENTS, *PRESETS) for text in part(name, base)]
    return "\n".join([head, top_keys(base), *parts]).rstrip() + "\n"


def overview(base: dict[str, tuple[str, str]]) -> str:
    """All parts by name."""
    alone = [key for key in base if "." not in key and key not in SECTIONS and key not in COMPONENTS]
    lines = [f"keys: {', '.join(alone)}", f"sections: {', '.join(SECTIONS)}"]
    for kind, names in COMPONENTS.items():
        files = [file.stem for file in sorted((CONFIGS / kind).glob("*.yaml")) if file.stem not in names]
        lines.append(f"{kind}: {', '.join(names)}{'; or ' if files else ''}{', '.join(files)}")
    lines += [f"{name}: {', '.join(file.stem for file in sorted((CONFIGS / name).glob('*.yaml')))}" for name in PRESETS]
    return "\n".join([*lines, "more: areal-like config PART, e.g. loss.dg, learner, buffer, run.steps"])


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.markdown:
        args.markdown.write_text(reference())
        return 0
    base, out = said((CONFIGS / "base.yaml").read_text()), console()
    try:
        found = [text for name in args.parts for text in part(name, base)]
    except ConfigError as error:
        refuse(error)
    for text in found:
        out.print(Markdown(text))
    if not args.parts:
        out.print(overview(base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
