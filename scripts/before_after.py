"""What training changed: `python -m scripts.before_after RUN [--before FOLDER] [--after FOLDER]`.

Answers the run's held-out prompts twice, at `eval.temperature` (0: greedily): with the run's first weights, and with
its last ones (`checkpoints/final`). Prints the mean reward of both, their difference with its interval and a paired
test, and some answers side by side. `--before` and `--after` take other models' folders, e.g. the model that an earlier
run began with. Answers are scored in this process, without a time limit. `scripts.eval AFTER --against BEFORE` compares
several answers per prompt, on any sets.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.tasks.heldout import own_rows

from .analysis.pairing import TESTS, Paired, p_value, paired
from .console.arguments import command, new_file, refuse
from .console.output import console, shortened, write_json


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A held-out prompt, and the answers before and after."""

    prompt: str
    wanted: str
    before: Answer
    after: Answer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("before_after", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--before", type=Path, help="a model's folder (default: the run's first weights)")
    parser.add_argument("--after", type=Path, help="a model's folder (default: RUN/checkpoints/final)")
    parser.add_argument("--prompts", type=int, help="held-out prompts (default: the run's eval.prompts)")
    parser.add_argument("--show", type=int, default=5, help="answers to print side by side (default: 5)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=new_file, help="write means and all answers to this file")
    return parser.parse_args(argv)


def models(config: Config, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The specs of both models. Raises ConfigError for a folder that is not there."""
    after = args.after or args.run / "checkpoints" / "final"
    specs = {"before": configs.select(config, "model"), "after": {"name": "folder", "path": str(after)}}
    if args.before:
        specs["before"] = {"name": "folder", "path": str(args.before)}
    for folder in (args.before, after):
        if folder and not (folder / "config.json").is_file():
            raise ConfigError(f"{folder}: no model there (config.json is missing); the run must have ended")
    return specs


async def answers(config: Config, task: Any, model: Any, prompts: list[Any]) -> list[Answer]:
    """A model's answers to all prompts at once, in the run's workflow for held-out prompts."""
    from actors.engines.torch_engine import TorchEngine
    from actors.workflows import for_tasks
    from areal_like.config.registry import bind
    from areal_like.types import Limits

    engine, workflow = TorchEngine(model), for_tasks(bind("workflow", configs.heldout_workflow(config)), task)

    async def answer(row: int, prompt: Any) -> Answer:
        longest = config.sampling.max_new_tokens or prompt.max_tokens
        limits = Limits(longest, config.eval.temperature, task.stop_tokens, key=row, trained=False)
        sample = await workflow(engine, task.reward, prompt, limits, str(row))
        if sample is None:
            raise ValueError(f"the workflow rejected its sample of held-out row {row}")
        said = sample.tokens[sample.prompt_length :]
        return Answer(prompt.codec.decode(said) if prompt.codec else " ".join(map(str, said)), float(sample.reward))

    try:
        return list(await asyncio.gather(*(answer(row, prompt) for row, prompt in enumerate(prompts))))
    finally:
        await engine.close()


def compare(config: Config, args: argparse.Namespace) -> list[Pair]:
    """Both models on the same prompts, one after the other: only one of them is in memory at a time."""
    from transformers.utils import logging

    from areal_like.config.registry import build
    from areal_like.models.causal_lm import publishable

    logging.disable_progress_bar()
    task, specs = build("task", config.task, config.run.seed), models(config, args)
    places = [place for rows in own_rows(config, task, args.prompts).values() for place in rows]
    prompts, said = [task.prompt(*place) for place in places], []
    for spec in specs.values():
        model = build("model", spec, config.run.seed, task.vocab_size)
        publishable(model)
        said.append(asyncio.run(answers(config, task, model, prompts)))
    texts = [prompt.messages[-1]["content"] if prompt.messages else str(prompt.tokens.tolist()) for prompt in prompts]
    return [Pair(t, str(p.answer), b, a) for t, p, b, a in zip(texts, prompts, *said, strict=True)]


def means(pairs: list[Pair]) -> dict[str, float]:
    return {side: sum(getattr(pair, side).reward for pair in pairs) / len(pairs) for side in ("before", "after")}


def difference(pairs: list[Pair]) -> Paired:
    return paired([pair.before.reward for pair in pairs], [pair.after.reward for pair in pairs])


def show(pairs: list[Pair], count: int) -> None:
    """A table of the first prompts, and the means of all."""
    from rich.table import Table
    from rich.text import Text

    table = Table("prompt", "wanted", "before", "after", title=f"{len(pairs[:count])} of {len(pairs)} held-out prompts")
    for pair in pairs[:count]:
        said = [Text(shortened(a.text), "green" if a.reward else "red") for a in (pair.before, pair.after)]
        table.add_row(Text(shortened(pair.prompt)), shortened(pair.wanted), *said)
    console().print(table)
    mean = means(pairs)
    print(f"held-out reward ({len(pairs)} prompts): {mean['before']:.3f} before, {mean['after']:.3f} after")
    found = difference(pairs)
    print(f"difference {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}] (95 %, over prompts); "
          f"{found.better} prompts better, {found.worse} worse; "
          f"p {p_value(found.p)} ({TESTS[found.test]})")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if not (args.run / "config.yaml").is_file():
            raise ConfigError(f"{args.run}: no run folder (config.yaml is missing)")
        config = configs.load_resolved(args.run / "config.yaml")
        models(config, args)
        if args.threads:
            import torch

            torch.set_num_threads(args.threads)
        pairs = compare(config, args)
    except (ValueError, OSError) as error:
        refuse(error)
    show(pairs, args.show)
    write_json(
        args.json,
        {**means(pairs), "difference": difference(pairs)._asdict(), "answers": [asdict(pair) for pair in pairs]},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
