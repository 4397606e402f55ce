"""What the bench of a pretrained model counts: computed tokens, and the memory of all of its processes."""

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import torch

from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from scripts.bench import pretrained as bench
from tests.folders import write_folder
from tests.learners.batches import make_batch, tiny_model

torch.set_num_threads(1)


def prefixed_batch():
    """The samples of a group share a prompt of 20 tokens, and no token after it."""
    batch = make_batch(np.random.default_rng(0))
    for number, one in enumerate(batch.groups):
        for i, sample in enumerate(one.samples):
            answer = sample.tokens[sample.prompt_length :].copy()
            answer[0] = i
            sample.tokens = np.concatenate([np.full(20, number, np.int32), answer])
            sample.prompt_length = 20
    return batch


def test_an_extra_pass_counts_as_computed():
    batch = prefixed_batch()
    once, twice = (
        bench.computed_over_unique(
            TorchLearner(tiny_model(), decoupled_ppo, partial(group), num_minibatches=1, num_minibatch_epochs=epochs),
            batch,
        )
        for epochs in (1, 2)
    )
    assert twice >= once + 0.9


def test_the_folder_has_another_end_token(tmp_path):
    from transformers import AutoTokenizer

    model = write_folder(tmp_path / "model", "llama tied")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": [bench.SILENT]})
    tokenizer.save_pretrained(model)
    folder = bench.silent_folder(tmp_path / "model", tmp_path / "silent")
    silent = AutoTokenizer.from_pretrained(folder)
    assert silent.eos_token == bench.SILENT
    for name in ("config", "generation_config"):
        assert json.loads((folder / f"{name}.json").read_text())["eos_token_id"] == silent.eos_token_id
    assert (folder / "model.safetensors").is_symlink()


def test_memory_is_that_of_all_processes():
    code = "import sys, subprocess; data = bytearray(60_000_000); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "data = bytearray(60_000_000); print('here', flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "here\n"
    family = bench.family(parent.pid)
    assert len(family) == 2 and os.getpid() not in family
    assert sum(map(bench.proportional_bytes, family)) > 120_000_000
    parent.communicate("\n")
