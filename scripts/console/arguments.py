"""Checks arguments of commands before any work: a refusal is one sentence and exit code 2."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

EXIT_INTERRUPTED = 130
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


def command(name: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m scripts.NAME`. The first line of a docstring describes the command."""
    assert description
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no UTF-8 terminal, or an incomplete character
    description = as_called(description.splitlines()[0])
    return argparse.ArgumentParser(prog=called(name), description=description, epilog=epilog and as_called(epilog))


def called(name: str) -> str:
    """How the user calls the command NAME."""
    return sys.argv[0] if sys.argv[0].startswith("areal-like ") else f"python -m scripts.{name}"


def other(name: str) -> str:
    """How the user calls another command, in the same way as this one."""
    return f"areal-like {name}" if sys.argv[0].startswith("areal-like ") else f"python -m scripts.{name}"


def as_called(text: str) -> str:
    """A text whose commands (`python -m scripts.NAME`) are written as the user calls this one."""
    return re.sub(r"python -m scripts\.(\w+)", lambda found: other(found[1]), text)


def new_file(text: str) -> Path:
    """A file that can be written. Raises argparse.ArgumentTypeError."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    written = path if path.exists() else path.parent
    if not os.access(written, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {written} is read-only for you; name another file")
    return path


def json_file(text: str) -> Path:
    """A file that can be written, or `-` for standard output. Raises argparse.ArgumentTypeError."""
    return Path(text) if text == "-" else new_file(text)


def positive(text: str) -> int:
    """Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 1")
    return int(text)


def number(text: str) -> float:
    """Not a number for what is none: comparisons with it are false."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def share(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    if not 0 < (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0, 1 at most")
    return value


def factor(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    if not 1 <= (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number of at least 1")
    return value


def amount(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    if not 0 <= (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number of at least 0")
    return value


def limit(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    if not (value := number(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a number of at least 0, or inf")
    return value


def bound(text: str) -> float:
    """Of the staleness. Raises argparse.ArgumentTypeError."""
    if not ((value := number(text)) >= 0 and (math.isinf(value) or value.is_integer())):
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 0, or inf")
    return value


def port(text: str) -> int:
    """Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: a port is a number from 0 (any free one) to 65535")
    return int(text)


def picture(text: str) -> Path:
    """A file that matplotlib can draw into. Raises argparse.ArgumentTypeError."""
    path = new_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture ends in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib")
    return path


def interrupted(kept: str) -> int:
    """Say that Ctrl-C has ended the command, and what is kept. Returns the exit code."""
    print(f"ended by SIGINT; {kept}", file=sys.stderr)
    return EXIT_INTERRUPTED


def refuse(reason: object) -> NoReturn:
    """End the command with an error message and exit code 2."""
    print(f"error: {as_called(' '.join(str(reason).split()))}", file=sys.stderr)
    sys.exit(2)
