"""The dry run's estimate against the sizes of real architectures and against the memory of a small run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config

from actors.engines.slot_cache import SlotCache
from actors.engines.torch_engine import TorchEngine
from areal_like.config import run_config as configs
from areal_like.models.causal_lm import qwen2
from areal_like.types import Batch
from areal_like.wire.groups import encode_group
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from scripts.bench.figures import random_batch
from scripts.starting import estimate
from scripts.starting.estimate import LOGIT_COPIES, Sizes
from scripts.train import main

torch.set_num_threads(1)
SIZES = {
    "0.5b": (494_032_768, 896, 24, 14, 4864, 2),
    "1.5b": (1_543_714_304, 1536, 28, 12, 8960, 2),
    "7b": (7_615_616_512, 3584, 28, 28, 18_944, 4),
    "32b": (32_763_876_352, 5120, 64, 40, 27_648, 8),
}
"""Parameters of Qwen2.5 as published, and its shape (`SHAPE`)."""
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads")


def write_config(folder: Path, size: str) -> str:
    """Write Qwen2.5's config.json and nothing else."""
    shape = dict(zip(SHAPE, SIZES[size][1:], strict=True))
    large = size in ("7b", "32b")
    shape |= {"vocab_size": 152_064 if large else 151_936, "tie_word_embeddings": not large}
    Qwen2Config(**shape, max_position_embeddings=32768, dtype="bfloat16").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("task", "size"), [("gsm8k", "0.5b"), ("math", "7b")])
def test_shipped_configs_are_sized_without_weights(task, size, tmp_path, capsys):
    count, hidden, layers, heads, _, kv_heads = SIZES[size]
    argv = [f"configs/qwen2.5/{task}.yaml", "--dry-run", f"model.path={write_config(tmp_path, size)}", "gpu=none"]
    assert main(argv) == 2
    printed, missing = capsys.readouterr()
    assert "tokenizer_config.json is missing" in missing  # missing files of a real start come last
    assert f"{count:,}" in printed and "larger than buffer.max_bytes" not in printed
    found = estimate.estimate(configs.load([argv[0], *argv[2:]]))
    assert found["model"] == {"parameters (n)": count, "weight update, per actor": 2 * count}
    assert found["step"]["samples (n)"] == 512 * 16 and found["step"]["optimizer steps (n)"] == 4
    assert found["learner"]["Adam's moments"] == 8 * count
    assert found["actor"]["KV cache, per token"] == 2 * layers * kv_heads * hidden // heads * 4
    main([*argv, "task.max_tokens=2000000"])
    assert "larger than buffer.max_bytes" in capsys.readouterr().out


SHARED = ("master weights", "Adam's moments")
SMALL = ["configs/quickstart.yaml", "model=small", "learner.num_minibatches=1", "groups_per_batch=4"]


def measured(*overrides: str, **knobs) -> tuple[dict, TorchLearner, Batch]:
    """The estimate of a small run, its learner, and a batch of the longest answers, which share only their prompts."""
    config = configs.load([*SMALL, *overrides])
    longest = estimate.lengths_of(estimate.plain_of(config))
    model = qwen2(0, 13, **{k: v for k, v in config.model.items() if k != "name"})
    learner = TorchLearner(model, ppo, partial(group), num_minibatches=1, **knobs)
    batch = random_batch(np.full((4, 8), longest.response), longest.prompt, 13)
    for each in batch.groups:
        each.digests = {0: "0" * 32}
        for number, sample in enumerate(each.samples):
            sample.tokens[longest.prompt] = number
    return estimate.estimate(config), learner, batch


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_weights_and_optimizer_are_exact(lora):
    found, learner, batch = measured(*(["learner.lora={rank: 4}"] if lora else []), lora=lora)
    learner.train(batch)
    figures, optimizer = found["learner"], learner.optimizer
    assert figures["weights"] == nbytes(learner.model.parameters())
    assert figures["master weights"] == nbytes([optimizer._master])
    assert figures["gradient"] == nbytes([optimizer.gradient])
    moments = [t for s in optimizer._adamw.state.values() for name, t in s.items() if name != "step"]
    assert figures["Adam's moments"] == nbytes(moments) > 0
    assert found["model"]["weight update, per actor"] == learner.snapshot().nbytes


def test_payloads_and_caches_are_exact_and_a_prompt_is_counted_once_per_group():
    found, learner, batch = measured()
    sizes = [len(encode_group(one)[1]) for one in batch.groups]
    assert found["buffer"]["group at most"] == sizes[0] and found["buffer"]["batch at most"] == sum(sizes)
    cache = SlotCache(learner.model.config, 64, learner.model.device, torch.float32)
    cache.reserve(64, int(found["step"]["longest sequence (tokens)"]))
    assert found["actor"]["KV cache, 64 such sequences"] == nbytes([cache.keys, cache.values])
    row, paths = 4 * (9 + 8 * 7), sum(len(sample.tokens) for sample in batch.samples)
    assert found["step"]["of these with each prompt once (tokens)"] == row + 4 * 8 < 0.6 * paths
    name = f"activations of {row} tokens"  # and copied keys while they are kept
    lean = estimate.estimate(configs.load([*SMALL, f"learner.micro_batch_tokens={row}"]))["learner"]
    assert found["learner"][name] == lean[name] + (paths - row) * Sizes(learner.model).kv(4)


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
def test_what_training_holds_is_within_a_tenth_of_what_the_allocator_gives(model, checkpointing):
    extra = f"learner.checkpoint_activations={checkpointing}"
    found, learner, batch = measured(model, extra, checkpoint_activations=checkpointing)
    learner.train(batch)  # which makes the optimizer's state
    optimizer, figures = learner.optimizer, found["learner"]
    moments = [t for s in optimizer._adamw.state.values() for t in s.values()]
    state = nbytes([*learner.model.parameters(), optimizer._master, optimizer.gradient, *moments])
    peak = peak_of(lambda: learner.train(batch))
    kept = next(value for name, value in figures.items() if name.startswith("activations of"))
    assert kept + figures["logits at once"] == pytest.approx(peak, rel=0.1)
    assert figures["sum"] == pytest.approx(state + peak, rel=0.1)


def test_the_engines_weights_are_exact():
    config = configs.load([*SMALL, "engine.compute_dtype=bfloat16"])
    model = qwen2(0, 13, **{k: v for k, v in config.model.items() if k != "name"})
    TorchEngine(model, slots=1, compute_dtype="bfloat16")
    # Norms are too small to be distinguished.
    assert estimate.estimate(config)["actor"]["weights"] == pytest.approx(nbytes(model.parameters()), rel=0.01)


def test_ranks_share_what_training_needs_and_few_logits_are_made_at_once():
    one, four, few = (
        estimate.estimate(configs.load([*SMALL, *overrides]))["learner"]
        for overrides in ([], ["learner.ranks=4"], ["learner.max_logits=1000", "learner.checkpoint_activations=true"])
    )
    assert [four[name] * 4 for name in SHARED] == [one[name] for name in SHARED]
    assert few["logits at once"] == LOGIT_COPIES * 4 * 1000 < one["logits at once"] and few["sum"] < one["sum"]
