"""Evaluate a model: `python -m scripts.eval MODEL [SET ...]`; MODEL is a run's folder, one of its checkpoints
(`RUN/checkpoints/step-N`) or a Hugging Face folder.

A SET is a file of prompts and answers (`test.jsonl`; all its rows, or `--prompts` of them), a task's name
(`arithmetic`; its held-out rows) or a spec (`{name: jsonl, path: test.jsonl, reward: exact}`). Without SET: the run's
own held-out prompts, in its own workflow. With `--samples 8` each prompt is answered eight times, and pass@k is the
unbiased estimate (Chen et al., arXiv 2107.03374). Intervals are of 95 %, over prompts. `--against OTHER` asks a second
model the same, and tests the differences prompt by prompt: what training changed, say. Verifiers run in processes of
their own, with a time limit.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.config import run_config as configs
from areal_like.config.eval_sets import OWN
from areal_like.config.layers import parse_override
from areal_like.config.run_config import ConfigError
from areal_like.errors import UserError
from areal_like.estimates import by_prompt, powers
from areal_like.estimates import figures as estimates
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG
from areal_like.tasks.heldout import own_rows

from .analysis.step_model import step_model
from .console.arguments import amount, command, new_file, positive, refuse
from .console.output import console, shortened, table, visible, write_json

if TYPE_CHECKING:
    from areal_like.interfaces import RewardFunction, Task, Workflow
    from areal_like.types import Prompt

    from .analysis.pairing import Paired

TIMEOUT, WORKERS = 30.0, 2
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Answers:
    """Answers to one prompt: texts, rewards, lengths in tokens, and how many were cut at the longest length."""

    prompt: str
    wanted: str
    texts: list[str]
    rewards: list[float]
    lengths: list[int]
    cut: int


@dataclass(frozen=True)
class Question:
    """A set of prompts: its name, its task, the rows, and how samples are rolled out."""

    name: str
    task: Task
    rows: list[tuple[str, int]]
    workflow: Workflow


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("eval", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run's folder, or a model's (config.json)")
    parser.add_argument("sets", nargs="*", metavar="SET", help="FILE.jsonl, a task's name, or {name: ..., knobs}")
    parser.add_argument(
        "--against", type=Path, metavar="OTHER", help="another model's or run's folder: compare with it"
    )
    parser.add_argument("--prompts", type=positive, help="prompts per set (default: all of a file, else 256)")
    parser.add_argument("--samples", type=positive, default=1, help="answers per prompt (default: 1)")
    parser.add_argument("--temperature", type=amount, help="0: greedy (default: 0 for one sample, else 1)")
    parser.add_argument("--max-tokens", type=positive, help="longest answer (default: the task's)")
    parser.add_argument("--right", type=float, default=1.0, help="least reward of a right answer (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples and of the choice of rows")
    parser.add_argument("--slots", type=positive, default=64, help="sequences at once (default: 64)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the answers to the first N prompts")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write figures and all answers to this file")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Found:
    """What a model says: figures and answers of each set, by its name."""

    figures: dict[str, dict[str, Any]]
    answers: dict[str, list[Answers]]

    def data(self) -> dict[str, dict[str, Any]]:
        """As JSON."""
        listed = {name: [vars(each) for each in answers] for name, answers in self.answers.items()}
        return {name: {**figures, "answers": listed[name]} for name, figures in self.figures.items()}


# ---- model and sets -------------------------------------------------------------------------------------------------


def model_folder(given: Path) -> Path:
    """The model's folder: `given`, the final checkpoint of the run there, or what is made of a checkpoint of its way
    (`scripts.analysis.step_model`). Raises UserError, OSError."""
    final = given / "checkpoints" / "final"
    for folder in (given, final):
        if (folder / "config.json").is_file():
            return folder
    if (given / checkpoints.META).is_file():
        return step_model(given)
    if (given / CONFIG).is_file():
        newest = checkpoints.latest(given)
        instead = f"; evaluate its checkpoint {newest[1]}" if newest else ""
        raise ConfigError(
            f"{given}: the run has no model yet ({final} is missing): it is written when a run ends{instead}"
        )
    raise ConfigError(f"{given}: no model there (config.json is missing), and no run ({CONFIG} is missing)")


def run_of(given: Path) -> configs.Config | None:
    """The config of the run that the model is from, if it is a run's folder or its final checkpoint."""
    for folder in (given, *given.resolve().parents[1:2]):
        if (folder / CONFIG).is_file():
            return configs.load_resolved(folder / CONFIG)
    return None


