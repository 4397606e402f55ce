"""`RUN/samples/`: some of the model's samples, kept for people. One JSON object per line is one sample.

    trained.jsonl   groups of each train step, with the learner's numbers per token
    dropped.jsonl   groups that were not trained, with the reason
    heldout.jsonl   every held-out answer

The learner writes the first file, the buffer the others. The first two share `run.samples_bytes`, spread over the run's
steps. A full disk ends the writing of samples, never the run."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from areal_like.run.metrics import Follower, keep_lines
from areal_like.types import Batch, Group, Sample

log = logging.getLogger(__name__)
FOLDER = "samples"
TRAINED_SHARE = 0.7
"""Share of `run.samples_bytes` for trained samples."""
DIGITS = 4
"""Decimals of a number per token."""
Fate = Literal["trained", "dropped", "heldout"]
TRAINED: Fate = "trained"
DROPPED: Fate = "dropped"
HELDOUT: Fate = "heldout"


class Kept(msgspec.Struct, omit_defaults=True):
    """One sample. `step`: train steps made when it was written (its own included, if it was trained); `version`: the
    weights that it trained, or the newest then. `group`, `index`: which sample; of a held-out answer `of` is its set
    and `group` the place of its prompt there. `why`: the reason in the ledger, and more about it. `tokens`: prompt,
    then response. `reward` is None unless the sample was scored (0 for a held-out answer that failed). `numbers`: name
    → one number per token of the response (None: not computed, or not trained); empty where there was no room. They
    include `logprob` (behaviour), `proximal`, `current` (that took the gradient), `advantage`, what the loss observed
    (`loss/ratio`), and the parts subtracted from the reward (`penalty/kl`, `penalty/length`). `masked`: places in the
    response that are not trained. `forks`, `parts`: see `areal_like.types.Sample`."""

    fate: Fate
    step: int
    version: int
    group: int
    index: int
    tokens: list[int]
    prompt_length: int
    runs: list[tuple[int, int]]
    reward: float | None
    finish: str
    why: str = ""
    actor: str = ""
    turn_rewards: list[tuple[int, float]] = []
    masked: list[int] = []
    numbers: dict[str, list[float | None]] = {}
    of: str = "heldout"
    forks: list[int] = []
    parts: dict[str, float] = {}

    @property
    def response(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The model's turns in the response: (first token, one past the last). Between them is text of others, which is
        not trained, as are tokens that `staleness_policy: mask_tokens` took out."""
        others, count = set(self.masked), len(self.response)
        edges = [at for at in range(count + 1) if (at in others or at == count) != (at == 0 or at - 1 in others)]
        return list(zip(edges[::2], edges[1::2], strict=False))

    @property
    def staleness(self) -> int:
        return self.version - min((version for version, _ in self.runs), default=self.version)


def kept(
    fate: Fate,
    step: int,
    version: int,
    place: tuple[int, int],
    sample: Sample,
    numbers: Mapping[str, np.ndarray] | None = None,
    **words: Any,
) -> Kept:
    """The record of a sample. `place`: (group, index); `numbers`: name → float [R]; rows of NaN are left out. `words`:
    `why`, `actor` and `of`."""
    rows = {
        name: np.round(row.astype(np.float64), DIGITS)
        for name, row in {"logprob": sample.logprobs, **(numbers or {})}.items()
    }
    return Kept(
        fate,
        step,
        version,
        *place,
        tokens=sample.tokens.tolist(),
        prompt_length=sample.prompt_length,
        runs=[(int(made), int(count)) for made, count in sample.runs],
        reward=float(sample.reward),
        finish=sample.finish,
        turn_rewards=[(int(at), float(earned)) for at, earned in sample.turn_rewards],
        masked=np.flatnonzero(~np.asarray(sample.loss_mask, bool)).tolist(),
        numbers={name: row.tolist() for name, row in rows.items() if not np.isnan(row).all()},
        forks=list(sample.forks),
        parts=dict(sample.parts),
        **words,
    )


class SampleLog:
    """Appends records to one of the files, at most `most` bytes in a run of `steps` train steps (None: no limit), in
    proportion to the steps made. Records of steps after `done` are removed first: a resumed run makes them again."""

    def __init__(self, run: Path, name: Fate, *, steps: int, most: float | None, done: int = 0):
        self.path = run / FOLDER / f"{name}.jsonl"
        self._most, self._steps = math.inf if most is None else most, max(1, steps)
        self._broken = False
        try:
            self.path.parent.mkdir(exist_ok=True)
            keep_lines(self.path, lambda line: (found := decoded(line)) is not None and found.step <= done)
            self._file = self.path.open("ab", buffering=0)
            self._used = self._file.tell()
        except OSError as error:
            self._give_up(error)

    def room(self, step: int) -> float:
        """Bytes that may be written after `step` train steps."""
        return 0.0 if self._broken else self._most * min(1.0, (step + 1) / self._steps) - self._used

    def write(self, record: Kept) -> bool:
        """Append a record, without its numbers if they do not fit. False if not even that fits."""
        room = self.room(record.step)
        line = msgspec.json.encode(record) + b"\n"
        if len(line) > room:
            line = msgspec.json.encode(msgspec.structs.replace(record, numbers={})) + b"\n"
        if len(line) > room:
            return False
        try:
            self._used += self._file.write(line)
        except OSError as error:
            self._give_up(error)
        return not self._broken

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        log.warning("%s: no more samples are kept: %s", self.path, error)

    def close(self) -> None:
        if not self._broken:
            self._file.close()


class TrainedSamples:
    """One group per train step (`chosen`). `run`: the config's section; `done`: train steps before a resume."""

    def __init__(self, folder: Path, run: Any, done: int):
        most = TRAINED_SHARE * run.samples_bytes
        self._log = SampleLog(folder, TRAINED, steps=run.steps, most=most, done=done) if most else None

    def keep(self, batch: Batch, step: int, numbers: Callable[[int], Any] | None) -> None:
        """`step`: train steps, this one too. `numbers`: the trainer's: a group's id → per sample, name → float [R]."""
        if self._log is None or self._log.room(step) <= 0 or not batch.groups:
            return
        group = chosen(batch)
        found = (numbers(group.id) if numbers else []) or [{}] * len(group.samples)
        for index, (sample, values) in enumerate(zip(group.samples, found, strict=True)):
            place = (group.id, index)
            record = kept(TRAINED, step, batch.version, place, sample, actor=group.actor, numbers=values)
            if not self._log.write(record):
                return


def chosen(batch: Batch) -> Group:
    """A group of the batch: in turn a random one, and that with the best sample."""
    if batch.index % 2 == 0:
        return batch.groups[int(np.random.default_rng(batch.index).integers(len(batch.groups)))]
    return max(batch.groups, key=lambda group: max(sample.reward for sample in group.samples))


def read(run: Path, names: Sequence[Fate] = (TRAINED, DROPPED, HELDOUT)) -> Iterator[Kept]:
    """The records of a run, file by file, also during the run."""
    for name in names:
        yield from Follower(run / FOLDER / f"{name}.jsonl", decoded).each_new_row()


_decoder = msgspec.json.Decoder(Kept)


def decoded(line: bytes) -> Kept | None:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
