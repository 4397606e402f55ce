"""A run as one HTML page: `areal-like report RUN [--out FILE]`.

The page opens from disk, without a network, and takes at most about 10 MB. Write it again during a run to see what is
new. The texts of the model and of the user are in the data alone, as JSON in which no HTML can begin or end; the page's
policy (Content-Security-Policy) lets it load nothing, and run only the scripts that were put in here.
"""

import html
import json
import re
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import UserError

from .console.arguments import command, new_file, refusing

NAME = "report.html"
PARTS = Path(__file__).parent / "reporting"
SCRIPTS = ("dom.js", "charts.js", "samples.js", "page.js")
LIBRARY = Path("package_data") / "plotly.min.js"
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_CLOSING = re.compile(r"</(script)", re.IGNORECASE)  # ends a script element; within strings `<\/` means the same
_HTML_IN_JSON = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(data: dict[str, Any], title: str) -> str:
    """The whole page. Raises UserError if the plotting library is missing."""
    nonce = secrets.token_urlsafe(16)
    scripts = [library(), *((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    safe = (_CLOSING.sub(r"<\\/\1", text) for text in scripts)
    parts = {
        "nonce": nonce,
        "title": html.escape(title),
        "style": (PARTS / "page.css").read_text(encoding="utf-8"),
        "data": as_json(data),
        "scripts": "\n".join(f'<script nonce="{nonce}">{text}</script>' for text in safe),
    }
    template = (PARTS / "page.html").read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: parts[match[1]], template)


def as_json(data: Any) -> str:
    """JSON that is safe in a script element: it contains no `<`, `>` or `&`."""
    try:
        text = msgspec.json.encode(data).decode()  # NaN and infinity become null
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(data)
    return re.sub("[<>&\u2028\u2029]", lambda match: _HTML_IN_JSON[match[0]], text)


def library() -> str:
    """The code of plotly.js, from the Python package, which is not imported."""
    found = find_spec("plotly")
    path = Path(found.origin).parent / LIBRARY if found and found.origin else None
    if path is None or not path.is_file():
        raise UserError("the report needs plotly: pip install plotly")
    return path.read_text(encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = command("report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=new_file, metavar="FILE", help=f"the page (default: RUN/{NAME})")
    args = parser.parse_args(argv)
    from .reporting.contents import contents

    out = args.out or args.run / NAME
    with refusing():
        made = page(contents(args.run), args.run.resolve().name)
        out.write_text(made, encoding="utf-8", errors="replace")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
