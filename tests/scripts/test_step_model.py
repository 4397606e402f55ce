"""A checkpoint of a run on its way as a model's folder: the weights that the run would have published there."""

import shutil
from pathlib import Path

import pytest
import torch

from areal_like.config import run_config as configs
from areal_like.errors import UserError
from areal_like.run import checkpoints
from areal_like.run.run_folder import CONFIG
from learners.build import build_trainer
from scripts import eval as evaluation
from scripts import export
from scripts.eval import model_folder

torch.set_num_threads(1)
SMALL = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_attention_heads=2"]


def left_by(run: Path, *overrides: str) -> tuple[Path, Path]:
    """A checkpoint of changed weights, and the model that a run would leave of them."""
    config = configs.load(["quickstart", *SMALL, *overrides])
    run.mkdir()
    configs.save(config, run / CONFIG)
    trainer = build_trainer(config)
    if config.learner["name"] == "torch":
        trainer.optimizer._master += 0.01 * torch.randn(len(trainer.optimizer._master))
        trainer.optimizer._round()
    step = checkpoints.write(run, 7, trainer.save_state, {"steps": 7}, keep=2)
    trainer.save(str(run / "expected"))
    return step, run / "expected"


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]])
def test_it_has_the_weights_of_that_step(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, expected = left_by(tmp_path / "run", *more)
    folder = model_folder(step)
    assert folder == step / "model" and model_folder(step) == folder, "written once"
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert sorted(path.name for path in step.iterdir()) == ["learner.pt", "meta.json", "model"]
    assert evaluation.main([str(step), "--prompts", "2", "--max-tokens", "2"]) == 0
    assert "copy" in capsys.readouterr().out


def test_the_best_checkpoint_is_exported_or_else_the_newest(tmp_path: Path) -> None:
    step, expected = left_by(run := tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, best, reason in (("out", True, "checkpoint.best"), ("full", False, "exists")):
        with pytest.raises(configs.ConfigError, match=reason):
            export.export(run, tmp_path / folder, best)
    checkpoints.keep_best(run, [{"version": 7, "reward": 0.5}], "heldout/reward", 1)
    newest = checkpoints.write(run, 8, lambda folder: shutil.copy(step / "learner.pt", folder), {}, keep=1)
    (newest / "learner.pt").write_bytes(b"of other weights")
    export.main([str(run), "--to", str(tmp_path / "out"), "--best"])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit):  # its digest differs
        export.main([str(run), "--to", str(tmp_path / "other")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "out", "run"]


def test_a_checkpoint_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    step, _ = left_by(tmp_path / "run")
    with pytest.raises(configs.ConfigError, match="step-00000007"):
        model_folder(tmp_path / "run")  # its own model is not there yet
    state = (step / "learner.pt").read_bytes()
    (step / "learner.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(UserError, match="step-00000007"):
        model_folder(step)
    assert sorted(path.name for path in step.iterdir()) == ["learner.pt", "meta.json"], "nothing half is left"
    (step / "learner.pt").unlink()
    (step / "learner-0-of-2.pt").write_bytes(state)
    with pytest.raises(UserError, match=r"learner-1-of-2\.pt"):
        model_folder(step)
    (step / "learner-1-of-2.pt").write_bytes(state)  # twice as many weights as the model has
    with pytest.raises(UserError, match="ValueError"):
        model_folder(step)
    (tmp_path / "run" / CONFIG).unlink()
    with pytest.raises(configs.ConfigError, match=r"config\.yaml"):
        model_folder(step)
    with pytest.raises(configs.ConfigError, match="learner=timed"):
        model_folder(left_by(tmp_path / "timed", "learner=timed")[0])
