"""The files of a run that grow: metrics, samples and spans survive half a line, damage and a full disk. Runs from
Python, without starting one."""

import contextlib
import json
import math
import shutil
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import areal_like as al
from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError
from areal_like.run import api as run
from areal_like.run import checkpoints, samples, spans
from areal_like.run.metrics import Follower, MetricsFollower, MetricsLog, keep_lines
from areal_like.run.run_folder import data_of, progress_of
from areal_like.run.samples import TRAINED, Kept, SampleLog, kept
from areal_like.run.spans import Busy, Span, Spans
from areal_like.types import Sample

WHOLE = b"1\nx\n\xff\n22\n"


def number(line: bytes) -> int | None:
    return int(line) if line.strip().isdigit() else None


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_an_unfinished_last_line_is_left_until_it_is_finished_and_a_damaged_one_costs_itself(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "lines"
    follower = Follower(path, number)
    assert follower.new_rows() == []
    path.write_bytes(WHOLE[:cut])
    first = follower.new_rows()
    path.write_bytes(WHOLE)
    assert first + follower.new_rows() == [1, 22] and follower.new_rows() == []
    path.write_bytes(WHOLE[:cut])
    keep_lines(path, lambda line: number(line) == 1)
    assert path.read_bytes() == (b"1\n" if cut > 1 else b"")


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    values = [b'"x"', b"NaN", b"Infinity", b"1" + b"0" * 400, b"9" * 5000, b"[" * 9999, b'{"1": 1}', b"["]
    odd = [b'"loss": ' + value for value in values] + [b'"a/histogram": ' + value for value in (b"null", b"1")]
    odd += [b'"a/histogram": {"%s": %s}' % pair for pair in ((b"a", b"1"), (b"1", b'"a"'), (b"1", b"null"))]
    damaged = b'[]\n\xff\n\n{"loss": 1}\n' + b"".join(b'{"step": 2, %s}\n' % each for each in odd)
    path.write_bytes(b'{"step": 1}\n' + damaged + b'{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n')
    with MetricsLog(path, done=2) as log:
        log.write({"step": 3, "loss": math.nan, "ratio/max": math.inf, "staleness/histogram": {"0": 3}})
        last = {"step": 3, "loss": None, "ratio/max": None, "staleness/histogram": {"0": 3}}
        assert MetricsFollower(path).new_rows() == [{"step": 1}, {"step": 2, "loss": 1}, last], "written at once"
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    json.loads(path.read_text().splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_fails_a_row_of_metrics_and_only_ends_samples_and_spans(tmp_path: Path, caplog) -> None:
    for name in ("metrics.jsonl", "samples/trained.jsonl", "spans/learner.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to("/dev/full")
    full = pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'")
    with full, MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1})
    kept_samples, recorded = SampleLog(tmp_path, TRAINED, steps=10, most=None), Spans(tmp_path, "learner")
    for step in range(3):
        assert not kept_samples.write(record(step)) and kept_samples.room(step) == 0
        recorded.add("train", step, step + 0.5)
    assert len(caplog.records) == 2 and caplog.text.count("No space") == 2


def record(step: int, tokens: int = 3) -> Kept:
    some, none, mask = np.full(tokens, np.nan), np.full(tokens, np.nan), np.ones(tokens, bool)
    some[0], mask[-1] = 0.123456, False
    logprobs = np.linspace(-1, -0.5, tokens).astype(np.float32)
    made = Sample(np.arange(tokens + 2, dtype=np.int32), 2, logprobs, mask, [(3, tokens)], 0.5, "stop", [(0, 0.25)])
    return kept(TRAINED, step, 4, (7, 1), made, actor="actor-0", numbers={"advantage": some, "proximal": none})


def test_a_record_comes_back_as_it_was_written_and_a_resume_removes_what_will_be_made_again(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=10, most=None)
    assert log.write(record(1)) and log.write(record(3))
    log.close()
    SampleLog(tmp_path, TRAINED, steps=10, most=None, done=2)
    (found,) = samples.read(tmp_path)
    assert (found.fate, found.step, found.group, found.index, found.actor) == ("trained", 1, 7, 1, "actor-0")
    assert found.response == [2, 3, 4] and found.staleness == 1 and found.masked == [2]
    assert found.turn_rewards == [(0, 0.25)] and found.runs == [(3, 3)]
    assert found.numbers == {"logprob": [-1.0, -0.75, -0.5], "advantage": [0.1235, None, None]}


def test_bytes_are_spread_over_the_steps_of_a_run(tmp_path: Path) -> None:
    log, most, steps = SampleLog(tmp_path, TRAINED, steps=20, most=20_000), 20_000, 20
    for step in range(1, steps):
        while log.write(record(step)):
            pass
        assert log.path.stat().st_size <= most * (step + 1) / steps
    assert {each.step for each in samples.read(tmp_path)} == set(range(1, steps)), "each step has its part"
    assert log.path.stat().st_size > 0.9 * most


def test_a_sample_without_room_is_kept_without_its_numbers_or_not_at_all(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, TRAINED, steps=1, most=12_000)
    assert log.write(record(1, tokens=1000)) and not log.write(record(1, tokens=4000))
    (found,) = samples.read(tmp_path)
    assert not found.numbers and len(found.response) == 1000


@pytest.mark.parametrize(
    ("masked", "turns"),
    [([], [(0, 6)]), ([0], [(1, 6)]), ([5], [(0, 5)]), ([2, 3], [(0, 2), (4, 6)]), (list(range(6)), [])],
)
def test_turns_are_the_tokens_of_the_model(masked: list[int], turns: list[tuple[int, int]]) -> None:
    assert Kept("trained", 1, 1, 0, 0, list(range(8)), 2, [(1, 6)], 0.0, "stop", masked=masked).turns == turns


def test_spans_are_read_on_the_clock_of_the_world_and_adjacent_ones_are_joined(tmp_path: Path) -> None:
    learner = Spans(tmp_path, "learner", since_1970=100.0)
    for name, begin, end in [("a", 0, 1), ("b", 0.9, 1), ("a", 1.0001, 2), ("a", 3, 4), ("b", 2.5, 2.6), ("b", 3, 3)]:
        learner.add(name, begin, end)
    found = [(name, round(begin - 100, 3), round(end - 100, 3)) for name, begin, end in spans.read(tmp_path)["learner"]]
    assert found == [("a", 0, 2), ("b", 0.9, 1), ("b", 2.5, 2.6), ("a", 3, 4)]
    with pytest.raises(KeyError), Spans(tmp_path, "actor-0").during("update"):
        raise KeyError
    (failed,) = spans.read(tmp_path)["actor-0"]
    assert failed.name == "update" and failed.end == pytest.approx(time.time(), abs=60)


def test_several_things_at_once_are_one_span_and_a_long_one_is_written_in_pieces(tmp_path: Path) -> None:
    now = iter([1.0, 2.0, 3.0])
    busy = Busy(Spans(tmp_path, "actor-0", since_1970=0.0), "generate", lambda: next(now))
    busy.so_far()
    busy.enter()
    busy.enter()
    busy.leave()
    assert spans.read(tmp_path)["actor-0"] == []
    busy.so_far()
    busy.leave()
    assert len((tmp_path / "spans" / "actor-0.jsonl").read_text().splitlines()) == 2
    assert spans.read(tmp_path)["actor-0"] == [Span("generate", 1.0, 3.0)]


@pytest.mark.parametrize("name", ["learner.pt", "parts/1.pt", checkpoints.META])
def test_a_bit_that_flips_in_a_checkpoint_is_named_with_its_file_and_the_checkpoint_before(
    tmp_path: Path, name: str
) -> None:
    def fill(folder: Path) -> None:
        (folder / "parts").mkdir()
        for each in ("learner.pt", "parts/1.pt"):
            (folder / each).write_bytes(each.encode() * 1000)

    folders = [checkpoints.write(tmp_path, step, fill, {"steps": step}, keep=2) for step in (1, 2)]
    checkpoints.check(folders[1])
    assert checkpoints.progress(folders[1]) == {"steps": 2}
    content = bytearray((folders[1] / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folders[1] / name).write_bytes(content)
    with pytest.raises(checkpoints.Damaged, match=rf"step-00000002/{name} is damaged.*from step-00000001"):
        checkpoints.check(folders[1])


@pytest.mark.parametrize("text", ["[1]", "3", "{", '{"data": 3}', '{"steps": "4"}', '{"steps": 4, "evaluations": 3}'])
def test_a_record_or_summary_of_other_data_is_named(tmp_path: Path, text: str) -> None:
    for name in ("run.json", "summary.json"):
        (tmp_path / name).write_text(text)
    for read in (data_of, lambda run: progress_of(run, {}, 4)):
        with pytest.raises(ConfigError, match=r"(run|summary)\.json is damaged"):
            read(tmp_path)


def test_a_folder_with_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoints.write(tmp_path, step, lambda _: None, {}, keep=2)
    for name in ("step-abc", "step-", "step-00000009.old"):
        shutil.copytree(checkpoints.folder_of(tmp_path, 1), tmp_path / "checkpoints" / name)
    checkpoints.write(tmp_path, 3, lambda _: None, {}, keep=2)
    assert checkpoints.latest(tmp_path) == (3, checkpoints.folder_of(tmp_path, 3))
    assert not checkpoints.folder_of(tmp_path, 1).exists() and (tmp_path / "checkpoints" / "step-abc").exists()


def test_a_write_that_was_killed_leaves_the_checkpoint_before_and_is_made_again(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, 1, lambda _: None, {"steps": 1}, keep=2)
    reached, go = threading.Event(), threading.Event()

    def fill(folder: Path) -> None:
        (folder / "learner.pt").write_bytes(b"half")
        reached.set()
        assert go.wait(60)

    killed = checkpoints.CheckpointWriter(tmp_path, keep=2)
    killed.begin(2, contextlib.nullcontext(fill), {"steps": 2})
    assert reached.wait(60) and killed.written(wait=False) is None
    shutil.copytree(tmp_path, tmp_path / "disk")  # as it is at the kill
    again = checkpoints.CheckpointWriter(tmp_path / "disk", keep=2)
    assert checkpoints.steps_done(tmp_path / "disk") == 1
    go.set()
    again.begin(2, contextlib.nullcontext(lambda folder: None), {"steps": 2})
    assert [each.written(wait=True) for each in (killed, again)] == [2, 2] and again.written(wait=True) is None
    assert checkpoints.progress(checkpoints.folder_of(tmp_path / "disk", 2)) == {"steps": 2}


@pytest.mark.parametrize("dies", ["replace", "rename", "symlink_to"])
def test_a_crash_while_the_best_is_kept_leaves_the_one_before_and_the_next_start_no_other(tmp_path, monkeypatch, dies):
    """A resumed run has trained that step again, differently."""
    for value, reward in ((b"old", 0.5), (b"new", 0.9)):
        checkpoints.write(tmp_path, 1, lambda folder, value=value: (folder / "w").write_bytes(value), {}, keep=2)
        keep = partial(checkpoints.keep_best, tmp_path, [{"version": 1, "reward": reward}], "heldout/reward", 1)
        if value == b"old":
            keep()
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(Path, dies, None)
        keep()
    (tmp_path / "checkpoints" / "best-00000009").mkdir()
    checkpoints.CheckpointWriter(tmp_path, keep=2)
    best = checkpoints.best(tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best", best.name, "step-00000001"}
    assert (best / "w").read_bytes() == b"old"
    keep()
    assert (checkpoints.best(tmp_path) / "w").read_bytes() == b"new"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of the command; instead of running it, a folder is made."""
    found: list[str] = []

    def follow(command: list[str], quiet: bool) -> tuple[int, deque[str]]:
        found[:] = command[3:-1]
        config = configs.load(found)
        folder = Path(config.run.dir) / str(config.run.name)
        folder.mkdir(parents=True)
        configs.save(config, folder / "config.yaml")
        return 0, deque()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_follow", follow)
    return found


def test_values_are_those_of_python(called: list[str], tmp_path: Path) -> None:
    made = al.train(
        "quickstart", {"run.dir": tmp_path / "here", "learner.lr": np.float32(0.5), "run.steps": np.int64(3)}
    )
    assert made.folder.parent == tmp_path / "here" and "run.steps=3" in called and "learner.lr=0.5" in called
    with pytest.raises(ConfigError, match="a value of a config is a number"):
        al.train("quickstart", {"run.steps": object()})
    with pytest.raises(ConfigError, match=r"run.stepz: .*\[from the overrides\]"):
        al.train("quickstart", {"run.stepz": 3})
    made = al.train("quickstart", {"run.name": None})
    assert made.folder.name.startswith("quickstart-2") and list(made.samples("dropped")) == []
    with pytest.raises(ValueError, match="'trained', 'dropped', 'heldout'"):
        made.samples("dropt")  # type: ignore[arg-type]
