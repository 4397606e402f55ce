"""Checks arguments of commands before any work: a refusal is one sentence and exit code 2."""

import argparse
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

EXIT_INTERRUPTED = 130
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


def command(name: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a verb, or of `python -m scripts.NAME` for a dotted name; described by a docstring's first line."""
    assert description
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no UTF-8 terminal, or an incomplete character
    program = f"python -m scripts.{name}" if "." in name else f"areal-like {name}"
    return argparse.ArgumentParser(prog=program, description=description.splitlines()[0], epilog=epilog)


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


def picture(text: str) -> Path:
    """A file that matplotlib can draw into. Raises argparse.ArgumentTypeError."""
    path = new_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture ends in {', '.join(PICTURES)}")
    return path


def _number(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """An argument's type, which raises argparse.ArgumentTypeError."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse


positive = _number(int, lambda value: value >= 1, "a whole number of at least 1")
whole = _number(int, lambda value: value >= 0, "a whole number of at least 0")
amount = _number(float, lambda value: 0 <= value < math.inf, "a number of at least 0")
bound = _number(
    float, lambda value: value == math.inf or (value >= 0 and value.is_integer()), "a whole number from 0, or inf"
)
port = _number(int, lambda value: 0 <= value <= 65535, "a port: 0 (any free one) to 65535")


@contextlib.contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """End the command at Ctrl-C, a ValueError (UserError is one), an OSError, or an error of the types in `more`."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *more)
    try:
        yield
    except KeyboardInterrupt:
        print("ended by SIGINT", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except kinds as error:
        refuse(error)


def refuse(reason: object) -> NoReturn:
    """End the command with an error message and exit code 2."""
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(2)
