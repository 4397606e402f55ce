"""Training goes on from an adapter that peft has written."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_like.config.registry import ConfigError
from learners.adapters import Adapters
from learners.objective import frozen
from tests.learners.batches import make_batch, tiny_model
from tests.learners.test_learner import learner_of
from tests.seeds import seeded

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter: peft's own files, with B that is not 0."""
    import peft

    place = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS, task_type="CAUSAL_LM")
    torch.manual_seed(7)
    model = peft.get_peft_model(tiny_model(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(place)
    return place


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits


def test_it_begins_with_the_weights_that_peft_merges(folder: Path) -> None:
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(frozen(tiny_model(), torch.bfloat16), folder)
    merged = Adapters(tiny_model(), 0, torch.bfloat16, path=str(folder)).merged()
    model = tiny_model()
    model.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)


def test_it_trains_on_and_leaves_a_folder_that_peft_loads(folder: Path, tmp_path: Path) -> None:
    made = learner_of(lora={"path": str(folder)}, lr=1e-2, num_minibatches=1)
    assert made.train(make_batch(seeded(0)))["grad_norm"] > 0
    made.save(str(tmp_path))
    before, after = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "adapter"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (3, 5, sorted(TARGETS))
    again = learner_of(lora={"path": str(tmp_path / "adapter")}, lr=1e-2, num_minibatches=1)
    assert again.snapshot().digest() == made.snapshot().digest(), "and so does another run"


def test_the_reference_is_the_adapter_that_the_run_began_with(folder: Path) -> None:
    made = learner_of(lora={"path": str(folder)}, lr=3e-2, num_minibatches=1, kl_loss=0.1)
    found = [made.train(make_batch(seeded(0)))["reference_kl"] for _ in range(3)]
    assert found[0] == pytest.approx(0.0, abs=1e-6) and found[2] > 1e-4
    assert {name.split(".")[-2] for name in made._adapters.trained()} == {"default"}, "the copy stays as it is"


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"rank": 4}, r"learner.lora.rank=4: the adapter in .* has 3; leave it out"),
        ({"alpha": 6.0}, r"learner.lora.alpha=6.0: .* has 5.0"),
        ({"targets": ["q_proj"]}, r"learner.lora.targets=\['q_proj'\]: .* has \['down_proj', 'q_proj'\]"),
    ],
    ids=["rank", "alpha", "targets"],
)
def test_knobs_that_say_otherwise_are_refused(folder: Path, knobs: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        learner_of(lora={"path": str(folder)} | knobs)
    learner_of(lora={"path": str(folder), "rank": 3, "alpha": 5, "targets": TARGETS})


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    import peft

    with pytest.raises(ValueError, match=r"another model: \S*down_proj is 32 × 64 there, and 32 × 48 here"):
        Adapters(tiny_model("llama"), 0, torch.float32, path=str(folder))
    strange = torch.nn.ModuleDict({"other": torch.nn.Linear(3, 3)})
    peft.get_peft_model(strange, peft.LoraConfig(target_modules=["other"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"another model: this one has no layer other"):
        Adapters(tiny_model(), 0, torch.float32, path=str(tmp_path))


def altered(folder: Path, place: Path, **changes: object) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (place / "adapter_config.json").write_text(json.dumps(config))
    (place / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return place


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, r"describes 'IA3', not LORA"),
        ({"use_dora": True}, r"has use_dora=True, which is not supported"),
        ({"bias": "all"}, r"has bias='all'"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save"),
        ({"lora_bias": True}, r"has lora_bias=True"),
        ({"trainable_token_indices": [3]}, r"has trainable_token_indices"),
        ({"alora_invocation_tokens": [3]}, r"has alora_invocation_tokens"),
        ({"r": 8}, r"do not fit rank 8"),
        ({"r": None}, r"lacks r, lora_alpha or target_modules"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained_on_is_refused(folder: Path, tmp_path: Path, changes: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        learner_of(lora={"path": str(altered(folder, tmp_path, **changes))})


def test_a_dropout_of_the_folder_is_not_applied(folder: Path, tmp_path: Path) -> None:
    """Else ratios on policy would differ from 1, and a replay would not be the same twice."""
    model = tiny_model().eval()
    Adapters(model, 0, torch.float32, reference=True, path=str(altered(folder, tmp_path, lora_dropout=0.5)))
    assert any(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert not any(module.training for module in model.modules())


def test_folders_without_an_adapter_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.lora.path: no adapter_config.json in .*want an adapter's folder"):
        learner_of(lora={"path": str(tmp_path)})


def test_weights_that_are_cut_short_are_told(tmp_path: Path) -> None:
    from areal_like.models.causal_lm import folder as model_in

    tiny_model().save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(ValueError, match=r"the weights in .* can't be read: .*get the model again"):
        model_in(0, 0, path=str(tmp_path))
