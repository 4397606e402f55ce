"""The learner's loop with events in a fixed order: batches that can't be trained, and steps that fail."""

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.config import run_config as configs
from areal_like.errors import UserError
from areal_like.run import checkpoints
from areal_like.run.measures import best_of
from areal_like.run.metrics import MetricsLog
from areal_like.run.process import Role
from areal_like.run.run_folder import PUBLISHED as FILE
from areal_like.run.run_folder import reason_to_stop
from areal_like.types import Batch, Group
from areal_like.wire.learner_client import Stopped
from areal_like.wire.messages import Manifest
from learners import timed
from learners.attestation import Attestation, AttestationError
from learners.batch_metrics import batch_metrics
from learners.main import TrainLoop
from learners.probe import Reference
from learners.progress import Mismatch, NotFinite
from learners.timed import TimedLearner
from learners.untrainable import Interrupted, Untrainable
from tests.learners.batches import make_batch
from tests.seeds import seeded


class Client:
    """Serves synthetic batches, and records its calls."""

    def __init__(self) -> None:
        self.said: list[tuple] = []
        self.ends: dict[int, Stopped] = {}  # batch → what comes in its place

    def want(self, index: int, version: int, until: float | None = None) -> None:
        self.until = until
        self.said.append(("want", index))

    def batch(self, may_pause: bool) -> tuple[Batch, dict[str, Any]]:
        index = next(said[1] for said in reversed(self.said) if said[0] == "want")
        if index in self.ends:
            raise self.ends[index]
        return make_batch(seeded(index), index=index), {"evaluations": [], "seconds": 1.0}

    def finish(self, reason: str, steps: int) -> dict[str, Any]:
        found = [{"version": steps, "reward": steps / 10, "seconds": 1.0}]
        facts = {"staleness_max": 0, "staleness_bound": 1, "ledger": {}, "rollout/tokens": 50}
        return facts | {"trained_seconds": 1.0, "evaluations": found}

    def set_aside(self, index: int, reason: str) -> None:
        self.said.append(("set aside", index))

    def trained(self, index: int) -> None:
        self.said.append(("trained", index))

    def hello(self, model: object) -> None: ...

    def checkpointed(self, step: int) -> None:
        self.said.append(("checkpointed", step))

    pausing, shall_stop = False, lambda _: True

    def stops(self) -> None:
        self.said.append(("stops",))


class Trainer:
    """Plays back a list of step results, metrics or errors; after these, every step succeeds."""

    def __init__(self, outcomes: list[Any]):
        self.outcomes = outcomes

    def train(self, batch: Batch) -> dict[str, Any]:
        outcome = self.outcomes.pop(0) if self.outcomes else {"loss": 1.0, "grad_norm": 1.0}
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)

    def snapshot(self) -> None: ...

    def save_state(self, folder: Path) -> None:
        (folder / "state").write_bytes(b"weights")

    def load_state(self, folder: Path) -> None: ...


class Publisher:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def publish(self, version: int, snapshot: Any) -> float:
        return 0.0

    def wait(self) -> Manifest:
        return Manifest(1, "d")


class Trusting(Attestation):
    def __init__(self, lies: list[bool]):
        self.lies = lies

    def check(self, batch: Batch) -> None:
        if self.lies and self.lies.pop(0):
            raise AttestationError("made by other weights")


def loop(folder: Path, outcomes: list[Any], *overrides: str, lies: list[bool] | None = None) -> TrainLoop:
    config = configs.load(["configs/quickstart.yaml", "run.target_reward=null", "run.steps=4", *overrides])
    role = Role("learner", folder, None, config)
    trainer, client, publisher = Trainer(outcomes), Client(), Publisher()
    log = MetricsLog(folder / "metrics.jsonl")
    silent = Reference([], 0, None)
    writer = checkpoints.CheckpointWriter(folder, config.checkpoint.keep)
    return TrainLoop(role, trainer, client, publisher, Trusting(lies or []), log, silent, writer)  # type: ignore[arg-type]


def fault(moved: bool = False) -> Untrainable:
    return Untrainable("a token of 1000000", moved)


