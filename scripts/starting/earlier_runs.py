"""Existing run folders: continue one (`resume`), train on its record (`replay`), reserve it (`lock`)."""

import fcntl
import re
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from areal_like.config import run_config as configs
from areal_like.config.registry import COMPONENTS, build, with_defaults
from areal_like.config.run_config import Config, ConfigError
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG, LOCK, NEXT, SUMMARY, data_of, progress_of, reason_to_stop
from learners.schedules import Schedule

MUST_AGREE = (
    *("run.seed", "task", "group_reward", "model", "sizing", "groups_per_batch", "weight_sync_interval", "sampling"),
    *("advantage", "loss", "batch_policy", "filter", "staleness_policy", "inject_staleness"),
)
"""Keys that a resumed run may not change: its journal holds samples of versions that training makes again."""

REPLAYS_WITH = ("run.seed", "task", "model", "groups_per_batch", "weight_sync_interval", "sampling")
"""Keys that must be the same for a replay."""

LEARNER_MAY_CHANGE = (
    *("lr", "schedule", "warmup_steps", "schedule_steps", "weight_decay", "betas", "eps", "clip_grad"),
    *("entropy_bonus", "kl_loss", "kl_loss_estimator", "kl_reward", "normalise"),
    *("overlong_penalty", "overlong_limit", "overlong_buffer", "overlong_filter", "reward_scale", "reward_clip"),
    *("num_minibatches", "num_minibatch_epochs", "micro_batch_tokens", "collective_timeout"),
    *("max_logits", "checkpoint_activations", "compile", "compute_dtype", "device", "threads", "param_dtype"),
)
"""Knobs of the learner that a checkpoint's state does not depend on. Samples of weights that training will not make
again are then rolled out again (`buffer.main.other_settings`)."""

OF_A_START = ("resume", "replay", "run.changed_data", "run.name", "run.dir", "security.key_folder")
"""Settings of a start, not of the run."""

ORPHAN_SECONDS = 10.0
"""Seconds within which processes end after their starter was killed."""


def find_run_to_resume(config: Config, stem: str) -> Path | None:
    """The folder that `resume` names; None: `auto` finds no run of its name, mode, scheduler. Raises ConfigError."""
    if config.resume != "auto":
        return _run_folder("resume", config)
    # As `scripts.train` names runs: quickstart, quickstart-mode=sync-lr=1e-3; but quickstart-long is another config.
    name = config.run.name and re.escape(config.run.name)
    named = re.compile(name or rf"{re.escape(stem)}(-\w+=.*)?-\d{{8}}-\d{{6}}(-\d+)?")
    found = [path.parent for path in Path(config.run.dir).glob(f"*/{CONFIG}") if named.fullmatch(path.parent.name)]
    unfinished = [folder for folder in found if not (folder / SUMMARY).exists()]
    unfinished.sort(key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)
    keys = ["mode", "scheduler"]
    alike = (each for each in unfinished if not configs.differences(configs.load_resolved(each / CONFIG), config, keys))
    return next(alike, None)


def _run_folder(key: str, config: Config) -> Path:
    folder = Path(configs.select(config, key) or "")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{key}={configs.select(config, key)}: no run folder ({CONFIG} is missing)")
    return folder


