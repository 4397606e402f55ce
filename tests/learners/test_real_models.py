"""Hugging Face folders of many architectures: trained, served by the embedded engine, saved, loaded again."""

import asyncio
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.engines.decoders import LLAMA_LIKE, FusedDecoder
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import folder, publishable, state_of
from areal_like.types import Limits
from areal_like.weights.replica import Update
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from tests.folders import CONFIGS, write_folder
from tests.learners.batches import make_batch
from tests.seeds import seeded

torch.set_num_threads(1)
LORA = {"rank": 4, "alpha": 8.0}


def learner_of(path: str, **knobs) -> TorchLearner:
    return TorchLearner(folder(0, 258, path=path), ppo, partial(group), lr=1e-2, **knobs)


def batch_of(index: int = 0):
    return make_batch(seeded(index), index=index, vocab=258)


def logprobs(model, tokens, response: int) -> np.ndarray:
    """The logprobs of the last `response` tokens, by the model's own forward."""
    with torch.no_grad():
        rows = model(torch.as_tensor(np.asarray(tokens, np.int64))[None]).logits[0].log_softmax(-1)
    chosen = torch.as_tensor(np.asarray(tokens[-response:], np.int64))
    return rows[-response - 1 : -1].gather(-1, chosen[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("kind", "lora"), [*((kind, None) for kind in CONFIGS), *((kind, LORA) for kind in ("qwen2", "llama", "qwen3"))]
)
def test_train_publish_serve_save_load(kind, lora, tmp_path):
    """The saved folder holds the published weights, and the engine samples from exactly that."""
    path = write_folder(tmp_path / "base", kind)
    learner = learner_of(path, lora=lora)
    served = folder(0, 258, path=path)
    assert FusedDecoder.fits(served) == (kind.split()[0] in LLAMA_LIKE and not {"moe", "window"} & set(kind.split()))
    assert publishable(served).digest() == learner.snapshot().digest()  # both sides start from the same bits
    engine = TorchEngine(served, slots=4)
    learner.train(batch_of())
    state = learner.snapshot()
    assert state.digest() != publishable(folder(0, 258, path=path)).digest()
    learner.save(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and state_of(loaded).digest() == state.digest()
    truth = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    rope, saved = getattr(served.config, "rope_parameters", {}), json.loads((tmp_path / "out/config.json").read_text())
    assert saved.get("rope_theta") == rope.get("full_attention", rope).get("rope_theta"), "as transformers 4 reads it"

    async def sample():
        await engine.load(Update(1, state.digest(), state))
        prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 9)]
        made = await asyncio.gather(*[engine.generate(p, Limits(12, key=i)) for i, p in enumerate(prompts)])
        await engine.close()
        return list(zip(prompts, made, strict=True))

    for prompt, made in asyncio.run(sample()):
        whole = np.array([*prompt, *made.tokens], np.int32)
        np.testing.assert_allclose(made.logprobs, logprobs(truth, whole, 12), atol=2e-4)
        if lora is None:  # its merged weights are rounded where they are published
            beside = np.arange(99, dtype=np.int32)  # the length of another sequence changes no angles
            np.testing.assert_allclose(made.logprobs, learner.logprobs_of([whole, beside])[0][0][-12:], atol=2e-4)


def test_merged_weights_compute_what_the_adapters_do(tmp_path):
    """In float32 the two agree up to rounding; in bfloat16 they differ by far less than training moved them."""
    import peft

    path = write_folder(tmp_path / "models--org--name" / "snapshots" / ("0" * 40), "llama")
    learner = learner_of(path, lora=LORA, publish_dtype="float32")
    learner.train(batch_of(0))
    learner.save(str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_bytes())
    assert (written["base_model_name_or_path"], written["revision"]) == ("org/name", "0" * 40)
    tokens = torch.arange(3, 40)[None]
    learner.model.set_attn_implementation("eager")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        ours, merged, before = (m(tokens).logits for m in (learner.model, loaded, base))
        torch.testing.assert_close(merged, ours, atol=1e-4, rtol=1e-4)
        assert (before - ours).abs().max() > 0.1
        with_adapter = peft.PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
        torch.testing.assert_close(with_adapter(tokens).logits, ours, atol=1e-4, rtol=1e-4)
    names = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    forms = {re.sub(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj", "MODULE", name) for name in names}
    assert forms == {f"base_model.model.model.MODULE.lora_{matrix}.weight" for matrix in "AB"}, "as vLLM reads them"


def test_the_reference_is_the_model_without_adapters(tmp_path):
    """KL to the reference equals that of full training, which holds a copy of the initial weights."""
    path = write_folder(tmp_path / "base", "qwen2")
    light = learner_of(path, kl_loss=0.1, num_minibatches=1, lora=LORA)
    assert light._reference is light.model
    with pytest.raises(ValueError, match="leave it out"):
        learner_of(path, lora={"targets": ["embed_tokens"]})
    assert light.train(batch_of(0))["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert light.train(batch_of(0))["reference_kl"] > 1e-4
