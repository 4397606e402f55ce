"""Held-out reward of a run's final model, asked anew: of the learner's own weights, whatever actors sampled from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from areal_like.config import Config


def final_reward(folder: Path, config: Config, prompts: int) -> float | None:
    """Over so many held-out prompts, at the temperature of the run's own evaluations; the mean of its sets, if they are
    several. None if the run has left no model. What was found is kept in the run's folder. Raises UserError,
    ValueError, OSError."""
    kept = folder / f"final-{prompts}.json"
    if kept.is_file():
        return float(json.loads(kept.read_text())["reward"])
    if not (folder / "checkpoints" / "final" / "config.json").is_file():
        return None
    from ..eval import both, parse

    print(f"{folder.name}: its final model is asked {prompts} held-out prompts", file=sys.stderr, flush=True)
    how = {"prompts": prompts, "temperature": config.eval.temperature, "threads": config.actors.threads}
    found, _ = both(parse([str(folder), *(f"--{name}={value}" for name, value in how.items())]))
    reward = fmean(figures["reward"][0] for figures in found.figures.values())
    kept.write_text(json.dumps({"reward": reward, "sets": found.figures}))
    return reward