def done(made: TrainLoop) -> list[tuple]:
    return [said for said in made.client.said if said[0] != "want"]


@pytest.mark.parametrize("lies", [[], [False, True]])
def test_a_batch_that_cannot_be_trained_is_set_aside_and_its_step_made_with_another(tmp_path: Path, lies) -> None:
    made = loop(tmp_path, [] if lies else [{"loss": 0.0}, fault()], lies=lies)
    summary = made.run()
    assert done(made)[:3] == [("trained", 0), ("set aside", 1), ("trained", 1)]
    said = made.client.said
    assert said[said.index(("set aside", 1)) + 1] == ("want", 1), "it is asked for again before anything else"
    assert summary["steps"] == 4


def test_rates_of_tokens_rolled_out_and_trained_count_the_same_seconds(tmp_path: Path) -> None:
    summary = loop(tmp_path, [{"loss": 0.0, "grad_norm": 1.0, "tokens": 10} for _ in range(4)]).run()
    assert summary["tokens_per_second"] / summary["trained_tokens_per_second"] == pytest.approx(50 / 40)


def test_some_in_a_row_end_the_run_and_one_now_and_then_does_not(tmp_path: Path) -> None:
    well = {"loss": 0.0}
    loop(tmp_path, [fault(), fault(), well, fault(), fault(), well]).run()
    made = loop(tmp_path, [fault(), fault(), fault()])
    with pytest.raises(RuntimeError, match=r"3 batches in a row .*: a token of 1000000"):
        made.run()
    assert done(made) == [("set aside", 0)] * 3, "a resume is served others"


def test_one_that_has_moved_the_weights_is_set_aside_and_ends_the_run(tmp_path: Path) -> None:
    made = loop(tmp_path, [fault(moved=True)])
    with pytest.raises(RuntimeError, match="after one of its optimizer steps"):
        made.run()
    assert done(made) == [("set aside", 0)]


def test_a_stop_within_a_train_step_undoes_it_and_writes_a_checkpoint_of_the_steps_before(tmp_path: Path) -> None:
    made = loop(tmp_path, [{"loss": 0.0}, Interrupted("asked to end")])
    with pytest.raises(Stopped):
        made.run()
    assert done(made) == [("trained", 0), ("stops",), ("checkpointed", 1)] and made.trainer.shall_stop()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_whose_time_is_over_while_it_waits_ends_as_any_other(tmp_path: Path, steps: int) -> None:
    made = loop(tmp_path, [], "run.max_seconds=90")
    made.client.ends = {steps: Stopped(drained=True, late=True)}
    summary = made.run()
    assert (summary["steps"], summary["stopped_because"], made.client.until) == (steps, "90.0 seconds have passed", 90)
    assert checkpoints.progress(checkpoints.folder_of(tmp_path, steps))["seconds"] == 90.0
    made = loop(tmp_path, [], "run.max_seconds=100")
    made.resume(checkpoints.folder_of(tmp_path, steps))
    made.run()
    assert made.client.until == 10.0, "the time of the earlier part counts"


class SavesBeside(Trainer):
    """Its saves wait for `go`, or fail."""

    def __init__(self, fails: bool = False):
        super().__init__([])
        self.go, self.fails, self.begun = threading.Event(), fails, 0

    @contextlib.contextmanager
    def save_beside(self) -> Iterator[Callable[[Path], None]]:
        self.begun += 1

        def save(folder: Path) -> None:
            assert self.go.wait(60)
            if self.fails:
                raise OSError(errno.EIO, "no disk")

        yield save


def test_steps_go_on_beside_a_checkpoint_and_its_report_comes_when_it_is_durable(tmp_path: Path) -> None:
    """The next one waits for it, and so does the end."""
    made, whole = loop(tmp_path, [], "checkpoint.every=2", "run.steps=5"), list[bool]()
    made.trainer = trainer = SavesBeside()

    def trained(index: int) -> None:
        made.client.said.append(("trained", index))
        if index == 3:  # after this step the next one is due
            assert trainer.begun == 1 and not checkpoints.is_whole(tmp_path, 2)
            trainer.go.set()

    def checkpointed(step: int) -> None:
        made.client.said.append(("checkpointed", step))
        whole.append(checkpoints.is_whole(tmp_path, step))

    made.client.trained, made.client.checkpointed = trained, checkpointed
    made.run()
    said = done(made)
    assert said[:5] == [*(("trained", index) for index in range(4)), ("checkpointed", 2)]
    assert [step for what, step in said if what == "checkpointed"] == [2, 4, 5] and whole == [True] * 3


