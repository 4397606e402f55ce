"""End a run from anywhere: `areal-like stop RUN [--drain]`.

Without --drain the learner gives up the train step in progress and writes a checkpoint; the run can be resumed. If the
learner does not answer within 5 s, the run ends without it, and a resume continues from the last checkpoint. With
--drain the run trains all admitted groups, and only as many new ones as complete the last batch. Then it ends as a
complete run does: checkpoint, last evaluation, summary."""

import contextlib
import sys
import time

from areal_like.wire.link import BusError

from .console.arguments import command, refusing
from .following.running import Running, add_arguments


def main(argv: list[str] | None = None) -> int:
    parser = command("stop", "End a run at a checkpoint.")
    add_arguments(parser)
    parser.add_argument("--drain", action="store_true", help="first train all admitted groups and evaluate")
    args = parser.parse_args(argv)
    with refusing(BusError), contextlib.closing(Running(args.run, args.keys)) as running:
        running.client.stop(args.drain)
        active = running.report()["ledger"]["active"]
        draining = f"draining: training the {active} groups already admitted"
        print(f"{args.run}: {draining if args.drain else 'stopping'}", flush=True)
        while running.is_there():
            time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
