"""Evaluate a model: `areal-like eval MODEL [SET ...] [--against OTHER]`.

MODEL is a run's folder, one of its checkpoints (`RUN/checkpoints/step-N`), or a Hugging Face folder. A SET is a file
(read and asked as the run's own), a task's name (its held-out rows) or a spec (`{name: jsonl, path: a.csv, reward:
exact}`); without one: the run's own. pass@k is unbiased (Chen et al., arXiv 2107.03374), intervals (95 %) are over
different prompts. `--against OTHER` asks a second model the same, and tests the differences by prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like import estimates
from areal_like.config import run_config as configs
from areal_like.config.heldout import heldout_workflow, task_spec
from areal_like.config.layers import parse_override
from areal_like.config.registry import bind, build, knobs
from areal_like.config.run_config import ConfigError
from areal_like.config.schema import OWN
from areal_like.config.signatures import REQUIRED
from areal_like.errors import EpisodeError, UserError
from areal_like.hub import LOCAL
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG
from areal_like.stops import NO_STOPS, Stops, stops_of
from areal_like.tasks.heldout import own_rows

from .console.arguments import amount, command, json_file, positive, refusing
from .console.output import console, shortened, table, visible, write_json

if TYPE_CHECKING:
    from areal_like.interfaces import Task
    from areal_like.types import Prompt

TIMEOUT, WORKERS, RIGHT = 30.0, 2, 1.0
"""Of verifiers: seconds and processes. Least reward of a right answer."""
OF_WEIGHTS = ("name", "lora", "publish_dtype")
"""Knobs of `learner=torch` that choose the weights; the others are about training."""
PAIRED = {"difference": "+.3f", "low": "+.3f", "high": "+.3f", "better": "d", "worse": "d", "p": ".3f"}
"""Columns of a comparison of two models (`paired`), and their formats."""


@dataclass(frozen=True)
class Answers:
    """Answers to one prompt and its copies: texts, rewards with their parts, lengths in tokens, and how many were
    truncated at the longest length; without those `unscored`, whose reward is None."""

    prompt: str
    wanted: str
    texts: list[str]
    rewards: list[float]
    parts: list[dict[str, float]]
    lengths: list[int]
    truncated: int
    unscored: int


@dataclass(frozen=True)
class Question:
    """A set of prompts, and the spec of the `workflow` that answers; `tokenized`: the model's tokenizer makes its
    tokens; `longest`: most tokens of an answer."""

    name: str
    task: Task
    rows: list[tuple[str, int]]
    workflow: Mapping[str, Any]
    tokenized: bool = False
    stops: Stops = NO_STOPS
    longest: int | None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        return [self.task.prompt(*row) for row in self.rows]

    def shown(self) -> list[str]:
        """The prompts for people: the last message of each, or its tokens."""
        return [str(each.messages[-1]["content"] if each.messages else each.tokens.tolist()) for each in self.prompts]

    @cached_property
    def copies(self) -> list[list[int]]:
        """Of each different prompt its places in `rows`. Beyond one turn the answer may choose what the model meets."""
        alone, found = self.workflow["name"] == "single_turn", dict[tuple[bytes, str], list[int]]()
        for place, each in enumerate(self.prompts):
            found.setdefault((each.tokens.tobytes(), "" if alone else repr(each.answer)), []).append(place)
        return list(found.values())


def model_folder(given: Path) -> Path:
    """The model's folder: `given`, its final checkpoint, or a checkpoint's `step_model`. Raises UserError, OSError."""
    final = given / "checkpoints" / "final"
    for folder in (given, final):
        if (folder / "config.json").is_file():
            return folder
    if (given / checkpoints.META).is_file():
        return step_model(given)
    if (given / CONFIG).is_file():
        newest = checkpoints.latest(given)
        instead = f"; evaluate its checkpoint {newest[1]}" if newest else ""
        raise ConfigError(f"{given}: no model yet ({final} is missing): it is written when a run ends{instead}")
    raise ConfigError(f"{given}: no model there (config.json is missing), and no run ({CONFIG} is missing)")


def step_model(step: Path) -> Path:
    """The model's folder of a checkpoint, written if it is not there. The checkpoint holds the state of the learner's
    ranks: its learner, built here on the CPU as one rank, takes the weights of all files, and writes them as published.
    Raises UserError (ConfigError: no run around it, a learner without a model) and OSError."""
    target, file = step / "model", step.resolve().parents[1] / CONFIG
    if (target / "config.json").is_file():
        return target
    if not file.is_file():
        raise ConfigError(f"{step} holds a learner's state; {file} is missing: leave it in its run's folder")
    beside = target.with_name(f".model.{os.getpid()}.tmp")
    try:
        write_model(configs.load_resolved(file), step, beside)
        if not (target / "config.json").is_file():
            beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def write_model(config: configs.Config, step: Path, folder: Path) -> None:
    from learners.build import build_trainer

    task: Any = build("task", config.task, config.run.seed)
    if config.learner["name"] == "torch":
        spec = {knob: value for knob, value in configs.select(config, "learner").items() if knob in OF_WEIGHTS}
        model = build("model", config.model, config.run.seed, task.vocab_size)
        any_loss, advantage = bind("loss", {"name": "dg"}), bind("advantage", {"name": "group"})
        trainer: Any = build("learner", spec, model, any_loss, advantage, 1.0, config.run.seed)
    else:
        trainer = build_trainer(config)
    try:
        getattr(trainer, "load_weights", trainer.load_state)(step)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{step}: the learner's state can't be read: {type(error).__name__}: {error}") from error
    trainer.save(str(folder))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{step}: learner={config.learner['name']} trains no model that could be asked")
    if hasattr(task, "save_tokenizer"):
        task.save_tokenizer(str(folder))


def run_of(given: Path) -> configs.Config | None:
    """The config of the run that the model is from, if it is a run's folder or its final checkpoint."""
    for folder in (given, *given.resolve().parents[1:2]):
        if (folder / CONFIG).is_file():
            return configs.load_resolved(folder / CONFIG)
    return None


