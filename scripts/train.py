"""Train: `python -m scripts.train CONFIG.yaml [key=value ...]`.

Reads and checks the config, makes the run folder, starts the processes of the plan, shows what happens until the
learner is done, and prints the summary. Ctrl-C or SIGTERM ends every process. Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from areal_like import config as configs
from areal_like.config import Config, ConfigError

EXIT_INTERRUPTED = 130


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train",
        description="Train a language model by actor-learner reinforcement learning.",
        epilog="examples:  python -m scripts.train configs/quickstart.yaml mode=sync learner.lr=1e-3   "
        "python -m scripts.train configs/quickstart.yaml --print-config loss=ppo.  "
        "Every key, with its default and meaning, is in configs/base.yaml.",
    )
    parser.add_argument("config", help="a yaml file, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, applied last")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--dry-run", action="store_true", help="print which processes would be started and stop")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live display")
    return parser.parse_args(argv)


def make_run_folder(config: Config, stem: str) -> tuple[Path, Config]:
    """A new folder under `run.dir`. An explicit `run.name` that exists is refused: it holds another run's data."""
    parent = Path(config.run.dir)
    name = config.run.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, attempt = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if config.run.name:
                raise ConfigError(f"run.name={name}: {folder} exists; choose another name or remove it") from None
            attempt += 1
            folder = parent / f"{name}-{attempt}"
    return folder, configs.replace(config, "run.name", folder.name)


def write_record(config: Config, folder: Path, argv: list[str]) -> None:
    """What is needed to run this again: resolved config, command line, commit, seeds."""
    configs.save(config, folder / "config.yaml")
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    record = {
        "command": ["python", "-m", "scripts.train", *argv],
        "commit": git.stdout.strip() or None,
        "seed": config.run.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")


def resolve_transport(config: Config) -> Config:
    """`auto`: files on one host; a port was asked for: tcp."""
    if config.buffer.transport != "auto":
        return config
    return configs.replace(config, "buffer.transport", "tcp" if config.buffer.port else "ipc")


def preflight(config: Config) -> None:
    """Find out what can be found out before anything is started. Raises ConfigError, ValueError, OSError."""
    from areal_like.registry import build

    build("scheduler", config.scheduler, build("sizing", config.sizing))
    build("task", config.task, config.run.seed)
    path = config.model.get("path")
    if path is not None and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: no Hugging Face model in {path!r} (config.json is missing)")


class Interrupted(Exception):
    """A person, or the system, has asked the run to end."""


def _interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(signal.Signals(signum).name)


def run(config: Config, folder: Path, plain: bool) -> dict[str, Any]:
    """Start everything, watch it, end everything. Returns the summary. Raises RunFailed, Interrupted, OSError."""
    from areal_like.launch.plan import plan
    from areal_like.registry import build
    from scripts.watch import Watch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    launcher = build("launcher", config.launcher, folder, config.actors.max_restarts)
    watch = Watch(config, folder, plain)
    try:
        launcher.start(plan(config))
        with watch:
            while not launcher.poll():
                watch.update()
                time.sleep(0.1)
            watch.update(last=True)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not cut the clean-up short
        launcher.stop()
        watch.close()
    summary = json.loads((folder / "summary.json").read_text())
    summary["restarts"] = sum(launcher.restarts.values())
    return summary


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = resolve_transport(configs.load([args.config, *args.overrides]))
        if args.print_config:
            print(configs.to_yaml(config), end="")
            return 0
        if args.dry_run:
            from areal_like.launch.plan import describe, plan

            print(describe(plan(config)))
            return 0
        preflight(config)
        folder, config = make_run_folder(config, Path(args.config).stem)
        write_record(config, folder, argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from areal_like.launch.local import RunFailed
    from scripts.watch import print_summary

    try:
        summary = run(config, folder, args.plain)
    except Interrupted as signalled:
        print(f"ended by {signalled}; what was recorded is in {folder}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_summary(summary, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
