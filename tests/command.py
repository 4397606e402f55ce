"""`python -m tests.command MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS`, for a fork of a server with torch.

The server adds `--parent` to the arguments, which only roles know; and it holds back signals, for roles.
"""

import runpy
import signal
import sys


def main() -> None:
    sys.argv = sys.argv[1:-2] if sys.argv[-2] == "--parent" else sys.argv[1:]
    sys.path.insert(0, "")  # as `python -m` does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