def spec_of(text: str, model: Path, run: configs.Config | None) -> dict[str, Any]:
    """The task's spec of a SET: a file is read like that of the `run`, with the model's tokenizer; another task gets
    it if it needs one and names none. Raises ConfigError."""
    value: Any = parse_override(f"set={text}")[1]
    if isinstance(value, str) and value.endswith(LOCAL):
        return {**(task_spec(run, value) if run else {"name": "jsonl", "path": value}), "tokenizer": str(model)}
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{text}: a set is FILE.jsonl (.csv, .parquet), a task's name, or {{name: ..., knobs}}")
    needs = knobs("task", value["name"]).get("tokenizer") is REQUIRED
    return {"tokenizer": str(model)} | value if needs else value


def questions(args: argparse.Namespace, model: Path) -> list[Question]:
    """Raises ConfigError, ValueError, OSError."""
    run, found = run_of(args.model), []
    stops, longest = (stops_of(run.sampling), run.sampling.max_new_tokens) if run else (NO_STOPS, None)
    if not args.sets:
        if run is None:
            raise ConfigError(f"{args.model} is no run's folder: name a set, e.g. test.jsonl")
        task = build("task", run.task, run.run.seed)
        for name, rows in own_rows(run, task, args.prompts).items():
            title = f"{run.task['name'] if name == OWN else name} (held-out)"
            tokenized = "tokenizer" in str(run.task)  # a mixture names it in its tasks
            found.append(Question(title, task, rows, heldout_workflow(run), tokenized, stops, longest))
    for text in args.sets:
        spec = spec_of(text, model, run)
        task = build("task", spec, args.seed)
        whole = text.endswith(LOCAL)
        rows = [(split, row) for split in (OWN, "train")[: 1 + whole] for row in range(task.size(split))]
        rows = rows[: args.prompts or (None if whole else 256)]
        workflow = heldout_workflow(run) if run and whole else {"name": "single_turn"}
        found.append(Question(text, task, rows, workflow, "tokenizer" in spec, stops, longest))
    return found


def check_vocabulary(given: Path, folder: Path, asked: Sequence[Question]) -> None:
    """Refuse a model with other tokens than a task's, unless its own run trained on them. Raises ConfigError."""
    size, own = json.loads((folder / "config.json").read_bytes()).get("vocab_size"), run_of(given)
    for question in asked:
        wanted = question.task.vocab_size
        if size is None or size == wanted or (question.tokenized and size > wanted):  # embeddings may be padded
            continue
        if own is None or build("task", own.task, own.run.seed).vocab_size != wanted:
            raise ConfigError(f"{given}: got a vocabulary of {size} tokens, expected the {wanted} of {question.name}")