def reopen_run_folder(config: Config, folder: Path) -> Config:
    """Check that the config fits what the folder holds. Raises ConfigError."""
    earlier = configs.load_resolved(folder / CONFIG)
    if config.run.name not in (None, folder.name, earlier.run.name):  # the last: a folder that was renamed
        raise ConfigError(f"run.name={config.run.name}: {folder} is resumed under its own name; leave run.name out")
    old, new = ({key: _value(each, key) for key in MUST_AGREE} | _state_of_learner(each) for each in (earlier, config))
    hint = "repeat the setting of then, or start a new run (the learner's lr, schedule and others may change)"
    _refuse_change("resume", old, new, folder, hint)

    # Groups in the buffer were admitted under the earlier bound.
    then, now = (build("scheduler", each.scheduler, build("sizing", each.sizing)) for each in (earlier, config))
    if now.max_staleness < then.max_staleness:
        raise ConfigError(
            f"resume: the staleness bound was {then.max_staleness} in {folder} and is {now.max_staleness} now: its "
            "groups may be older than that; start a new run to lower it"
        )
    _check_journal(earlier, config, folder)
    _check_work_left(config, folder)
    if earlier.buffer.keep_journal:  # a record without its beginning is useless
        config = configs.replace(config, "buffer.keep_journal", True)
    return configs.replace(config, "run.name", folder.name)


def changes(config: Config, folder: Path) -> list[str]:
    """How the config differs from the earlier one of the folder, in words, and what that does to the learning rate."""
    keys, earlier = [field.name for field in fields(Config)], configs.load_resolved(folder / CONFIG)
    found = configs.differences(earlier, config, keys)
    found = [text for text in found if text.partition("=")[0] not in OF_A_START]
    done = checkpoints.steps_done(folder)
    if not done or not earlier.learner.name == config.learner.name == "torch":
        return found
    (then, per_step), (now, _) = schedule_of(earlier), schedule_of(config)
    before, after = then.rate(done * per_step - 1), now.rate(done * per_step)
    jumps = then.rate(done * per_step) != after
    return (
        [*found, f"a learning rate of {after:.3g} in step {done + 1} ({before:.3g} in step {done})"] if jumps else found
    )


def schedule_of(config: Config) -> tuple[Schedule, int]:
    """The schedule of learning rates, and optimizer steps per train step."""
    known = _value(config, "learner")
    per_step = known["num_minibatches"] * known["num_minibatch_epochs"]
    total = (known["schedule_steps"] or 0) * per_step
    return Schedule(known["lr"], known["schedule"], known["warmup_steps"], total), per_step


def check_data(config: Config, folder: Path, now: Mapping[str, str]) -> None:
    """Raises ConfigError where the rows of the folder's run have changed, unless `run.changed_data` allows that. A
    file of held-out rows may not change: it could name prompts that have been trained."""
    before, key = data_of(folder) if now else {}, "run.changed_data"
    for split in sorted(before.keys() | now.keys()) if before else ():
        fixed = split.endswith("heldout_path")
        if (old := before.get(split)) != (new := now.get(split)) and (fixed or config.run.changed_data == "refuse"):
            hint = "put the rows back" + ("" if fixed else f", or go on with {key}=allow")
            raise ConfigError(f"resume: task {split}: {folder} had {old}, and now there are {new}; {hint}", key)


def _value(config: Config, key: str) -> Any:
    value = configs.select(config, key)
    return with_defaults(key, value) if key in COMPONENTS else value


def _knobs(key: str, value: Any) -> list[tuple[str, Any]]:
    """The value's knobs by their dotted keys, a component's name first; itself if it has none."""
    section = {"name": value["name"], **value} if isinstance(value, dict) and "name" in value else value
    return [(f"{key}.{knob}", each) for knob, each in section.items()] if isinstance(section, dict) else [(key, value)]


def _state_of_learner(config: Config) -> dict[str, Any]:
    """Knobs that its checkpoints depend on."""
    known = {"name": ""} | _value(config, "learner")  # the name is compared first
    return {f"learner.{knob}": value for knob, value in known.items() if knob not in LEARNER_MAY_CHANGE}


def _refuse_change(verb: str, before: Mapping[str, Any], now: Mapping[str, Any], folder: Path, hint: str) -> None:
    """Raises ConfigError."""
    old_knobs, new_knobs = ({knob: value for key, section in each.items() for knob, value in _knobs(key, section)}
                            for each in (before, now))  # fmt: skip
    for key in dict.fromkeys([*old_knobs, *new_knobs]):
        if (old := old_knobs.get(key)) != (new := new_knobs.get(key)):
            raise ConfigError(f"{verb}: {key} was {old} in {folder} and is {new} now; {hint}", key)