def test_a_write_that_fails_beside_the_steps_ends_the_run_with_its_error(tmp_path: Path) -> None:
    made = loop(tmp_path, [], "checkpoint.every=2", "run.steps=3")
    made.trainer = SavesBeside(fails=True)
    made.client.trained = lambda index: made.trainer.go.set() if index == 2 else None
    with pytest.raises(OSError, match="no disk"):
        made.run()
    assert done(made) == [] and list((tmp_path / "checkpoints").iterdir()) == []


def test_the_best_checkpoint_is_kept_while_newer_ones_come_and_until_a_better_one(tmp_path: Path) -> None:
    knobs = ["checkpoint.best=heldout/reward", "checkpoint.every=3", "checkpoint.keep=1", "eval.every=2"]
    made, late = loop(tmp_path, [], *knobs, "run.steps=8"), {"version": 2, "reward": 0.9, "seconds": 1.0}
    serve = made.client.batch
    made.client.batch = lambda may_pause: (  # that of version 2 comes when others have been written
        (found := serve(may_pause))[0],
        found[1] | {"evaluations": [late] * (found[0].index == 5)},
    )
    folders, best = tmp_path / "checkpoints", tmp_path / "checkpoints" / "best"
    made.run()
    assert [step for what, step in done(made) if what == "checkpointed"] == [2, 3, 4, 6, 8]
    assert [*json.loads((best / checkpoints.FIGURE).read_text()).values()] == ["heldout/reward", 0.9, 2]
    assert checkpoints.best(tmp_path) == folders / "best-00000002" and not checkpoints.is_whole(tmp_path, 2)
    for steps, step in ((9, 2), (10, 10)):  # 0.9 is no better, 1.0 is
        (folders / "final").mkdir()
        made = loop(tmp_path, [], *knobs, f"run.steps={steps}")
        made.resume(checkpoints.latest(tmp_path)[1])
        made.run()
        assert sorted(path.name for path in folders.glob("best*")) == ["best", f"best-{step:08d}"]
        assert not (folders / "final").exists(), "it was of fewer steps"
        assert checkpoints.progress(best)["steps"] == step


@pytest.mark.parametrize(
    ("measure", "figures", "best", "behind"),
    [
        ("heldout/reward", [0.9, 0.5, 0.6, 0.6, 0.4], 2, 2),  # not version 0
        ("aime/pass@8", [0.0, 0.5, None, 0.4], 1, 1),  # one evaluation was of other sets
        ("aime/reward", [], None, 0),
    ],
)
def test_evaluations_are_ranked_and_the_run_ends_after_so_many_behind_the_best(measure, figures, best, behind) -> None:
    name, figure = measure.split("/")
    found = []
    for version, value in enumerate(figures):
        sets = {} if value is None else {name: {figure: value}}
        found.append({"version": version, "sets": sets, "reward": -1.0} | (sets.get("heldout") or {}))
    evaluation, count = best_of(found, measure)
    assert (evaluation and evaluation["version"], count) == (best, behind)
    for patience in (behind, behind + 1):
        words = ["quickstart", f"checkpoint.best={measure}", f"run.early_stop={max(1, patience)}"]
        reason = reason_to_stop(configs.load(words), 1, 0.0, found)
        assert bool(reason) == (0 < patience == behind) and reason.startswith(measure if reason else "")


