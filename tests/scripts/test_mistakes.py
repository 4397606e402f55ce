"""The likeliest mistakes of a newcomer: each gets one message with its key, exit status 2, and leaves no file.
Mistakes of a reward that only a response shows: `test_preflight.py`; of a study: `test_ablation_parts.py`."""

import json
import re
import sys
from pathlib import Path

import pytest

from scripts import cli
from tests.scripts.test_commands import own_signals

PARTS = {"los": "loss", "grpo": "algorithm.grpo", "learning_rate": "learner.lr", "ess_scale": "learner.ess_scale"}
OF_A_RUN = ("report", "samples", "compare", "status", "ledger", "timeline", "stop", "join")
RUN, DATA = "train quickstart", "train quickstart task=jsonl task.tokenizer=bytes task.path="
MISTAKES = [
    # commands and files
    ("train", "trian quickstart"),
    ("config", "train"),
    ("ablate study.yaml", "train study.yaml"),
    ("run.steps", f"{RUN} --num-train-epochs=3"),
    ("loss: got '{name:', expected yaml", f"{RUN} loss={{name: ppo}}"),
    ("run.dir=file", f"{RUN} run.dir=file"),
    ("resume=nowhere", f"{RUN} resume=nowhere"),
    ("replay=empty", f"{RUN} --replay empty"),
    *[("empty", f"{verb} empty") for verb in OF_A_RUN],
    *[("nowhere", f"{verb} nowhere") for verb in ("simulate", "ablate", "serve", "eval", "export --to out", "check")],
    ("gird", "ablate study.yaml"),
    *[(near, f"config {wrong}") for wrong, near in PARTS.items()],
    # names of keys, also of TRL and verl
    ("groups_per_batch", f"{RUN} batch_size=16"),
    ("learner.warmup_steps", f"{RUN} warmup_ratio=0.1"),
    ("rows.jsonl: got a file", "keys rows.jsonl"),
    ("learner.lr", f"{RUN} actor_rollout_ref.actor.optim.lr=1e-6"),
    ("task.reward_weights", f"{RUN} reward_weights=[1]"),
    ("'template'", f"{DATA}rows.jsonl task.templat=x"),
    ("'columns'", f"{DATA}rows.jsonl task.column=x"),
    ("'answer_after'", f"{DATA}rows.jsonl task.answer_aftr=x"),
    ("'stop'", f"{RUN} sampling.stops=[x]"),
    ("'stop_ids'", f"{RUN} sampling.stop_id=[1]"),
    ("'best'", f"{RUN} checkpoint.bset=heldout/reward"),
    ("run.early_stop", f"{RUN} early_stop=3"),
    ("'ess_scale'", f"{RUN} learner.ess_scaled=true"),
    ("FOLDER", f"{RUN} model=gpt2"),
    # values
    ("async, sync", f"{RUN} mode=asynchronous"),
    ("algorithm=grpo", f"{RUN} loss=grpo"),
    ("staleness_policy: got 'dorp', expected 'wait' |", f"{RUN} staleness_policy=dorp"),
    ("run.steps: got 1.5, expected int", f"{RUN} run.steps=1.5"),
    ("learner.lr: got 'fast', expected float", f"{RUN} learner.lr=fast"),
    ("actors.count: got 0, expected at least 1", f"{RUN} actors.count=0"),
    ("scheduler.max_staleness: got 2, expected 0", f"{RUN} mode=sync scheduler.max_staleness=2"),
    ("sizing.group_size", f"{RUN} sizing.group_size=1"),
    ("sampling.temperature", f"{RUN} sampling.temperature=0"),
    ("sampling.top_p", f"{RUN} sampling.top_p=0.9"),
    ("sampling.max_new_tokens", f"{RUN} sampling.max_new_tokens=5000"),
    ("sampling.stop_ids: got [99], expected tokens from 0 to 12", f"{RUN} sampling.stop_ids=[99]"),
    ("checkpoint.best: got 'true'", f"{RUN} checkpoint.best=true"),
    ("run.trackers", f"{RUN} run.trackers=[wanbd]"),
    # data, models, rewards
    ("model=FOLDER", f"{RUN} task=jsonl task.path=rows.jsonl"),
    ("see task.columns", f"{DATA}names.csv"),
    ("expected (answer, response", "check tests.scripts.graders:of_trl"),
    ("module:Name", f"{DATA}rows.jsonl task.reward=grader.score"),
    ("task.reward.name: 'nomod:f'", f"{DATA}rows.jsonl task.reward=nomod:f"),
]
"""What the message has, and the command."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("newcomer")
    rows = [json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(20)]
    (place / "rows.jsonl").write_text("\n".join(rows))
    (place / "names.csv").write_text("question,solution\n1+1?,2\n")
    (place / "study.yaml").write_text("config: quickstart\ngird: {loss: [ppo]}\nseeds: [0]")
    (place / "empty").mkdir()
    (place / "file").touch()
    return place


@pytest.mark.parametrize(("told", "command"), MISTAKES, ids=[command for _, command in MISTAKES])
def test_a_mistake_is_one_message_with_its_key(
    folder: Path, told: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = sorted(folder.rglob("*"))
    with own_signals():
        try:
            code = cli.main(command.split())
        except SystemExit as ended:
            code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("error: ") == 1 and sorted(folder.rglob("*")) == before
    assert re.search(rf"(?<![\w.]){re.escape(told)}(?!\w)", error.partition("error: ")[2].splitlines()[0])