def _check_journal(earlier: Config, config: Config, folder: Path) -> None:
    """Without a journal it is unknown which prompts were trained, unless none were. Raises ConfigError."""
    metrics = folder / "metrics.jsonl"
    stepped = metrics.is_file() and metrics.stat().st_size > 0
    trained = stepped or (folder / SUMMARY).exists() or checkpoints.latest(folder) is not None
    before, now = earlier.buffer.journal, config.buffer.journal
    if "off" in (before, now) and (before != "off" or trained):
        raise ConfigError(
            f"resume: buffer.journal was {before} in {folder} and is {now} now; without a journal prompts would be "
            "trained twice: start a new run (model=folder model.path=... begins with saved weights)"
        )


def _check_work_left(config: Config, folder: Path) -> None:
    """Raises ConfigError, but not for a run killed after its last step, which still needs its final evaluation."""
    found, run = checkpoints.latest(folder), config.run
    if not found or ((steps := found[0]) <= run.steps and not (folder / SUMMARY).exists()):
        return
    meta = progress_of(folder, checkpoints.progress(found[1]), steps)
    if reason := reason_to_stop(config, steps, meta["seconds"], meta["evaluations"]):
        asked = (
            f"run.steps={run.steps}; raise it"
            if steps >= run.steps
            else f"{reason}; raise run.target_reward, run.max_seconds or run.early_stop, or set it to null,"
        )
        raise ConfigError(f"resume: nothing to do: {steps} train steps are done in {folder}; {asked} to train on")


def holds_progress(config: Config, folder: Path) -> bool:
    """Does the folder hold anything that a resume could continue?"""
    from buffer.events import Begin
    from buffer.journal import scan

    if config.buffer.journal == "off" or not (folder / CONFIG).is_file():
        return False
    try:
        events = (each.event for each in scan(folder / "journal"))
        return bool(checkpoints.latest(folder)) or not all(isinstance(event, Begin) for event in events)
    except (ValueError, OSError):
        return False


def fit_to_replay(config: Config) -> Config:
    """Check that the config, but for loss, advantage and learner, fits; train no more steps. Raises ConfigError."""
    from buffer.replay_server import branches, count_batches

    folder = _run_folder("replay", config)
    earlier = configs.load_resolved(folder / CONFIG)
    before, now = ({key: _value(each, key) for key in REPLAYS_WITH} for each in (earlier, config))
    _refuse_change("replay", before, now, folder, "it must be the same")
    differs = configs.differences(earlier, config, ["learner", "loss", "advantage"])
    if (found := branches(folder / "journal")) and not differs:
        resumed = "; ".join(f"after step {step}: {changed}" for step, changed in found)
        raise ConfigError(
            f"replay: {folder} was resumed with other settings ({resumed}), so no single config reproduces its weights."
            " Its batches can be trained on with another learner or loss: set what you want to compare, e.g. learner.lr"
        )
    config = configs.replace(config, "replay", str(folder.resolve()))
    return configs.replace(config, "run.steps", min(config.run.steps, count_batches(folder / "journal")))


def lock(folder: Path) -> TextIO:
    """Lock the folder until this process ends, and wait for the end of processes whose starter was killed. Raises
    ConfigError if another run has the folder."""
    file, deadline = (folder / LOCK).open("w", encoding="utf-8"), time.monotonic() + ORPHAN_SECONDS
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in filter(Path.is_file, (folder / CONFIG, folder / NEXT / CONFIG)):
            with path.open(encoding="utf-8") as of_roles:
                _wait_for(of_roles, deadline)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{folder} is in use by another run; wait for it, or end it") from None
    return file


def _wait_for(file: TextIO, deadline: float) -> None:
    """Raises BlockingIOError."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