def test_sizes_that_the_trainer_chose_are_in_the_runs_config_and_a_resume_inherits_them(tmp_path: Path) -> None:
    argv = ["configs/quickstart.yaml", "learner.device=cuda", "learner.compute_dtype=float32"]
    configs.save(configs.load(argv), tmp_path / "config.yaml")
    made, found = loop(tmp_path, []), {"micro_batch_tokens": 4096, "compile": True}
    made.trainer.sizing = SimpleNamespace(found=found)
    made.trainer.outcomes = [{"loss": 1.0, "grad_norm": 1.0}, RuntimeError("ends after a step")]
    with pytest.raises(RuntimeError, match="ends after"):
        made.run()
    earlier = configs.load_resolved(tmp_path / "config.yaml")
    resumed, other = (configs.load([*argv, *more], earlier).learner for more in ([], ["learner.compile=false"]))
    assert {knob: resumed[knob] for knob in found} == found and resumed["max_logits"] is None
    assert (other["micro_batch_tokens"], other["compile"]) == (4096, False)


@pytest.mark.parametrize("fixed", ["replay=runs/x", "inject_staleness=1"])
def test_where_no_other_batch_can_take_its_place_the_run_ends(tmp_path: Path, fixed: str) -> None:
    made = loop(tmp_path, [fault()], fixed)
    with pytest.raises(Untrainable):
        made.run()
    assert done(made) == []


NAN = {"loss": float("nan"), "grad_norm": float("nan")}


def test_steps_that_are_not_finite_are_counted_and_so_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    well, more = {"loss": 0.0, "grad_norm": 1.0}, ["run.max_nonfinite=3", "checkpoint.every=1", "checkpoint.keep=9"]
    made = loop(tmp_path, [NAN, NAN, well, {"loss": 0.0, "grad_norm": float("inf")}], *more)
    assert made.run()["faults"]["train/nonfinite_steps"] == 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/nonfinite_steps"] for row in rows] == [1, 2, 2, 3]
    (tmp_path / "ends").mkdir()
    made = loop(tmp_path / "ends", [well, well, NAN, NAN, NAN], *more, "run.steps=99")
    with pytest.raises(NotFinite, match=r"got 3 train steps in a row, up to step 5, .*step-00000002\. Fix"):
        made.run()


def test_an_engine_of_another_model_ends_the_run(tmp_path: Path) -> None:
    """Steps without fresh tokens are no evidence."""
    well, kls = {"loss": 0.0, "grad_norm": 1.0}, (1.7, 0.1, 1.7, None, 1.7)
    steps = [well | ({} if kl is None else {"mismatch_kl": kl}) for kl in kls]
    with pytest.raises(Mismatch, match=r"run\.max_mismatch: got a mismatch_kl of 1\.7, .* in 2 train steps in a row"):
        loop(tmp_path, steps, "run.max_nonfinite=2", "run.steps=99").run()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_resume_from_a_damaged_checkpoint_loads_nothing(tmp_path: Path) -> None:
    loop(tmp_path, [], "checkpoint.every=4").run()
    (checkpoints.folder_of(tmp_path, 4) / "state").write_bytes(b"weighty")
    made = loop(tmp_path, [])
    made.trainer.load_state = lambda folder: pytest.fail("it is loaded")
    with pytest.raises(checkpoints.Damaged, match="state is damaged"):
        made.resume(checkpoints.folder_of(tmp_path, 4))


def test_a_run_that_goes_on_keeps_the_round_behind_its_last_step_and_knows_none_before_its_first(
    tmp_path: Path,
) -> None:
    kept = ["checkpoint.every=2", "checkpoint.keep=9"]
    ended = loop(tmp_path, [], *kept).run()
    assert [each["version"] for each in ended["evaluations"]] == [4] and ended["reward_after"] == 0.4
    (tmp_path / "summary.json").write_text(json.dumps(ended))
    made = loop(tmp_path, [], *kept, "run.steps=6")
    made.resume(checkpoints.folder_of(tmp_path, 4))
    found = made.run()
    assert [each["version"] for each in found["evaluations"]] == [4, 6]
    assert found["reward_before"] is None, "that of version 0 is not known"
    made = loop(tmp_path, [], *kept, "run.steps=6")
    made.resume(checkpoints.folder_of(tmp_path, 2))
    assert made.progress.evaluations == [], "those of steps that are made again come again"


class SteppingClock:
    now = 100.0

    def monotonic(self) -> float:
        self.now += 0.001  # everything takes a little
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 0.9 * seconds  # an early wake-up