def spec_of(text: str, model: Path) -> dict[str, Any]:
    """The task's spec of a SET, with the model's tokenizer where it needs one and names none. Raises ConfigError."""
    from areal_like.config.registry import knobs
    from areal_like.config.signatures import REQUIRED

    value: Any = parse_override(f"set={text}")[1]
    if isinstance(value, str):
        if value.endswith(".jsonl") and not Path(value).is_file():
            raise ConfigError(f"{text}: no file of that name")
        value = {"name": "jsonl", "path": value} if value.endswith(".jsonl") else {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{text}: a set is FILE.jsonl, a task's name, or {{name: ..., knobs}}")
    needs = knobs("task", value["name"]).get("tokenizer") is REQUIRED
    return {"tokenizer": str(model)} | value if needs else value


def questions(args: argparse.Namespace, model: Path) -> list[Question]:
    """Raises ConfigError, ValueError, OSError."""
    from actors.workflows import for_tasks
    from areal_like.config.registry import bind, build

    run, found = run_of(args.model), []
    if not args.sets and run is None:
        raise ConfigError(f"{args.model} is no run's folder: name a set, e.g. test.jsonl or arithmetic")
    if not args.sets:
        assert run
        task = build("task", run.task, run.run.seed)
        workflow = for_tasks(bind("workflow", configs.heldout_workflow(run)), task)
        for name, rows in own_rows(run, task, args.prompts).items():
            title = f"{run.task['name'] if name == OWN else name} (held-out)"
            found.append(Question(title, task, rows, workflow))
    for text in args.sets:
        spec = spec_of(text, model)
        task = build("task", spec, args.seed)
        whole = text.endswith(".jsonl")
        splits = ("heldout", "train") if whole else ("heldout",)
        rows = [(split, row) for split in splits for row in range(task.size(split))]
        found.append(
            Question(
                text,
                task,
                rows[: args.prompts or (None if whole else 256)],
                bind("workflow", {"name": "single_turn"}),
            )
        )
    return found


def shown(prompt: Prompt) -> str:
    """A prompt for people: its last message, or its tokens."""
    return str(prompt.messages[-1]["content"] if prompt.messages else prompt.tokens.tolist())


# ---- asking ---------------------------------------------------------------------------------------------------------


async def ask(args: argparse.Namespace, question: Question, model: Any) -> list[Answers]:
    """All prompts of a set, as many samples at once as there are slots. Raises UserError if an answer can't be
    verified, or its agent or environment fails."""
    from actors.agents.programs import AgentError
    from actors.engines.torch_engine import TorchEngine
    from actors.reward_pool import RewardError, RewardPool
    from actors.rewards import reward_function
    from areal_like.errors import EpisodeError

    engine = TorchEngine(model, slots=args.slots)
    pool = RewardPool(workers=WORKERS, timeout=TIMEOUT)
    reward = reward_function(question.task, pool, timeout=TIMEOUT)
    done = 0

    async def one(number: int, place: tuple[str, int]) -> Answers:
        nonlocal done
        prompt = question.task.prompt(*place)
        samples = await asyncio.gather(
            *(_sample(args, question, engine, reward, prompt, number, i) for i in range(args.samples))
        )
        done += 1
        said = [sample.tokens[sample.prompt_length :] for sample in samples]
        texts = [prompt.codec.decode(each) if prompt.codec else " ".join(map(str, each)) for each in said]
        rewards = [float(sample.reward) for sample in samples]
        cut = sum(sample.finish == "length" for sample in samples) if question.task.stop_tokens else 0
        return Answers(shown(prompt), str(prompt.answer), texts, rewards, [len(each) for each in said], cut)

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            print(f"{question.name}: {done} of {len(question.rows)} prompts", file=sys.stderr, flush=True)

    telling = asyncio.create_task(tell())
    try:
        return list(await asyncio.gather(*(one(number, place) for number, place in enumerate(question.rows))))
    except RewardError as error:
        raise UserError(f"{question.name}: an answer can't be verified: {error}") from error
    except (AgentError, EpisodeError) as error:
        raise UserError(f"{question.name}: {error}") from error
    finally:
        telling.cancel()
        await engine.close()
        await pool.close()


async def _sample(
    args: argparse.Namespace,
    question: Question,
    engine: Any,
    reward: RewardFunction,
    prompt: Prompt,
    number: int,
    i: int,
) -> Any:
    from areal_like.sampling import stream_key
    from areal_like.types import Limits

    key, longest = stream_key(args.seed, number, i), args.max_tokens or prompt.max_tokens
    limits = Limits(longest, args.temperature, tuple(question.task.stop_tokens), key=key, trained=False)
    sample = await question.workflow(engine, reward, prompt, limits, f"{number} {i}")
    if sample is None:
        raise ConfigError(
            f"{question.name}: the workflow rejected a sample of {' row '.join(map(str, question.rows[number]))}"
        )
    return sample


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(answers: Sequence[Answers], samples: int, right: float) -> dict[str, Any]:
    """Means over prompts, and their intervals."""
    found = estimates([each.rewards for each in answers], powers(samples), right)
    lengths = [length for each in answers for length in each.lengths]
    return {
        "prompts": len(answers),
        "samples": samples,
        **{name: list(estimate) for name, estimate in found.items()},
        "tokens": sum(lengths) / len(lengths),
        "cut": sum(each.cut for each in answers) / len(lengths),
    }


def show(results: Mapping[str, Mapping[str, Any]], args: argparse.Namespace, model: Path) -> None:
    """The table of all sets."""
    how = "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}"
    columns = ["reward", *(f"pass@{k}" for k in powers(args.samples))]
    made = table(f"{model}: {args.samples} answer{'s' * (args.samples > 1)} per prompt, {how}; mean [95 %]",
                 "set", "prompts", *columns, "tokens", "cut")  # fmt: skip
    for name, found in results.items():
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*found[column]) for column in columns]
        made.add_row(
            shortened(name.removeprefix("{name: ").removesuffix("}"), 48),
            str(found["prompts"]),
            *cells,
            f"{found['tokens']:.1f}",
            f"{found['cut']:.0%}",
        )
    console(140).print(made)


