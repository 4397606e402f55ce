"""The processes of a run's plan, which report the devices that they see, and do nothing else.

`python -m tests.placed CONFIG` starts the plan of a resolved config by its launcher, in the folder of the config, and
ends when all processes have written a file there. They run until then: no two of them can have had the same device one
after the other."""

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.placement import VISIBLE
from areal_like.config.registry import build
from areal_like.config.run_config import Config
from areal_like.launch.children import limits
from areal_like.launch.plan import plan

KNOBS = ["learner.device=cuda", "learner.ranks=2", "engine=sglang", "engine.tp_size=2", "actors.count=2"]
"""Two devices for the learner, two for each actor."""
COUNTS = {"buffer": 0, "learner": 1, "learner-1": 1, "actor-0": 2, "actor-1": 2}
PATIENCE = 120.0


def prepared(folder: Path, *overrides: str) -> Config:
    """The config of a run in this folder, written there."""
    (folder / "logs").mkdir(parents=True)
    own = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    config = configs.load(["configs/quickstart.yaml", *KNOBS, *own, *overrides])
    configs.save(config, folder / "config.yaml")
    return config


def seen(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Process → where it runs, and CUDA_VISIBLE_DEVICES as a list; of those that have reported."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.seen")}
    return {name: (host, devices) for name, (host, devices) in found.items()}


def agree(told: dict[str, tuple[str, list[str]]]) -> bool:
    """Has each process as many devices as planned, and each device of a node one process at most?"""
    places = [(host, device) for host, devices in told.values() for device in devices]
    return {name: len(devices) for name, (_, devices) in told.items()} == COUNTS and len(places) == len(set(places))


def say(name: str, folder: Path) -> None:
    devices = [device for device in os.environ.get(VISIBLE, "").split(",") if device]
    host = os.environ.get("SLURMD_NODENAME") or os.environ.get("RAY_RAYLET_PID") or socket.gethostname()
    (folder / f"{name}.new").write_text(json.dumps([host, devices]))
    (folder / f"{name}.new").rename(folder / f"{name}.seen")
    time.sleep(PATIENCE)


def start(config: Config, folder: Path) -> None:
    roles = [dataclasses.replace(role, module="tests.placed") for role in plan(config)]
    launcher = build("launcher", config.launcher, folder, limits(config))
    deadline = time.monotonic() + PATIENCE
    try:
        launcher.start(roles)
        while len(seen(folder)) < len(roles) and time.monotonic() < deadline:
            launcher.running.poll()
            time.sleep(0.1)
    finally:
        launcher.stop()


if __name__ == "__main__":
    if "--name" in sys.argv:
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        say(given["--name"], Path(given["--run"]))
    else:
        start(configs.load_resolved(Path(sys.argv[1])), Path(sys.argv[1]).parent)