async def ask(args: argparse.Namespace, question: Question, model: Any) -> list[Answers]:
    """Ask all prompts of a set. Raises UserError if an answer can't be verified, none has a reward, or an agent or
    environment fails."""
    from actors.agents.programs import AgentError
    from actors.engines.torch_engine import TorchEngine
    from actors.recorder import Recorder
    from actors.reward_pool import NoReward, RewardError, RewardPool
    from actors.rewards import reward_function
    from areal_like.sampling import stream_key
    from areal_like.types import Limits

    workflow, engine = bind("workflow", question.workflow), TorchEngine(model, slots=args.slots)
    pool = RewardPool(workers=WORKERS, timeout=TIMEOUT)
    reward, task = reward_function(question.task, pool, timeout=TIMEOUT, on_error="drop"), question.task
    shown, prompts = question.shown(), question.prompts

    async def sample(number: int, i: int) -> Any:
        prompt = question.stops.cut(prompts[number])
        key, longest = stream_key(args.seed, number, i), args.max_tokens or question.longest or prompt.max_tokens
        limits = Limits(longest, args.temperature, tuple(task.stop_tokens), key=key, trained=False)
        limits, recorder = question.stops.within(limits, prompt), Recorder(engine, reward)
        try:
            made = await workflow(recorder, recorder.reward, prompt, limits, f"{number} {i}")
        except NoReward:
            return None
        if made is None:
            raise ConfigError(f"{question.name}: the workflow rejected a sample of row {question.rows[number][1]}")
        made.parts = recorder.parts | made.parts
        return made

    async def answers(copies: list[int]) -> Answers:
        prompt = prompts[copies[0]]
        made = await asyncio.gather(*(sample(number, i) for number in copies for i in range(args.samples)))
        samples = [each for each in made if each is not None]
        responses = [each.tokens[each.prompt_length :] for each in samples]
        texts = [prompt.codec.decode(each) if prompt.codec else " ".join(map(str, each)) for each in responses]
        full = sum(each.finish == "length" for each in samples) if task.stop_tokens else 0
        rewards, parts = [float(each.reward) for each in samples], [each.parts for each in samples]
        wanted = " | ".join(dict.fromkeys(str(prompts[number].answer) for number in copies))
        counts = list(map(len, responses)), full, len(made) - len(samples)
        return Answers(shown[copies[0]], wanted, texts, rewards, parts, *counts)

    try:
        found = list(await asyncio.gather(*map(answers, question.copies)))
        if not any(each.rewards for each in found):
            raise UserError(f"{question.name}: the reward of every answer is None")
        return found
    except (RewardError, AgentError, EpisodeError) as error:
        raise UserError(f"{question.name}: {error}") from error
    finally:
        await engine.close()
        await pool.close()


def evaluate(args: argparse.Namespace, folder: Path, asked: Sequence[Question]) -> dict[str, list[Answers]]:
    """Set → answers of the model in a folder. Raises UserError, ValueError, OSError."""
    answers = {}
    for question in asked:
        count = f"{len(question.rows)} prompts, {len(question.copies)} different"
        print(f"{folder}: {question.name}, {count}", file=sys.stderr, flush=True)
        model = build("model", {"name": "folder", "path": str(folder)}, args.seed, question.task.vocab_size)
        answers[question.name] = asyncio.run(ask(args, question, model))
    return answers


def figures(answers: Sequence[Answers], args: argparse.Namespace) -> dict[str, Any]:
    """Means over prompts, [mean, low, high] of the reward, of each of its parts, and of each pass@k."""
    lengths = [length for each in answers for length in each.lengths]
    rewards = [each.rewards for each in answers if each.rewards]
    parts = {name for each in answers for sample in each.parts for name in sample}
    of_part = {name: [[one[name] for one in each.parts if name in one] for each in answers] for name in sorted(parts)}
    means = {f"part/{name}": estimates.figures(list(filter(None, of_part[name])), (), RIGHT) for name in of_part}
    return {
        "prompts": len(rewards),
        "samples": args.samples,
        "unscored": sum(each.unscored for each in answers),
        **estimates.figures(rewards, estimates.powers(min(map(len, rewards))), RIGHT),
        **{name: found["reward"] for name, found in means.items()},
        "tokens": sum(lengths) / len(lengths),
        "truncated": sum(each.truncated for each in answers) / len(lengths),
    }


def show(results: Mapping[str, Mapping[str, Any]], args: argparse.Namespace, model: Path) -> None:
    how = "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}"
    title = f"{model}: {args.samples} answer{'s' * (args.samples > 1)} per prompt, {how}"
    made = table(title, "set", "prompts", "figure", "mean", "low", "high", "tokens", "truncated")
    for name, found in results.items():
        size, of_answers = str(found["prompts"]), (f"{found['tokens']:.1f}", f"{found['truncated']:.0%}")
        for figure in (each for each in found if each == "reward" or each.startswith(("pass@", "part/"))):
            made.add_row(shortened(name, 24), size, figure, *(f"{each:.3f}" for each in found[figure]), *of_answers)
    console().print(made)
    for name, found in results.items():
        if found["unscored"]:
            print(visible(f"{shortened(name, 24)}: left out {found['unscored']} answers without a reward"))


