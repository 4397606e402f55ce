"""Train: `areal-like train CONFIG.yaml [key=value ...]`.

Checks the config, makes the run folder, starts the processes of the plan, shows progress until the learner is done, and
prints the summary. Ctrl-C or SIGTERM ends every process. Nothing heavy is imported here.
"""

import argparse
import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from areal_like.config import run_config as configs
from areal_like.config.defaults import describe_defaults
from areal_like.config.placement import needs_of
from areal_like.config.registry import build, key_hint, resolve
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.hub import located
from areal_like.machine import has_gpu
from areal_like.places import COMMANDS, INSTALLED, REPOSITORY
from areal_like.run import checkpoints, run_folder
from areal_like.run.metrics import keep_steps
from areal_like.run.process import EXIT_PAUSED
from areal_like.run.run_folder import CONFIG, NEXT, SUBMITTED, SUMMARY
from areal_like.wire import keys
from areal_like.wire.bus import NODE, is_loopback
from areal_like.wire.link import BusError

from .console.arguments import EXIT_INTERRUPTED, command, whole
from .console.process import Interrupted, Signals, lasting_output
from .starting import earlier_runs
from .starting.gpus import Gpus, gpus_here, memory_in, placed
from .starting.preflight import preflight

UNNAMED = (*earlier_runs.OF_A_START, "run.trackers", "run.project")
"""Settings that a run's name leaves out."""
NAMED = 60
"""Most characters of a run's name that describe overrides."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command(
        "train",
        "Train a language model by actor-learner reinforcement learning.",
        "example: areal-like train quickstart mode=sync learner.lr=1e-3.  "
        "Every key, with its default and meaning: areal-like config [loss.dg|learner|run.steps|...].",
    )
    parser.add_argument("config", help="a yaml file, or the name of a shipped one, such as quickstart")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue; auto: the newest unfinished one")
    parser.add_argument("--replay", metavar="RUN", help="run folder with the batches to train on again")
    parser.add_argument("--early-stop", metavar="N", help="evaluations without a better one that end the run")
    parser.add_argument("--print-config", action="store_true", help="print the whole config and stop")
    parser.add_argument("--dry-run", action="store_true", help="print the processes and their memory needs, and stop")
    parser.add_argument("--devices", type=whole, metavar="N", help="GPUs for --dry-run (default: this machine's)")
    parser.add_argument("--device-memory", type=memory_in, metavar="80GB", help="of each (default: this machine's)")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live display")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        hint = key_hint(unknown[0].lstrip("-").partition("=")[0].replace("-", "_"), ())
        parser.error(f"unrecognized arguments: {' '.join(unknown)}.{hint} A setting is key=value, such as run.steps=5.")
    if not args.dry_run and (args.devices is not None or args.device_memory):
        parser.error("--devices and --device-memory go with --dry-run; placement says which devices a run gets")
    args.overrides += [f"run.early_stop={args.early_stop}"] if args.early_stop else []
    args.overrides += [f"{key}={run}" for key in ("resume", "replay") if (run := getattr(args, key)) is not None]
    args.gpus = None if args.devices is None else Gpus("stated", args.devices)
    return args


def load(args: argparse.Namespace) -> Config:
    """The config of the command line; unset keys are those of a resumed or replayed run. Raises ConfigError."""

    def read(inherited: Config | None = None, folders: Sequence[str] = ()) -> Config:
        config = configs.load([args.config, *args.overrides, *folders], inherited)
        return placed(resolve_folders(resolve_transport(config)), args.gpus)

    config = read()
    folder = Path(config.replay) if config.replay else earlier_run(config, args)
    earlier = configs.load_resolved(folder / CONFIG) if folder and (folder / CONFIG).is_file() else None
    folders = [] if args.print_config else located(configs.leaves(config), configs.leaves(earlier) if earlier else {})
    return read(earlier, folders) if earlier or folders else config


def resolve_transport(config: Config) -> Config:
    """`auto` becomes ipc; tcp with a port, an address that others reach, or a launcher for several hosts."""
    launcher, local = resolve("launcher", config.launcher["name"]), is_loopback(config.buffer.host)
    if launcher.ACROSS_HOSTS:
        host = NODE if local else config.buffer.host
        return configs.replace(configs.replace(config, "buffer.transport", "tcp"), "buffer.host", host)
    if config.buffer.transport != "auto":
        return config
    return configs.replace(config, "buffer.transport", "tcp" if config.buffer.port or not local else "ipc")


def resolve_folders(config: Config) -> Config:
    """`~` becomes the home folder, the keys' path absolute. Raises ConfigError if `run.name` is no folder's name."""
    for key in ("run.dir", "resume", "replay", "security.key_folder"):
        if path := configs.select(config, key):
            path = os.path.expanduser(path)
            config = configs.replace(config, key, os.path.abspath(path) if key == "security.key_folder" else path)
    name = config.run.name
    if name is not None and (name in ("", ".", "..") or "/" in name or not name.isprintable()):
        raise ConfigError(f"run.name={name!r} is no folder's name; run.dir says where run folders are", "run.name")
    return config


def earlier_run(config: Config, args: argparse.Namespace) -> Path | None:
    return earlier_runs.find_run_to_resume(config, Path(args.config).stem) if config.resume else None


def name_of(stem: str, overrides: Sequence[str]) -> str:
    """Of a run, e.g. `quickstart-mode=sync-lr=1e-3`. Keys have no dash: the first ends the config's name."""
    words = []
    for key, _, value in (pair.partition("=") for pair in overrides):
        if key not in UNNAMED:
            word = f"{key.rpartition('.')[2].replace('-', '_')}={value}"
            words.append(re.sub(r"[^\w.=+,-]+", "_", word))
    return "-".join([stem, *words])[: len(stem) + 1 + NAMED].rstrip("-_.") if words else stem


