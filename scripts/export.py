"""Write a run's model as a folder that transformers, vLLM, SGLang and others read: `areal-like export RUN --to FOLDER`.

It is the model of the run's end, or else of its newest checkpoint; with `--best` of the best one (`checkpoint.best`).
Beside the weights, in the published dtype, it has the tokenizer with its chat template and the generation config.
"""

import os
import shutil
import sys
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.registry import ConfigError
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG

from .console.arguments import command, refusing
from .eval import write_model


def source_of(run: Path, best: bool) -> Path:
    """The folder of a model (config.json), or of a checkpoint. Raises ConfigError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: no run folder ({CONFIG} is missing)")
    if best:
        found = checkpoints.best(run)
        if found is None:
            raise ConfigError(f"{run} has no best checkpoint: set checkpoint.best, such as heldout/reward, for the run")
        return found
    newest, final = checkpoints.latest(run), run / "checkpoints" / "final"
    if (final / "config.json").is_file():
        return final
    if newest is None:
        raise ConfigError(f"{run} has no checkpoint yet: wait for step checkpoint.every of the run, or for its end")
    return newest[1]


def export(run: Path, target: Path, best: bool = False) -> Path:
    """Returns the folder that the model is from. Raises UserError, OSError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to: {target} exists; name a new folder")
    source = source_of(run, best)
    beside = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}.tmp")
    try:
        if (source / "config.json").is_file():
            shutil.copytree(source, beside)
        else:
            checkpoints.check(source)
            write_model(configs.load_resolved(run / CONFIG), source, beside)
        beside.replace(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return source


def main(argv: list[str] | None = None) -> int:
    parser = command("export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--best", action="store_true", help="the model of the best checkpoint (checkpoint.best)")
    args = parser.parse_args(argv)
    with refusing():
        source = export(args.run, args.to, args.best)
        print(f"{args.to}: the model of {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
