"""A role for tests of the launcher: it acts as the file `RUN/parts/NAME` orders."""

import errno
import os
import signal
import subprocess
import sys
import time

from areal_like.errors import UserError
from areal_like.run.process import Role, run_role


def child(role: Role) -> None:
    """Start a process that ends only by a signal, and write down its id."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (role.run / f"{role.name}.child").write_text(str(process.pid))


def main(role: Role) -> None:
    part = (role.run / "parts" / role.name).read_text()
    if part == "done":
        return
    if part == "raise":
        raise RuntimeError("out of\nmemory")
    if part == "refuse":
        raise UserError("this input is no good")
    if part == "fail-once" and not (role.run / "failed").exists():
        (role.run / "failed").touch()
        raise TimeoutError("the engine has not answered")
    if part == "fill-the-disk":  # which has the log, too
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")
        except OSError as error:
            raise RuntimeError("the writer of checkpoints failed") from error
    if part == "die-with-a-child":
        child(role)
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child(role)
    while True:
        try:
            role.offer(role.name, "here")  # a signal may come at once
            time.sleep(120)
        except SystemExit:
            if part != "swallow":
                raise


if __name__ == "__main__":
    run_role(main)
