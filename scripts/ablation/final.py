"""Held-out reward of a run's final model, measured again with the learner's own weights, not with those of actors."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from areal_like.config.run_config import Config


def kept(folder: Path, prompts: int) -> float | None:
    """What `ask` has found for a run; None if it has not been asked, or the file is broken."""
    try:
        return float(json.loads(_file(folder, prompts).read_text())["reward"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def can_be_asked(folder: Path) -> bool:
    """Has the run left a model?"""
    return (folder / "checkpoints" / "final" / "config.json").is_file()


def ask(folder: Path, config: Config, prompts: int) -> None:
    """Ask so many held-out prompts, at the temperature and with the longest answers of the run's own evaluations, and
    keep the mean reward (of its sets, if they are several) in the run's folder. Raises whatever a model, a verifier or
    an environment raises."""
    from ..eval import both, parse

    how = {"prompts": prompts, "temperature": config.eval.temperature, "threads": config.actors.threads}
    how |= {"max-tokens": config.sampling.max_new_tokens} if config.sampling.max_new_tokens else {}
    found, _ = both(parse([str(folder), *(f"--{name}={value}" for name, value in how.items())]))
    reward = fmean(figures["reward"][0] for figures in found.figures.values())
    beside = _file(folder, prompts).with_suffix(".tmp")
    beside.write_text(json.dumps({"reward": reward, "sets": found.figures}))
    beside.replace(_file(folder, prompts))


def _file(folder: Path, prompts: int) -> Path:
    return folder / f"final-{prompts}.json"
