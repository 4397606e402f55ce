"""Every loss on the same trajectories: `python -m scripts.score RUN [--weights along|initial|newest]`.

Computes the gradient of each loss on each recorded batch of a run (`buffer.keep_journal=true`), at the same weights:
cosines between the losses, norm, variance over batches, effective sample size, overall and by staleness. Writes
`score.json` and `score.md` to `RUN/score/`.

`--weights along` scores each batch at the weights that trained it: it repeats the run's training between the scores, so
staleness is that of the run, and compares the last weights with the run's. `initial` and `newest` (checkpoint) keep the
weights fixed; staleness is still the recorded one. A loss has its defaults, the run's own loss
those of the run. A CPU is enough.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.config import run_config as configs
from areal_like.config.layers import read
from areal_like.config.registry import COMPONENTS, bind, check, marks
from areal_like.config.run_config import Config, ConfigError
from areal_like.places import CONFIGS
from areal_like.run import checkpoints
from areal_like.types import Batch

from .analysis.gradient_statistics import GradientStatistics, summarise
from .console.arguments import command, positive

SCORING_LEARNER = "learners.scoring:ScoringLearner"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("score", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a run recorded with buffer.keep_journal=true")
    parser.add_argument(
        "--weights",
        choices=["along", "initial", "newest"],
        default="along",
        help="see above",
    )
    parser.add_argument("--batches", type=positive, metavar="N", help="only the first N batches")
    parser.add_argument("--loss", action="append", metavar="NAME", help="only this loss (may be repeated)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: RUN/score)")
    return parser.parse_args(argv)


def loss_specs(config: Config, chosen: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Name → spec of the losses to score. Raises ConfigError for a name that is no loss."""
    specs = {}
    usual = [name for name in COMPONENTS["loss"] if "supervised" not in marks("loss", name)]
    for name in chosen or usual:
        shipped = CONFIGS / "loss" / f"{name}.yaml"
        if name == config.loss["name"]:
            specs[name] = configs.select(config, "loss")
        else:
            specs[name] = read(shipped)["loss"] if shipped.is_file() else {"name": name}
        check("loss", specs[name])
    return specs


def recorded(run: Path, config: Config) -> Iterator[Batch]:
    """The batches of a run as its learner saw them. Raises JournalError."""
    from areal_like.wire.groups import decode_group
    from buffer.replay_server import recorded_batches
    from buffer.segment_file import load

    for index, (groups, allowed) in enumerate(recorded_batches(run / "journal")):
        decoded = [decode_group(head, load(payload)) for head, payload in groups]
        batch = Batch(index, index // config.weight_sync_interval, decoded, allowed)
        for sample in batch.samples:
            sample.mask_tokens_before(allowed)
        yield batch


def prepare(args: argparse.Namespace) -> tuple[Config, dict[str, dict[str, Any]], Path | None]:
    """The run's config, the losses' specs and the checkpoint to load. Raises ConfigError, JournalError."""
    if not (args.run / "config.yaml").is_file():
        raise ConfigError(f"{args.run}: no run folder (config.yaml is missing)")
    config = configs.load_resolved(args.run / "config.yaml")
    if config.learner["name"] != "torch":
        raise ConfigError(
            f"{args.run} was trained by learner={config.learner['name']}, which has no gradients to score"
        )
    specs, newest = loss_specs(config, args.loss), checkpoints.latest(args.run)
    if args.weights == "newest" and newest is None:
        raise ConfigError(f"{args.run} has no checkpoint; --weights=initial and --weights=along need none")
    if next(recorded(args.run, config), None) is None:
        raise ConfigError(f"{args.run} has no recorded batches: it needs buffer.keep_journal=true and a train step")
    return config, specs, newest[1] if newest and args.weights == "newest" else None


def score(
    args: argparse.Namespace, config: Config, specs: dict[str, dict[str, Any]], checkpoint: Path | None
) -> tuple[GradientStatistics, str]:
    """Score the recorded batches. Also returns the digest of the final weights."""
    from learners.build import build_trainer

    alone = configs.replace(configs.replace(config, "learner.name", SCORING_LEARNER), "learner.ranks", 1)
    learner: Any = build_trainer(alone)
    if checkpoint:
        learner.load_weights(checkpoint)
    losses = {name: bind("loss", spec) for name, spec in specs.items()}
    statistics, told = GradientStatistics(list(losses)), time.monotonic()
    for batch in recorded(args.run, config):
        if args.batches is not None and batch.index >= args.batches:
            break
        statistics.add(learner.score(batch, losses))
        if args.weights == "along":
            learner.train(batch)
        if time.monotonic() - told > 5.0:
            told = time.monotonic()
            print(f"{batch.index + 1} batches scored", file=sys.stderr, flush=True)
    return statistics, learner.snapshot().digest()


def repeated(run: Path, steps: int, digest: str) -> bool | None:
    """Did training along the record end in the run's own weights, bit for bit? None if the run did not end there."""
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    return summary["weights_digest"] == digest if summary.get("steps") == steps else None


def write(folder: Path, statistics: GradientStatistics, about: dict[str, Any]) -> str:
    """`score.json`, `score.md`; returns the markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    found = about | statistics.as_data()
    (folder / "score.json").write_text(json.dumps(_plain(found), indent=1) + "\n")
    text = f"# Losses on the same trajectories\n\n{about['batches']} batches of {about['run']}, weights: "
    text += f"{about['weights']}.\n\n{summarise(statistics)}"
    if about.get("repeated") is False:
        text += "\nTraining along the record has not led to the run's own weights: another machine, another number "
        text += "of ranks or threads, or other code.\n"
    if about.get("repeated"):
        text += "\nTraining along the record has led to the run's own weights, bit for bit.\n"
    (folder / "score.md").write_text(text)
    return text


def _plain(value: Any) -> Any:
    """JSON has no NaN: null; arrays become lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        config, specs, checkpoint = prepare(args)
        statistics, digest = score(args, config, specs, checkpoint)
        about = {"run": str(args.run), "weights": args.weights, "batches": statistics.batches, "losses": specs}
        if args.weights == "along":
            about["repeated"] = repeated(args.run, statistics.batches, digest)
        folder = args.out or args.run / "score"
        print(write(folder, statistics, about))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"score.json and score.md are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
