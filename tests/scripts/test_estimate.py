"""The dry run's estimate against published sizes and the memory of a small run; what fits a card of 80 GB."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from actors.engines.slot_cache import SlotCache
from actors.engines.torch_engine import TorchEngine
from areal_like.config import run_config as configs
from areal_like.config.layers import CONFIGS
from areal_like.launch.plan import plan
from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from scripts.bench.figures import random_batch
from scripts.starting import estimate
from scripts.starting.gpus import Gpus, placed
from scripts.train import main
from tests.folders import write_folder, write_repository

torch.set_num_threads(1)
SIZES = {
    "0.5b": (494_032_768, 896, 24, 14, 4864, 2),
    "1.5b": (1_543_714_304, 1536, 28, 12, 8960, 2),
    "7b": (7_615_616_512, 3584, 28, 28, 18_944, 4),
    "32b": (32_763_876_352, 5120, 64, 40, 27_648, 8),
}
"""Parameters of Qwen2.5 as published, and its shape (`SHAPE`)."""
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads")
GROUPS = {"algorithm", "gpu", "launcher", "mode", "model", "task", "ablation"}
SHIPPED = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name not in GROUPS)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json for each size of Qwen2.5, and nothing else."""
    place = tmp_path_factory.mktemp("shapes")
    for size, (_, *numbers) in SIZES.items():
        shape: dict[str, Any] = dict(zip(SHAPE, numbers, strict=True))
        shape |= {"vocab_size": 151_936 if "." in size else 152_064, "tie_word_embeddings": "." in size}
        Qwen2Config(**shape, max_position_embeddings=32768, dtype="bfloat16").save_pretrained(place / size)
    return place


