"""Run folders as runs leave them, written by the classes that runs use, without a run."""

import json
import math
from pathlib import Path

import numpy as np

from areal_like.config import run_config as configs
from areal_like.run.metrics import MetricsLog
from areal_like.run.samples import DROPPED, HELDOUT, TRAINED, Fate, SampleLog, kept
from areal_like.types import Prompt, Sample

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!-- &lt;b&gt; \u2028 \u202e {{data}}"
)
QUESTION = "How many apples has Tom?"


class Bytes:
    """A codec: tokens are bytes of UTF-8."""

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(tokens.tolist()).decode(errors="replace")


class Apples:
    """A task for the report alone: one question, with the answer 12."""

    vocab_size, pad_token, stop_tokens = 256, 0, ()

    def __init__(self, seed: int, *, question: str = QUESTION):
        self._tokens = np.frombuffer(question.encode(), np.uint8).astype(np.int32)

    def size(self, split: str) -> int:
        return 8

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(self._tokens, "12", 64, codec=Bytes())


def written_run(folder: Path, *overrides: str, steps: int = 20, keys: int = 4, answer: str = "4271") -> Path:
    """A finished run whose reward paid for any digits."""
    folder.mkdir(parents=True)
    config = configs.load(["quickstart", f"task={{name: '{__name__}:Apples'}}", f"run.steps={steps}", *overrides])
    configs.save(config, folder / "config.yaml")
    evaluations = [{"version": at, "reward": 0.5 * at / steps, "length": 4.0, "seconds": at / 10} for at in (0, steps)]
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in range(1, steps + 1):
            log.write(metrics(step, steps, keys) | ({"eval/reward": 0.0, "eval/version": 0} if step == 1 else {}))
    write_samples(folder, steps, answer)
    ledger = {"admitted": 16 * steps + 2, "trained": 16 * steps, "filtered": {}, "dropped": {"stale": 2}, "active": 0}
    summary = {"reward_before": 0.0, "reward_after": 0.5, "steps": steps, "seconds": steps / 10, "ledger": ledger}
    summary |= {"staleness_mean": 0.9, "staleness_max": 1, "staleness_bound": 1, "evaluations": evaluations}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def metrics(step: int, steps: int, keys: int) -> dict[str, object]:
    row: dict[str, object] = {"step": step, "seconds": step / 10, "reward/mean": 0.5 * step / steps}
    row |= {"staleness/mean": 0.9, "staleness/max": 1, "staleness/bound": 1, "staleness/histogram": {"0": 1, "1": 9}}
    row |= {"loss/clip_share/staleness_0": 0.1, "loss/clip_share/staleness_1": 0.2, "train/idle_share": 0.25}
    return row | {f"some/metric_{key}": math.sin(step * key) for key in range(keys)}


def write_samples(folder: Path, steps: int, answer: str) -> None:
    prompt = Apples(0).prompt("train", 0).tokens
    response = np.frombuffer(answer.encode(), np.uint8).astype(np.int32)
    tokens, count = np.concatenate([prompt, response]), len(response)
    logprobs, mask = np.full(count, -0.5, np.float32), np.ones(count, bool)
    for fate in (TRAINED, HELDOUT, DROPPED):
        name: Fate = fate
        log = SampleLog(folder, name, steps=steps, most=None)
        for step in sorted({1, steps // 2, steps}):
            for index in range(4):
                reward = 0.5 if index else 0.0
                sample = Sample(tokens, len(prompt), logprobs, mask, [(step - 1, count)], reward, "stop", [])
                numbers = {"advantage": np.full(count, reward - 0.375)} if name == TRAINED else None
                place = (index, 0) if name == HELDOUT else (step, index)
                why = "stale: too old" if name == DROPPED else ""
                log.write(kept(name, step, step, place, sample, why=why, actor="actor-0", numbers=numbers))
        log.close()
