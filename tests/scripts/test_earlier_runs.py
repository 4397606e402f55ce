"""Who may continue a run folder, and when; the command line of `scripts.train` before processes start."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.config import run_config as configs
from areal_like.config.registry import COMPONENTS, knobs
from areal_like.config.run_config import ConfigError
from areal_like.launch.children import RestartLimits
from areal_like.launch.plan import plan
from areal_like.launch.slurm import SlurmLauncher
from areal_like.run import checkpoints
from areal_like.run.run_folder import config_file, data_of, discard, note_step
from buffer.events import Admit, Begin, Branch, Finish
from buffer.journal import Journal
from buffer.main import other_settings
from scripts.starting import earlier_runs
from scripts.starting.earlier_runs import (
    changes,
    check_data,
    find_run_to_resume,
    fit_to_replay,
    holds_progress,
    lock,
    reopen_run_folder,
)
from scripts.train import (
    launcher_of,
    load,
    main,
    make_run_folder,
    name_of,
    parse,
    prepare,
    resolve_folders,
    resolve_transport,
    submit,
    write_record,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    return tmp_path


def test_one_starter_has_a_folder(folder: Path) -> None:
    held = lock(folder)
    with pytest.raises(ConfigError, match="in use"):
        lock(folder)
    held.close()
    lock(folder).close()


@pytest.mark.parametrize("name", ["config.yaml", "next/config.yaml"])
def test_processes_that_outlive_their_starter_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(earlier_runs, "ORPHAN_SECONDS", 0.1)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with (folder / name).open() as orphan:
        fcntl.flock(orphan, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="in use"):
            lock(folder)
        monkeypatch.setattr(earlier_runs, "ORPHAN_SECONDS", 60.0)
        threading.Timer(0.3, partial(fcntl.flock, orphan, fcntl.LOCK_UN)).start()
        lock(folder).close()


def made(tmp_path: Path, *overrides: str) -> Path:
    configs.save(configs.load(["configs/quickstart.yaml", *overrides]), tmp_path / "config.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ("scheduler.max_staleness=1", "mode=sync", "staleness bound"),
        ("buffer.journal=off", "buffer.journal=memory", "buffer.journal"),
        ("run.seed=0", "run.seed=1", "run.seed"),
        ("loss=ppo", "loss=dg", "loss"),
        ("learner.lora=null", "learner.lora={rank: 2}", "learner.lora"),
        ("learner=torch", "learner=timed", "learner.name"),
    ],
)
def test_what_a_resume_may_not_change(tmp_path: Path, before: str, now: str, key: str) -> None:
    folder = made(tmp_path, before)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=f"^resume: .*{re.escape(key)}"):
        reopen_run_folder(configs.load(["configs/quickstart.yaml", now]), folder)


def test_a_job_without_a_journal_starts_unless_it_has_trained(tmp_path: Path, monkeypatch) -> None:
    """The job resumes the folder that its submission has made. Queued again after a train step, it can't go on."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    argv = ["configs/quickstart.yaml", "launcher=slurm", "buffer.journal=off", f"run.dir={tmp_path}", "run.name=a"]
    prepared = prepare(parse(argv), argv)
    assert prepared
    folder, config, held = prepared
    submission = launcher_of(config, folder).submission(plan(config))
    submit(SimpleNamespace(submit=lambda: "17"), folder, held)

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    argv = submission.command[-2:]
    (folder / "metrics.jsonl").touch()  # ended before its first step
    for _ in range(2):
        prepared = prepare(parse(argv), argv)
        assert prepared and prepared[0] == folder
        prepared[2].close()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"buffer\.journal"):
        prepare(parse(argv), argv)
    (folder / "metrics.jsonl").unlink()
    checkpoints.write(folder, 1, lambda _: None, {"seconds": 9.0, "evaluations": []}, 1)
    with pytest.raises(ConfigError, match=r"buffer\.journal"):
        prepare(parse(argv), argv)