def test_a_shipped_config_is_sized_without_weights(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["configs/qwen2.5/math.yaml", f"model.path={shapes / '0.5b'}", "gpu=none"]
    assert main([*argv, "--dry-run"]) == 2
    printed, missing = capsys.readouterr()
    assert "task.tokenizer: got " in missing  # missing files of a real start come last
    assert "494,032,768" in printed and "each rank of the learner" in printed


SMALL = ["configs/quickstart.yaml", "model=small", "learner.num_minibatches=1", "groups_per_batch=4"]


def estimated(*overrides: str) -> dict[str, float]:
    config = configs.load([*SMALL, *overrides])
    return estimate.learner_of(config, estimate.model_of(config))


def measured(*overrides: str, **knobs: Any) -> tuple[dict[str, float], TorchLearner, Batch]:
    """The estimate of a small run, its learner, and a batch of the longest answers, which share only their prompts."""
    config = configs.load([*SMALL, *overrides])
    longest = estimate.lengths_of(config)
    model = qwen2(0, 13, **{k: v for k, v in config.model.items() if k != "name"})
    learner = TorchLearner(model, ppo, group, num_minibatches=1, **knobs)
    batch = random_batch(np.full((4, 8), longest.response), longest.prompt, 13)
    for each in batch.groups:
        for number, sample in enumerate(each.samples):
            sample.tokens[longest.prompt] = number
    return estimated(*overrides), learner, batch


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


LORA = {"lora": {"rank": 4}}
HALF = LORA | {"compute_dtype": "bfloat16"}


@pytest.mark.parametrize("knobs", [{}, LORA, HALF], ids=["full", "lora", "lora in half"])
def test_weights_and_optimizer_are_exact(knobs: dict[str, Any]) -> None:
    found, learner, batch = measured(*[f"learner.{knob}={value}" for knob, value in knobs.items()], **knobs)
    learner.train(batch)
    optimizer = learner.optimizer
    assert found["weights"] == nbytes(learner.model.parameters())
    assert found["master weights"] == nbytes([optimizer._master])
    assert found["gradient"] == nbytes([optimizer.gradient])
    moments = [t for s in optimizer._adamw.state.values() for name, t in s.items() if name != "step"]
    assert found["Adam's moments"] == nbytes(moments) > 0


def test_engines_are_exact() -> None:
    config = configs.load([*SMALL, "engine.compute_dtype=bfloat16"])
    found = estimate.engine_of(config, estimate.model_of(config), 0)
    model = qwen2(0, 13, **{k: v for k, v in config.model.items() if k != "name"})
    TorchEngine(model, slots=1, compute_dtype="bfloat16")
    assert found["weights"] == pytest.approx(nbytes(model.parameters()), rel=0.01)  # norms are too small to be seen
    cache = SlotCache(model.config, 64, model.device, torch.bfloat16)
    cache.reserve(64, sum(estimate.lengths_of(config)))
    assert found["keys and values"] == nbytes([cache.keys, cache.values])


def peak_of(step: Callable[[], object]) -> int:
    """The peak of bytes that torch's allocator holds, above those before the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


MIDDLE = "model={name: qwen2, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 2, "
MIDDLE += "intermediate_size: 1024}"


@pytest.mark.parametrize(
    ("model", "checkpointing"), [("model=tiny", False), ("model=small", True), (MIDDLE, False), (MIDDLE, True)]
)
def test_what_training_holds_is_within_a_tenth_of_what_the_allocator_gives(model: str, checkpointing: bool) -> None:
    extra = f"learner.checkpoint_activations={checkpointing}"
    found, learner, batch = measured(model, extra, checkpoint_activations=checkpointing)
    learner.train(batch)  # which makes the optimizer's state
    optimizer = learner.optimizer
    moments = [t for s in optimizer._adamw.state.values() for t in s.values()]
    state = nbytes([*learner.model.parameters(), optimizer._master, optimizer.gradient, *moments])
    peak = peak_of(lambda: learner.train(batch))
    assert found["activations"] + found["logits at once"] == pytest.approx(peak, rel=0.1)
    assert sum(found.values()) == pytest.approx(state + peak, rel=0.1)


def test_it_is_within_a_tenth_of_what_a_card_held() -> None:
    """GiB that torch had allocated at most on an H200: a learner of 0.5 B parameters without recomputing, in answers of
    up to 625 tokens, and an engine with `engine.memory=8`; published bits lay in main memory then."""
    shape = [f"model.{name}={number}" for name, number in zip(SHAPE, SIZES["0.5b"][1:], strict=True)]
    half = [f"{room}.{knob}" for room in ("learner", "engine") for knob in ("device=cuda", "compute_dtype=bfloat16")]
    fixed = ["learner.checkpoint_activations=false", "learner.micro_batch_tokens=16384", "learner.max_logits=67108864"]
    config = configs.load(["configs/bench/one_card.yaml", *shape, *half, *fixed])
    model = estimate.model_of(config)
    learner, engine = estimate.learner_of(config, model), estimate.engine_of(config, model, 150 * 10**9)
    bits = learner["published bits"]
    assert bits == engine["published bits"] == 2 * sum(p.numel() for p in model.parameters())
    assert (sum(learner.values()) - bits) / estimate.GIB == pytest.approx(26.09, rel=0.1)
    assert (sum(engine.values()) - engine["runtime"] - bits) / estimate.GIB == pytest.approx(8.67, rel=0.1)


def test_ranks_share_what_training_needs_and_few_logits_are_made_at_once() -> None:
    one, four = estimated(), estimated("learner.ranks=4")
    few = estimated("learner.max_logits=1000", "learner.checkpoint_activations=true")
    for name in ("master weights", "Adam's moments"):
        assert four[name] * 4 == one[name]
    assert few["logits at once"] == estimate.LOGIT_COPIES * 4 * 1000 < one["logits at once"]
    assert few["activations"] < one["activations"]


@pytest.mark.parametrize(
    ("recipe", "gpu", "size", "words"),
    [
        *((f"gsm8k/{size}", "1x", size, "it fits") for size in ("0.5b", "1.5b")),
        ("qwen2.5/math", "1x", "0.5b", "it fits"),
        ("qwen2.5/math", "1x", "7b", "too small for both: "),
        ("qwen2.5/math", "8x", "7b", "it fits"),
        ("qwen2.5/math", "8x", "32b", "too small for the learner: "),
    ],
)
def test_on_h100_each_size_fits_or_is_told_what_to_change(
    shapes: Path, recipe: str, gpu: str, size: str, words: str
) -> None:
    devices = int(gpu[0])
    config = placed(configs.load([recipe, f"model.path={shapes / size}", f"gpu={gpu}"]), Gpus("stated", devices))
    said = estimate.describe(config, plan(config), estimate.model_of(config), 80 * 10**9)
    assert words in said and f"{SIZES[size][0]:,} parameters" in said, said
    assert f"{devices} device{'s' * (devices > 1)} of 74.5 GiB\n" in said


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small model and rows for any task."""
    place = tmp_path_factory.mktemp("material")
    write_folder(place / "model", "qwen2")
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    for name, first in (("train", 0), ("heldout", 600)):
        rows = []
        for n in range(first, first + 600):
            prompts = dict.fromkeys(("prompt", "question", "problem"), f"{n} + {n} =")
            rows.append(json.dumps(prompts | dict.fromkeys(("answer", "completion"), f"#### {2 * n}")))
        (place / f"{name}.jsonl").write_text("\n".join(rows))
    sums = [{"question": f"{n} + {n} =", "answer": f"#### {2 * n}"} for n in range(300)]
    return [
        f"model.path={place / 'model'}",
        *(f"task.{key}={place / file}.jsonl" for key, file in (("path", "train"), ("heldout_path", "heldout"))),
        f"task.path={write_repository(place / 'gsm8k', 'main', train=sums[:280], test=sums[280:])}",
    ]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_every_shipped_config_passes_the_dry_run_of_a_node(
    file: Path, material: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    needed = material[: 1 if "name: folder" in file.read_text() else 0]
    if file.parent.name in ("qwen2.5", "smollm2"):
        needed = material[:3]
    elif file.parent.name == "gsm8k":
        needed = material[::3]
    code = main([str(file), "--dry-run", "--devices", "8", "--device-memory", "80GB", *needed])
    said, error = capsys.readouterr()
    assert code == 0, error
    assert ("it fits" in said) == ("of 74.5 GiB" in said) and "TOO MUCH" not in said


def test_gpt_2_names_its_sizes_otherwise() -> None:
    with torch.device("meta"):
        sizes = estimate.Sizes(AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_head=4)))
    assert (sizes.inner, sizes.layers * sizes.layer + sizes.outside) == (128, sizes.count)