def test_a_step_takes_its_time_without_drift_and_each_publishes_other_bytes(monkeypatch, tmp_path):
    clock, batch = SteppingClock(), make_batch(seeded(0))
    monkeypatch.setattr(timed, "time", clock)
    knobs = {"base": 1.0, "per_sample": 0.25, "per_token": 0.01, "weight_bytes": 5000}
    learner, restored = TimedLearner(**knobs), TimedLearner(**knobs)
    states = [learner.snapshot()]
    for _ in range(20):
        before, metrics = clock.now, learner.train(batch)
        assert metrics == batch_metrics(batch)
        assert clock.now - before == pytest.approx(1.0 + 0.25 * 16 + 0.01 * metrics["tokens"], abs=0.005)
        states.append(learner.snapshot())
    assert {s.nbytes for s in states} == {5000} and len({s.digest() for s in states}) == 21
    learner.save_state(tmp_path)
    restored.load_state(tmp_path)
    assert restored.snapshot().digest() == states[-1].digest()
    learner.save(str(tmp_path))
    assert (tmp_path / "weights.bin").read_bytes() == states[-1].buffer.tobytes()


def named(*digests: dict[int, str], actor: str = "actor-1") -> Batch:
    return Batch(7, 3, [Group(number, [], made, actor=actor) for number, made in enumerate(digests, 40)])


def test_what_was_published_is_known_after_a_resume(tmp_path: Path) -> None:
    """A crash may tear the last line: no peer had received that version."""
    before = Attestation(tmp_path)
    for version in range(3):
        before.add(version, f"d{version}")
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text()[:-2])
    again = Attestation(tmp_path)
    again.check(named({0: "d0", 1: "d1"}))
    with pytest.raises(AttestationError, match=r"batch 7, group 41 of actor-1: .* version 0 .* digest d1,"):
        again.check(named({1: "d1"}, {0: "d1"}))
    for digest in ("d2", "d"):
        with pytest.raises(AttestationError, match=f"version 2 .* digest {digest},"):
            again.check(named({2: digest}))
    again.add(1, "d1")
    again.add(2, "other")
    assert (tmp_path / FILE).read_text() == "0 d0\n1 d1\n2 other\n"
    Attestation(tmp_path).check(named({1: "d1", 2: "other"}))
    again.add(1, "after")
    again.check(named({1: "after or d1"}))
    with pytest.raises(AttestationError, match="digest lie,"):
        again.check(named({1: "after or lie"}))


def test_other_ranks_know_what_the_first_one_publishes(tmp_path: Path) -> None:
    first, other = Attestation(tmp_path), Attestation(tmp_path, writes=False)
    first.add(0, "d0")
    assert other.fault(named({0: "d0"})) == ""
    first.add(1, "d1")
    (tmp_path / FILE).write_text("0 d0\n1 d1\n2 d")  # it is about to write "d2"
    assert other.fault(named({0: "d0", 1: "d1"})) == ""
    assert other.fault(named({0: "d0"}, {2: "d"})).startswith("group 41 of actor-1: its tokens of version 2 were made")
    (tmp_path / FILE).write_text("0 d0\n1 d1\n2 d2\n")
    assert other.fault(named({2: "d2"})) == ""


def test_a_replay_asks_the_record_of_the_run_that_is_replayed(tmp_path: Path) -> None:
    recorded, replay = tmp_path / "recorded", tmp_path / "replay"
    for folder in (recorded, replay):
        folder.mkdir()
    Attestation(recorded).add(0, "d0")
    again = Attestation(replay, recorded)
    again.add(0, "another loss")
    again.check(named({0: "d0"}))
    with pytest.raises(AttestationError):
        again.check(named({0: "another loss"}))
    assert (recorded / FILE).read_text() == "0 d0\n" and (replay / FILE).read_text() == "0 another loss\n"


def test_a_checkpoint_with_other_weights_than_were_published_ends_the_run(tmp_path: Path) -> None:
    Attestation(tmp_path).add(3, "d3")
    again = Attestation(tmp_path)
    again.resumed = 3
    again.add(3, "d3")
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        again.add(3, "other")
    again.add(4, "d4")
