"""Add actors to a running run: `areal-like join RUN --actors 8`, on any host that sees the run folder.

Finds the run through its folder (rendezvous, keys). Actors join and leave at any time: they get the newest weights,
then leases. An actor that leaves gently (Ctrl-C, SIGTERM) hands its groups back at once; if one is killed, its
leases go to others a little later. Ends when the run does; with --wait it waits until the run starts or resumes.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence

from areal_like.config.placement import devices_of
from areal_like.config.run_config import Config, ConfigError
from areal_like.launch.children import Children, RestartLimits
from areal_like.launch.local import spawn_role
from areal_like.launch.plan import RoleSpec, has_model
from areal_like.run.run_folder import RENDEZVOUS, SUMMARY
from areal_like.wire.link import BusError

from .console.arguments import EXIT_INTERRUPTED, command, positive, refuse
from .console.process import Interrupted, Signals
from .following.running import NotRunning, Running, add_arguments

POLL_SECONDS = 0.1


def guests(count: int, config: Config, devices: Sequence[int] = ()) -> list[RoleSpec]:
    """Actors with names that are unique over hosts, which divide the devices. Raises ConfigError."""
    each, left = divmod(len(devices), count)
    if left:
        raise ConfigError(f"--devices: {count} actors can't divide {len(devices)} devices evenly")
    stem = f"guest-{socket.gethostname()}-{os.getpid()}"
    threads, model = config.actors.threads or 1, has_model("engine", config.engine)
    return [
        RoleSpec(f"{stem}-{i}", "actors.main", threads, False, model, each, tuple(devices[i * each :][:each]) or None)
        for i in range(count)
    ]


def accompany(args: argparse.Namespace, signals: Signals) -> bool:
    """Run guests until the run's buffer is gone (True), or all are. Raises Interrupted, ConfigError, NotRunning."""
    running = Running(args.run, args.keys)
    own = running.config.actors
    limits = RestartLimits(own.max_restarts if args.max_restarts is None else args.max_restarts, own.restart_window)
    more = ["--guest", *(["--keys", str(args.keys.resolve())] if args.keys else [])]
    actors = Children(args.run, limits, lambda role, name: spawn_role(args.run, role, name, *more), guests=True)
    reported = 0
    try:
        running.report()
        actors.start(guests(args.actors, running.config, devices_of(args.devices, "--devices")))
        print(f"joining {args.run}, actors: {args.actors} (logs: {args.run}/logs/guest-*)", flush=True)
        while running.is_there():
            signals.check()
            actors.poll()
            for death in actors.deaths[reported:]:
                print(death, flush=True)
                running.client.lost(death.name, death.pid, death.how, by_itself=death.by_itself)
            reported = len(actors.deaths)
            if actors.none_left:
                print("\n".join(["no actor is left:", *actors.left_out.values()]), file=sys.stderr)
                return False
            time.sleep(POLL_SECONDS)
        return True
    finally:
        actors.end()  # their unfinished groups go back to the buffer
        running.close()


def main(argv: list[str] | None = None) -> int:
    parser = command("join", __doc__)
    add_arguments(parser)
    parser.add_argument("--actors", type=positive, default=1, metavar="N", help="number of actors (default: 1)")
    parser.add_argument("--devices", metavar="0-3", help="GPUs of this host for them, evenly (default: each sees all)")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="restarts of each (default: actors.max_restarts)")
    parser.add_argument("--wait", action="store_true", help="wait for the run to start or resume, until it has ended")
    args = parser.parse_args(argv)
    signals, buffer, ended = Signals(), args.run / RENDEZVOUS / "buffer.json", args.run / SUMMARY
    try:
        while True:
            try:
                if not accompany(args, signals):
                    return 1
            except NotRunning:
                if not args.wait:
                    raise
            if not args.wait or ended.exists():
                print("the run has ended")
                return 0
            while not buffer.exists() and not ended.exists():
                signals.check()
                time.sleep(POLL_SECONDS)
    except Interrupted:
        return EXIT_INTERRUPTED
    except (ValueError, OSError, BusError) as error:
        refuse(error)


if __name__ == "__main__":
    sys.exit(main())
