"""Imported by the fork server of a test session: the project itself. The server of an ablation must not import it."""

import importlib
import sys

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from areal_like.config import run_config as config
from areal_like.places import CONFIGS

RUN = ("actors.main", "buffer.main", "learners.main", "scripts.train", "scripts.cli")
"""Run as `__main__`: only their imports stay."""
PARTS = (
    "actors.engines.torch_engine",
    "areal_like.launch.local",
    "areal_like.tasks.arithmetic",
    "areal_like.tasks.copying",
    "areal_like.trackers.board",
    "learners.build",
    "learners.learner",
    "scripts.simulation.run",
    "scripts.following.tracking",
    "scripts.following.display",
    "tabulate",
)

for name in (*RUN, *PARTS):
    importlib.import_module(name)
for name in RUN:
    del sys.modules[name]
config.load([str(CONFIGS / "base.yaml")])
get_checkpoint_conversion_mapping("qwen2")