def show_answers(name: str, answers: Sequence[Answers]) -> None:
    for each in answers:
        print(visible(f"\n{name}: {shortened(each.prompt, 200)}\n  wanted: {shortened(each.wanted, 200)}"))
        for text, reward in zip(each.texts, each.rewards, strict=True):
            print(f"  {reward:6.3f}  {visible(shortened(text, 200))}")


def paired(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Compare two models by a number for each prompt, in the same order, by Student's paired test: means, their
    difference with its interval of 95 %, on how many prompts the second is better or worse, and the two-sided p."""
    from scipy.stats import ttest_rel

    changes, found = np.subtract(after, before), ttest_rel(after, before)
    low, high = found.confidence_interval(0.95)
    return {
        "before": float(np.mean(before)),
        "after": float(np.mean(after)),
        "difference": float(np.mean(changes)),
        "low": float(low),
        "high": float(high),
        "better": int((changes > 0).sum()),
        "worse": int((changes < 0).sum()),
        "p": float(found.pvalue) if changes.any() else 1.0,
    }


def differences(before: Sequence[Answers], after: Sequence[Answers]) -> dict[str, dict[str, float]]:
    """Of the prompts to which both models have answers with a reward. Raises ConfigError if there is none."""
    pairs = [(a.rewards, b.rewards) for a, b in zip(before, after, strict=True) if a.rewards and b.rewards]
    if not pairs:
        raise ConfigError("--against: no prompt has an answer with a reward of both models")
    ks = estimates.powers(min(len(rewards) for pair in pairs for rewards in pair))
    old, new = (estimates.by_prompt(side, ks, RIGHT) for side in zip(*pairs, strict=True))
    return {figure: paired(old[figure], new[figure]) for figure in old}


def show_differences(title: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    made = table(title, "set", "figure", *PAIRED)
    for name, found in results.items():
        for figure, pair in found["differences"].items():
            made.add_row(shortened(name, 14), figure, *(f"{pair[key]:{how}}" for key, how in PAIRED.items()))
    console().print(made)


def main(argv: list[str] | None = None) -> int:
    parser = command("eval", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run's folder, or a model's (config.json)")
    parser.add_argument("sets", nargs="*", metavar="SET", help="a file (as the run's), a task's name, or {name: ...}")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="a run's or a model's folder to compare with")
    parser.add_argument("--prompts", type=positive, help="prompts per set (default: all of a file, else 256)")
    parser.add_argument("--samples", type=positive, default=1, help="answers per prompt (default: 1)")
    parser.add_argument("--temperature", type=amount, help="of sampling (default: the run's; 0 for one sample, else 1)")
    parser.add_argument("--max-tokens", type=positive, help="longest answer (default: the task's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of samples and of the choice of rows (default: 0)")
    parser.add_argument("--slots", type=positive, default=64, help="sequences at once (default: 64)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="number of prompts to print (default: 0)")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="file for figures, answers (-: standard output)")
    args = parser.parse_args(argv)
    models = [given for given in (args.model, args.against) if given]
    with refusing():
        if args.temperature is None:
            run = run_of(args.model)
            args.temperature = (run.eval.temperature if run else 0.0) or float(args.samples > 1)
        folders = [model_folder(given) for given in models]
        asked = [questions(args, folder) for folder in folders]  # a file is read with the model's own tokenizer
        for given, folder, own in zip(models, folders, asked, strict=True):
            check_vocabulary(given, folder, own)
        if [(each.shown(), each.copies) for each in asked[0]] != [(each.shown(), each.copies) for each in asked[-1]]:
            raise ConfigError("--against: the tokenizers of the two models leave them other prompts")
        answers = [evaluate(args, folder, own) for folder, own in zip(folders, asked, strict=True)]
    data = [{name: figures(each, args) for name, each in found.items()} for found in answers]
    if args.against:
        for name, each in answers[0].items():
            data[0][name] |= {"against": data[1][name], "differences": differences(answers[1][name], each)}
    if args.json != Path("-"):
        for name, each in answers[0].items():
            show_answers(name, each[: args.show])
        for given, found in zip(models, data, strict=True):
            show(found, args, given)
        if args.against:
            show_differences(f"{args.model} minus {args.against}, prompt by prompt, by the first one's task", data[0])
    for found, of_model in zip(data, answers, strict=True):
        for name, each in of_model.items():
            found[name]["answers"] = [asdict(answer) for answer in each]
    write_json(args.json, data[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
