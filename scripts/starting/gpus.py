"""The GPUs of this machine, asked of CUDA or stated by the user, and the placement that they allow."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from areal_like.config import run_config as configs
from areal_like.config.placement import KEY, needs_of, place
from areal_like.config.registry import resolve
from areal_like.config.run_config import Config, ConfigError
from areal_like.launch.group import ORDER
from areal_like.machine import has_gpu

_ASK = (
    "import json, torch; from torch import cuda; of = map(cuda.get_device_properties, range(cuda.device_count())); "
    "print(json.dumps([torch.version.cuda, [each.total_memory for each in of]]))"
)


@dataclass(frozen=True, slots=True)
class Gpus:
    """`cuda`: torch's version of it (None: without). `count` devices of `memory` bytes each, at least (0: unknown)."""

    cuda: str | None
    count: int
    memory: int = 0


@functools.cache
def gpus_here() -> Gpus:
    """Those that torch sees. Asked in another process: this one must not touch a device. Raises ConfigError."""
    environment = {ORDER: "PCI_BUS_ID"} | os.environ  # as the roles will have it
    told = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, env=environment)
    try:
        version, memory = json.loads(told.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (told.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"torch can't be asked for CUDA devices: {last}") from None
    return Gpus(version, len(memory), min(memory, default=0))


def placed(config: Config, stated: Gpus | None = None) -> Config:
    """The config with devices in place of `placement: auto`, where processes of this machine compute on devices:
    `stated` ones, or those that torch sees. Raises ConfigError where they are too few."""
    launcher = resolve("launcher", config.launcher["name"])
    needs = needs_of(config, bool(stated.count) if stated else has_gpu())
    if launcher.ACROSS_HOSTS or not needs.total:
        return config
    gpus = stated or gpus_here()
    found = place(configs.select(config, KEY), needs, gpus.count) if gpus.count else None
    return configs.replace(config, KEY, found.plain) if found else config


def sharing(config: Config) -> Iterator[str]:
    """A note on each device that several processes share."""
    from areal_like.launch.plan import plan

    roles = plan(config)
    for device in sorted({device for role in roles for device in role.devices or ()}):
        names = [role.name for role in roles if device in (role.devices or ())]
        if len(names) > 1:
            yield f"{' and '.join(names)} share device {device}: its memory must hold all of them"


def memory_in(text: str) -> int:
    """`80GB` (of 10^9 bytes) as bytes. Raises ValueError."""
    if not text.endswith("GB") or not (number := float(text.removesuffix("GB"))) > 0:
        raise ValueError(f"{text!r} is no amount of memory: want one such as 80GB")
    return int(number * 10**9)
