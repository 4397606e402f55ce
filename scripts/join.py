"""Add actors to a running run: `areal-like join RUN --actors 8`, on any host that sees the run folder.

Finds the run through its folder (rendezvous, keys). Actors join and leave at any time: they get the newest weights,
then leases. An actor that leaves gently (Ctrl-C, SIGTERM) hands its partial groups back to the buffer; if one is
killed, its leases go to others. Ends when the run does; with --wait it waits until the run starts or resumes.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from areal_like.config.placement import Devices, devices_of
from areal_like.config.run_config import Config, ConfigError
from areal_like.launch.children import Children
from areal_like.launch.local import spawn_role
from areal_like.launch.plan import RoleSpec, has_model
from areal_like.launch.restarts import RestartLimits
from areal_like.run.run_folder import RENDEZVOUS
from areal_like.wire.link import BusError

from .console.arguments import EXIT_INTERRUPTED, command, positive, refuse
from .following.running import NotRunning, Running, add_arguments
from .train import Interrupted, Signals

POLL_SECONDS = 0.1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command("join", __doc__)
    add_arguments(parser)
    parser.add_argument("--actors", type=positive, default=1, metavar="N", help="how many actors (default: 1)")
    parser.add_argument("--devices", metavar="0-3", help="GPUs of this host for them, evenly (default: each sees all)")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="restarts of each (default: actors.max_restarts)")
    parser.add_argument(
        "--wait", action="store_true", help="wait for the run to start or resume, until it has finished"
    )
    return parser.parse_args(argv)


def guests(count: int, config: Config, devices: Sequence[int] = ()) -> list[RoleSpec]:
    """Actors with names that are unique over hosts. Raises ConfigError for devices that they can't divide evenly."""
    stem = f"guest-{socket.gethostname()}-{os.getpid()}"
    threads, model = config.actors.threads or 1, has_model("engine", config.engine)
    return [
        RoleSpec(f"{stem}-{number}", "actors.main", threads, False, model, len(own or ()), own)
        for number, own in enumerate(shares(devices, count))
    ]


def shares(devices: Sequence[int], count: int) -> list[Devices | None]:
    """The devices of each of `count` actors; None: all. Raises ConfigError."""
    each, left = divmod(len(devices), count)
    if left:
        raise ConfigError(f"--devices: {count} actors can't divide {len(devices)} devices evenly")
    return [tuple(devices[i * each : (i + 1) * each]) or None for i in range(count)]


def accompany(args: argparse.Namespace, signals: Signals) -> bool:
    """Run guests until the run's buffer is gone (True), or all of them are. Raises Interrupted, ConfigError; NotRunning
    also for leftover files of a run whose processes were killed."""
    running = Running(args.run, args.keys)
    own = running.config.actors
    restarts = own.max_restarts if args.max_restarts is None else args.max_restarts
    more = ["--guest", *(["--keys", str(args.keys.resolve())] if args.keys else [])]
    limits = RestartLimits(restarts, own.restart_window)
    actors = Children(args.run, limits, lambda role, name: spawn_role(args.run, role, name, *more), guests=True)
    told = 0
    try:
        running.report()
        actors.start(guests(args.actors, running.config, devices_of(args.devices, "--devices")))
        many = f"{args.actors} actors join" if args.actors > 1 else "1 actor joins"
        print(f"{many} {args.run} (logs: {args.run}/logs/guest-*)", flush=True)
        while running.rendezvous() == running.offered:
            signals.check()
            actors.poll()
            for death in actors.deaths[told:]:
                print(death, flush=True)
                running.client.lost(death.name, death.pid, death.how, by_itself=death.by_itself)
            told = len(actors.deaths)
            if actors.none_left:
                print("\n".join(["no actor is left:", *actors.left_out.values()]), file=sys.stderr)
                return False
            time.sleep(POLL_SECONDS)
        return True
    finally:
        actors.end()  # their unfinished groups go back to the buffer
        running.close()


def until_it_runs(run: Path, signals: Signals) -> None:
    """Wait until the run starts, or has ended. Raises Interrupted."""
    while not (run / RENDEZVOUS / "buffer.json").exists() and not (run / "summary.json").exists():
        signals.check()
        time.sleep(POLL_SECONDS)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signals = Signals()
    try:
        while True:
            try:
                if not accompany(args, signals):
                    return 1
            except NotRunning:
                if not args.wait:
                    raise
            if not args.wait or (args.run / "summary.json").exists():
                print("the run has ended")
                return 0
            until_it_runs(args.run, signals)
    except Interrupted:
        return EXIT_INTERRUPTED
    except (ValueError, OSError, BusError) as error:
        refuse(error)


if __name__ == "__main__":
    sys.exit(main())