def make_run_folder(config: Config, stem: str) -> tuple[Path, Config]:
    """A new folder under `run.dir`. Raises ConfigError for a `run.name` that exists, OSError for a full disk."""
    name = config.run.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in itertools.count(1):
        folder = Path(config.run.dir) / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if config.run.name:
                more = f", or give it more run.steps with resume={folder}" if (folder / SUMMARY).exists() else ""
                why = f"{folder} exists; choose another name or remove it{more}"
                raise ConfigError(f"run.name={name}: {why}", "run.name") from None
        except OSError as error:
            if error.errno in FULL:
                raise
            why = f"cannot be written ({error.strerror}); name another folder"
            raise ConfigError(f"run.dir={config.run.dir}: {why}", "run.dir") from None
    return folder, configs.replace(config, "run.name", folder.name)


def write_record(config: Config, folder: Path, argv: list[str], data: dict[str, str]) -> None:
    """Write all that repeats this run: resolved config (with the seed), command line, commit, digests of its `data`."""
    configs.save(config, folder / CONFIG)
    command = ["python", "-m", f"{COMMANDS}.train", *argv]
    record = {"command": command, "commit": commit(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    run_folder.write(folder / run_folder.RECORD, json.dumps(record | {"data": data}, indent=2) + "\n")


def commit() -> str | None:
    """The commit of this code ("-dirty": files differ), or the version of an installed package; None without git."""
    if INSTALLED:
        return metadata.version("areal_like")
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None


def provide_keys(config: Config, folder: Path) -> Config:
    """Make keys for the run if its sockets are on TCP, also on loopback, and no keys are named."""
    if config.security.key_folder or config.buffer.transport != "tcp":
        return config
    place = folder.resolve() / "keys"
    keys.provide(place)
    return configs.replace(config, "security.key_folder", str(place))


def prepare(args: argparse.Namespace, argv: list[str]) -> tuple[Path, Config, TextIO] | None:
    """The run's folder, config and lock, or None if the command only prints something. Raises ValueError, OSError."""
    config = load(args)
    if args.print_config:
        print(configs.to_yaml(configs.with_every_knob(config)), end="")
        return None
    if args.dry_run:
        dry_run(config, args)
        return None
    notes, data = preflight(config)
    if notes:
        print(f"note: {notes}", file=sys.stderr)
    if config.replay:
        config = earlier_runs.fit_to_replay(config)
    earlier, stem = earlier_run(config, args), Path(args.config).stem
    if config.resume and not earlier:
        print(f"resume=auto: {config.run.dir} has no unfinished run of {config.run.name or stem}; a new one starts")
    if earlier:
        held = earlier_runs.lock(earlier)
        config = provide_keys(earlier_runs.reopen_run_folder(config, earlier), earlier)
        earlier_runs.check_data(config, earlier, data)
        changed = earlier_runs.changes(config, earlier)
        print(f"resuming {earlier}{' with ' if changed else ''}{', '.join(changed)}")
        run_folder.discard(earlier)
        keep_steps(earlier / "metrics.jsonl", checkpoints.steps_done(earlier))  # before anybody reads them
        (earlier / NEXT).mkdir()  # until the first train step: see areal_like.run.run_folder
        write_record(config, earlier / NEXT, argv, data)
        return earlier, config, held
    folder, config = make_run_folder(config, name_of(stem, args.overrides))
    try:
        config = provide_keys(config, folder)
        write_record(config, folder, argv, data)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(folder)) from None
    return folder, config, earlier_runs.lock(folder)


def launcher_of(config: Config, folder: Path) -> Any:
    from areal_like.launch.children import limits

    return build("launcher", config.launcher, folder, limits(config))


def dry_run(config: Config, args: argparse.Namespace) -> None:
    """Print processes, memory needs and the submission. Then raises errors of the checks: ValueError, OSError."""
    from areal_like.launch.plan import describe, plan

    from .starting import estimate  # imports torch

    config = earlier_runs.fit_to_replay(config) if config.replay else config
    roles = plan(config)
    launcher = launcher_of(config, Path(config.run.dir) / (config.run.name or "NAME"))
    print(describe(roles), describe_defaults(config), sep="\n")
    print(launcher.placement(roles), end="")
    model = estimate.model_of(config)
    if model is not None:
        memory = args.device_memory or 0
        if not memory and not args.gpus and needs_of(config, has_gpu()).total:
            memory = gpus_here().memory
        print(estimate.describe(config, roles, model, memory), end="")
    if submission := launcher.submission(roles):
        print(f"\n{submission.describe()}", end="")
    if notes := preflight(config, args.gpus)[0]:
        print(f"note: {notes}", file=sys.stderr)


def run(config: Config, folder: Path, plain: bool, signals: Signals) -> dict[str, Any]:
    """Run all to the end; returns the summary. Raises RunFailed, RunStopped, Interrupted, OSError."""
    from areal_like.launch.plan import plan

    from .following.display import Display

    launcher, roles = launcher_of(config, folder), plan(config)
    display = Display(config, folder, plain)
    try:
        signals.check()
        shutil.rmtree(folder / run_folder.RENDEZVOUS, ignore_errors=True)  # of a starter that was killed
        display.say(f"starting {', '.join(role.name for role in roles)} (launcher={config.launcher['name']})")
        launcher.start(roles, signals.check)
        with display:
            while not launcher.running.poll():
                signals.check()
                if signals.take_pause():
                    launcher.running.pause()
                display.update(launcher.running.deaths)
                time.sleep(0.05)
            display.update(launcher.running.deaths, last=True)
    finally:
        launcher.stop()
        shutil.rmtree(folder / run_folder.RENDEZVOUS, ignore_errors=True)
        display.close()
    path = folder / SUMMARY
    deaths, left_out = launcher.running.deaths, launcher.running.left_out
    summary = json.loads(path.read_bytes()) | {"restarts": len(deaths) - len(left_out), "left_out": left_out}
    run_folder.write(path, json.dumps(summary, indent=2) + "\n")
    return summary


def submit(submission: Any, folder: Path, held: TextIO) -> None:
    """Submit the job, and print the commands to watch it. Raises OSError."""
    (folder / "logs").mkdir(exist_ok=True)
    if (folder / NEXT / CONFIG).exists():
        (folder / NEXT / CONFIG).replace(folder / SUBMITTED)  # what the job begins with, however often it is queued
    held.close()
    try:
        job = submission.submit()
    except OSError:
        if not (folder / SUBMITTED).exists() and not (folder / "metrics.jsonl").exists():  # else it is resumed
            shutil.rmtree(folder)
        raise
    print(f"job {job} is submitted; run folder: {folder}")
    print(f"look in: areal-like status {folder}; end it: areal-like stop {folder}")


def in_words(error: Exception, place: str | Path) -> str:
    """An error as text. For a full disk: what to do, on the disk of the error's file (without one, of `place`)."""
    if isinstance(error, OSError) and error.errno in FULL:
        return f"{error.strerror}: {run_folder.room_wanted(Path(error.filename or place).absolute())}"
    return str(error)


def train(folder: Path, config: Config, held: TextIO, plain: bool, signals: Signals) -> int:
    """Submit the run, or run it to its end and report how it ended. Returns the exit code."""
    from areal_like.launch.outcome import RunFailed, RunStopped
    from areal_like.launch.plan import plan

    from .following.display import print_summary

    print(describe_defaults(config), sep="\n", flush=True)
    try:
        if submission := launcher_of(config, folder).submission(plan(config)):
            submit(submission, folder, held)
        else:
            print_summary(run(config, folder, plain, signals), folder)
        return 0
    except Interrupted as signalled:
        code, resumable = EXIT_INTERRUPTED, True
        print(f"ended by {signalled}; what was recorded is in {folder}", file=sys.stderr)
    except RunStopped as stopped:
        code, resumable = EXIT_PAUSED if stopped.paused else EXIT_INTERRUPTED, True
        print(stopped, file=sys.stderr)
    except (RunFailed, BusError, UserError, OSError) as error:
        code, resumable = 1, not isinstance(error, UserError) and getattr(error, "resumable", True)
        print(f"error: {in_words(error, folder)}", file=sys.stderr)
    finally:
        run_folder.discard(folder)
    if resumable and earlier_runs.holds_progress(config, folder):
        print(f"to continue: the same command with {shlex.quote(f'resume={folder}')}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    with lasting_output():
        args, signals = parse(argv), Signals()
        with contextlib.closing(signals):
            try:
                prepared = prepare(args, argv)
            except (ValueError, OSError) as error:
                print(f"error: {' '.join(in_words(error, '.').split())}", file=sys.stderr)
                return 2
            return train(*prepared, args.plain, signals) if prepared else 0


if __name__ == "__main__":
    sys.exit(main())