def show_answers(name: str, answers: Sequence[Answers], count: int) -> None:
    for each in answers[:count]:
        print(visible(f"\n{name}: {shortened(each.prompt, 200)}\n  wanted: {shortened(each.wanted, 200)}"))
        for text, reward in zip(each.texts, each.rewards, strict=True):
            print(f"  {reward:6.3f}  {visible(shortened(text, 200))}")


def show_against(before: Found, after: Found, args: argparse.Namespace) -> dict[str, dict[str, Paired]]:
    """Print the table of all differences; returns them by set and figure."""
    from .analysis.pairing import compared, meaning_of_p, pairs_of

    def numbers(found: Found, name: str) -> dict[str, list[float]]:
        return by_prompt([each.rewards for each in found.answers[name]], powers(args.samples), args.right)

    pairs = {name: pairs_of(numbers(before, name), numbers(after, name)) for name in after.answers}
    console(140).print(compared(f"{args.model} against {args.against}, prompt by prompt", ("OTHER", "MODEL"), pairs))
    print(meaning_of_p(pair for each in pairs.values() for pair in each.values()))
    return pairs


def evaluate(args: argparse.Namespace, given: Path, asked: Sequence[Question]) -> Found:
    """What the model at `given` says to all sets. Raises UserError, ValueError, OSError."""
    from areal_like.config.registry import build

    vocabulary = max(question.task.vocab_size for question in asked)
    results, answers = {}, {}
    for question in asked:
        begin = time.monotonic()
        model = build("model", {"name": "folder", "path": str(model_folder(given))}, args.seed, vocabulary)
        answers[question.name] = asyncio.run(ask(args, question, model))
        results[question.name] = figures(answers[question.name], args.samples, args.right)
        results[question.name]["seconds"] = time.monotonic() - begin
    return Found(results, answers)


def both(args: argparse.Namespace) -> tuple[Found, Found | None]:
    """What MODEL says, and OTHER. Raises UserError, ValueError, OSError."""
    folders = [model_folder(given) for given in (args.model, args.against) if given]
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    asked = questions(args, folders[0])
    if not args.against:
        return evaluate(args, args.model, asked), None
    others = questions(args, folders[1]) if args.sets else asked  # a file is read with the model's own tokenizer
    for mine, other in zip(asked, others, strict=True):
        if [shown(mine.task.prompt(*row)) for row in mine.rows] != [
            shown(other.task.prompt(*row)) for row in other.rows
        ]:
            raise ConfigError(f"{mine.name}: the two models' tokenizers leave them other prompts: nothing to compare")
    return evaluate(args, args.model, asked), evaluate(args, args.against, others)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 1.0
    try:
        found, other = both(args)
    except (UserError, ValueError, OSError) as error:
        refuse(error)
    for name, answers in found.answers.items():
        show_answers(name, answers, args.show)
    show(found.figures, args, args.model)
    data = found.data()
    if other:
        show(other.figures, args, args.against)
        pairs = show_against(other, found, args)
        for name, against in other.data().items():
            differences = {figure: pair._asdict() for figure, pair in pairs[name].items()}
            data[name] |= {"against": against, "differences": differences}
    write_json(args.json, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