def test_nothing_of_a_finished_run_changes_before_its_successor_has_made_a_step(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for name in ("summary.json", "run.json"):
        (folder / name).write_text("of the finished run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    argv = ["configs/quickstart.yaml", f"resume={folder}", "run.steps=77"]

    def start() -> None:
        prepared = prepare(parse(argv), argv)
        assert prepared
        prepared[2].close()

    def record() -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in before if (folder / name).exists()}

    start()
    assert record() == before
    assert configs.load_resolved(config_file(folder)).run.steps == 77, "its processes read the new config"
    discard(folder)  # it ended before it had made a step
    assert record() == before and not (folder / "next").exists() and config_file(folder) == folder / "config.yaml"
    start()
    note_step(folder)
    assert not (folder / "summary.json").exists() and "run.steps=77" in (folder / "run.json").read_text()
    assert configs.load_resolved(folder / "config.yaml").run.steps == 77 and not (folder / "next").exists()
    note_step(folder)


@pytest.mark.parametrize(
    ("finished", "now", "refused"),
    [
        (True, "run.target_reward=0.7", True),
        (True, "run.steps=15", False),
        (False, "run.steps=13", True),
        (False, "run.steps=14", False),  # killed before its final evaluation
    ],
)
def test_a_resume_without_a_step_left_is_refused_and_changes_nothing(
    tmp_path: Path, finished: bool, now: str, refused: bool
) -> None:
    folder = made(tmp_path)
    checkpoints.write(folder, 14, lambda _: None, {"seconds": 9.0, "evaluations": [{"reward": 0.6}]}, 1)
    for name in ["lock", "run.json", *["summary.json"] * finished]:
        (folder / name).write_text("{}" if name == "summary.json" else "")
    if "0.7" in now:  # reached by the last round, which comes behind the last step
        (folder / "summary.json").write_text('{"steps": 14, "evaluations": [{"reward": 0.6}, {"reward": 0.7}]}')
    argv = ["configs/quickstart.yaml", f"resume={folder}", now]

    def record() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = record()
    if refused:
        with pytest.raises(ConfigError, match=r"^resume: nothing to do"):
            prepare(parse(argv), argv)
        assert record() == before
    else:
        prepared = prepare(parse(argv), argv)
        assert prepared
        prepared[2].close()


def test_a_job_that_resumes_begins_with_the_config_of_that_resume(tmp_path: Path, monkeypatch) -> None:
    """However often the job is queued: it resumes with the config that its command line names."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder, roles = made(tmp_path), plan(configs.load(["configs/quickstart.yaml"]))

    def named() -> str:
        submission = SlurmLauncher(folder, RestartLimits(1)).submission(roles)
        assert submission
        return submission.command[-2]

    assert named() == str(folder / "config.yaml")
    (folder / "next").mkdir()
    (folder / "next" / "config.yaml").write_text("of the resume")
    assert named() == str(folder / "submitted.yaml")
    submit(SimpleNamespace(submit=lambda: "17"), folder, (folder / "config.yaml").open())
    assert (folder / "submitted.yaml").read_text() == "of the resume"


def test_progress_is_a_checkpoint_or_a_journal_with_something_in_it(tmp_path: Path) -> None:
    folder = made(tmp_path)
    config = configs.load_resolved(folder / "config.yaml")
    journal, found = Journal(folder / "journal", sync=False, keep=False), []
    for event in (Begin(0), Admit(0, 0, 8, 8, "a", 0)):
        journal.append(event)
        journal.commit()
        found.append(holds_progress(config, folder))
    journal.close()
    assert found == [False, True]
    assert not holds_progress(configs.replace(config, "buffer.journal", "off"), folder), "a resume would be refused"


def test_a_resumed_run_keeps_the_name_of_its_folder_and_its_whole_journal(tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    folder = made(tmp_path / "renamed", "run.name=first", "buffer.keep_journal=true")
    for name in ("first", "renamed", "null"):
        config = reopen_run_folder(configs.load(["configs/quickstart.yaml", f"run.name={name}"]), folder)
        assert config.run.name == "renamed" and config.buffer.keep_journal
    with pytest.raises(ConfigError, match=r"^run\.name=other"):
        reopen_run_folder(configs.load(["configs/quickstart.yaml", "run.name=other"]), folder)


def test_what_a_resume_leaves_open_is_as_it_was(tmp_path: Path) -> None:
    """A learning rate that the first command sets and the second one does not."""
    folder = made(tmp_path, "learner.lr=5e-4", "learner.schedule=linear", "run.steps=50")
    argv = ["configs/quickstart.yaml", f"resume={folder}", "learner.schedule=linear"]
    for more, told in (([], "50"), (["run.steps=70"], "70")):
        config = load(parse([*argv, *(more or ["run.steps=50"])]))
        assert (config.learner.lr, str(config.learner.schedule_steps)) == (5e-4, told)
    config = configs.replace(config, "buffer.transport", "auto")  # as it is written here
    longer = ["run.steps=70 (was 50)", "learner.schedule_steps=70 (was 50)"]
    assert changes(config, folder) == longer
    checkpoints.write(folder, 50, lambda _: None, {"seconds": 9.0, "evaluations": []}, 1)
    *others, rate = changes(config, folder)
    assert others == longer and f"of {5e-4 * 20 / 70:.3g} in step 51 ({5e-4 / 100:.3g} in step 50)" in rate
    same = configs.replace(configs.load_resolved(folder / "config.yaml"), "eval.every", 7)
    assert [each.partition("=")[0] for each in changes(same, folder)] == ["eval.every"]


@pytest.mark.parametrize(
    ("now", "allowed"),
    [({"train": "2"}, True), ({"train": "1", "heldout_path": "2"}, False), ({"train": "1", "heldout_path": "1"}, None)],
)
def test_other_rows_are_refused_unless_they_may_change(
    tmp_path: Path, now: dict[str, str], allowed: bool | None
) -> None:
    """Never where prompts that are held out may have been trained. `allowed` None: they have not changed."""
    folder, argv = made(tmp_path), ["configs/quickstart.yaml"]
    earlier = {"train": "1"} | ({"heldout_path": "1"} if "heldout_path" in now else {})
    write_record(configs.load(argv), folder, argv, earlier)
    (folder / "next").mkdir()
    write_record(configs.load(argv), folder / "next", argv, now)
    for told in ("refuse", "allow"):
        config = configs.load([*argv, f"run.changed_data={told}"])
        refused = pytest.raises(ConfigError, match=r"heldout_path|train")
        with nullcontext() if allowed is None or (allowed and told == "allow") else refused:
            check_data(config, folder, now)


def test_a_resume_with_another_file_of_rows_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    task = f"task={{name: jsonl, path: {rows}, tokenizer: bytes, max_tokens: 8, reward: exact}}"
    argv = ["configs/quickstart.yaml", task, "engine=timed", "learner=timed", f"run.dir={tmp_path}", "run.name=a"]
    for count in (9, 9, 10):
        rows.write_text("".join(f'{{"prompt": "{each}", "answer": "1"}}\n' for each in range(count)))
        with pytest.raises(ConfigError, match=r"[89] rows") if count == 10 else nullcontext():
            prepared = prepare(parse(argv), argv)
            assert prepared
            prepared[2].close()
        argv = [*argv[:-1], f"resume={tmp_path}/a"]


def test_the_buffer_is_told_of_other_settings_of_the_learner(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert not other_settings(folder), "it is no resume"
    (folder / "next").mkdir()
    for now, words in (("learner.lr=1e-4", "learner.lr=0.0001 (was 0.002)"), ("run.steps=9", "")):
        configs.save(configs.load(["configs/quickstart.yaml", now]), folder / "next" / "config.yaml")
        assert other_settings(folder) == words


def test_a_run_of_several_settings_is_replayed_with_settings_of_ones_own_only(tmp_path: Path) -> None:
    folder = made(tmp_path)
    journal = Journal(folder / "journal", sync=False, keep=True)
    for event in (Branch(4, "learner.lr=1e-4 (was 0.002)"), Finish(4), Begin(4)):
        journal.append(event)
    journal.commit()
    journal.close()
    same = configs.load(["configs/quickstart.yaml", f"replay={folder}"])
    with pytest.raises(ConfigError, match=r"^replay: .*learner.lr=1e-4 \(was 0.002\)"):
        fit_to_replay(same)
    assert fit_to_replay(configs.replace(same, "learner.lr", 3e-3)).run.steps == 0


@pytest.mark.parametrize(
    ("name", "is_of"),
    [
        ("copy4-20260102-030405-2", "copy4"),  # two began in one second
        (f"{name_of('copy4', ['lr=1e-3', 'loss.clip-x=[1, 2]'])}-20260102-030405", "copy4"),
        ("copy4-long-lr=1e-3-20260102-030405", "copy4-long"),
    ],
)
@pytest.mark.parametrize("stem", ["copy4", "copy4-long"])
def test_runs_of_a_config_are_not_those_of_one_that_begins_alike(
    tmp_path: Path, name: str, is_of: str, stem: str
) -> None:
    config = configs.load(["copy4", f"run.dir={tmp_path}", "resume=auto"])
    (tmp_path / name).mkdir()
    configs.save(config, tmp_path / name / "config.yaml")
    assert find_run_to_resume(config, stem) == (tmp_path / name if stem == is_of else None)
    assert find_run_to_resume(configs.replace(config, "run.name", name), stem) == tmp_path / name
    for other in ("mode=sync", "scheduler.max_staleness=4"):
        config = configs.load(["copy4", f"run.dir={tmp_path}", "resume=auto", other])
        assert find_run_to_resume(config, stem) is None, "another mode or bound is another run"


QUICKSTART = "configs/quickstart.yaml"
LIGHT = """
import sys
from scripts.train import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
heavy = {"torch", "transformers", "tensorboard", "sglang", "ray"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def run_light(*argv: str) -> subprocess.CompletedProcess[str]:
    """`scripts.train` in a process that fails if it has imported something heavy."""
    command = [sys.executable, "-c", LIGHT, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_print_config_is_light_has_every_knob_and_is_a_config(tmp_path: Path) -> None:
    done = run_light(QUICKSTART, "--print-config", "learner.lr=5e-3", "algorithm=grpo")
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.yaml").write_text(done.stdout)
    assert configs.load_resolved(tmp_path / "config.yaml").learner.lr == 5e-3
    whole = configs.load([str(tmp_path / "config.yaml")])
    for kind in COMPONENTS.keys() & configs.Config.__dataclass_fields__.keys():
        assert set(getattr(whole, kind)) == {"name", *knobs(kind, getattr(whole, kind)["name"])}
    assert whole.loss["clip"] == 0.2 and whole.learner["num_minibatches"] == 2


def test_a_wrong_config_is_one_line_and_light() -> None:
    done = run_light(QUICKSTART, "learner.lrr=1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and "learner.lrr" in done.stderr


def test_a_run_that_slurm_refuses_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main([QUICKSTART, f"run.dir={tmp_path / 'runs'}", "run.name=x", "launcher=slurm"]) == 1
    assert not (tmp_path / "runs" / "x").exists()


def test_run_folders_do_not_collide(tmp_path: Path) -> None:
    config = configs.load([QUICKSTART, f"run.dir={tmp_path}"])
    made = [make_run_folder(config, "quickstart") for _ in range(3)]
    assert len({folder for folder, _ in made}) == 3
    assert all(folder.is_dir() and named.run.name == folder.name for folder, named in made)
    config = configs.replace(config, "run.name", "mine")
    make_run_folder(config, "quickstart")
    with pytest.raises(ConfigError, match=r"run\.name=mine: .*mine exists"):
        make_run_folder(config, "quickstart")


def test_the_record_is_enough_to_run_again(tmp_path: Path) -> None:
    argv = [QUICKSTART, "run.seed=7", "learner.lr=0.003"]
    config = configs.load(argv)
    write_record(config, tmp_path, argv, {"train": "2 rows (0)"})
    assert configs.load_resolved(tmp_path / "config.yaml") == config
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"][-3:] == argv and data_of(tmp_path) == {"train": "2 rows (0)"}
    again = configs.load([str(tmp_path / "config.yaml")])
    assert again == config


def test_a_folder_that_can_not_be_filled_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scripts.train.write_record", full)
    argv = [QUICKSTART, f"run.dir={tmp_path}", "run.name=mine"]
    with pytest.raises(OSError, match=r"No space left on device: .*mine"):
        prepare(parse(argv), argv)
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_found_where_the_shell_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = resolve_folders(configs.load([QUICKSTART, "run.dir=~/runs", "resume=~/runs/a"]))
    assert (config.run.dir, config.resume) == ("/home/me/runs", "/home/me/runs/a")


def test_transport_follows_the_port() -> None:
    assert resolve_transport(configs.load([QUICKSTART])).buffer.transport == "ipc"
    assert resolve_transport(configs.load([QUICKSTART, "buffer.port=7777"])).buffer.transport == "tcp"
    asked = configs.load([QUICKSTART, "buffer.transport=ipc"])
    assert resolve_transport(asked).buffer.transport == "ipc"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "quickstart"),
        (["engine.server.mem-fraction-static=0.4"], "quickstart-mem_fraction_static=0.4"),
        (["task.path=a b/../c.jsonl"], "quickstart-path=a_b_.._c.jsonl"),
        (["loss=dg"] * 30, "quickstart-" + ("loss=dg-" * 30)[:60].rstrip("-")),
    ],
)
def test_a_run_is_named_by_what_its_command_sets(overrides: list[str], name: str) -> None:
    assert name_of("quickstart", overrides) == name
