"""Draw plots again from their data, running nothing: `python -m scripts.plots [FOLDER | FILE ...] [--out FOLDER]`.

Each JSON file that a study, a claim or a bench has written beside its picture (`scripts.plotting.plot`) becomes that
picture. Without arguments: the data of the published plots, `docs/data`, into `docs/plots`. To publish a plot, copy its
JSON there under the picture's name; to change its title or note, edit the JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from areal_like.places import REPOSITORY

from .console.arguments import command, refuse

DATA, PICTURES = REPOSITORY / "docs" / "data", REPOSITORY / "docs" / "plots"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("plots", __doc__)
    parser.add_argument("data", type=Path, nargs="*", help="files, or folders of them (default: docs/data)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the pictures go (default: beside the data)")
    return parser.parse_args(argv)


def files(paths: Iterable[Path]) -> list[Path]:
    """Raises ValueError for a folder without any."""
    found = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: no data of plots (*.json)")
        found += inside
    return found


def redraw(data: Path, out: Path) -> Path:
    """Raises ValueError, OSError."""
    from .plotting import drawing, plot

    path = out / f"{data.stem}.png"
    drawing.picture(plot.read(data), path)
    return path


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    out = args.out if args.out or args.data else PICTURES
    try:
        for data in files(args.data or [DATA]):
            print(redraw(data, out or data.parent))
    except (ValueError, OSError) as error:
        refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
