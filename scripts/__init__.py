"""Commands: `areal-like VERB`, or `python -m scripts.VERB` in a clone. Packages in here hold their parts.

Python reads this file first. It lets Ctrl-C end a command during its imports without a traceback."""

import os
import signal
import sys
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    if hasattr(sys.modules["__main__"], "main"):  # imports are done: the command handles interrupts
        signal.default_int_handler(number, frame)
    os.write(2, b"interrupted (SIGINT) before anything was started\n")
    os._exit(130)


if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)  # argv[0] is "-m" until Python has found the command's module
