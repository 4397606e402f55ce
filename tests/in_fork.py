"""`python -m tests.in_fork -m MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS`, in a fork of the tests' common server.

What it writes is shown at its end, on stdout.
"""

import sys
import tempfile
from pathlib import Path

from tests.forked import forked


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, forked("tests.command", [sys.argv[2:]], Path(folder)) as (process,):
        code = process.wait(250)
        sys.stdout.write((Path(folder) / "logs" / "0.log").read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())
