"""Decoders of a real model on one workload: this project's engine, transformers' static cache, llama.cpp.

64 sequences: 8 prompts of 45 tokens × 8 samples, answers of 16 to 64 tokens unless told otherwise (equal lengths for
all contenders). "padded" is the engine with torch's attention, which reads all slots to the longest one; "invariant" is
the engine with `batch_invariant`. The engine samples and records logprobs; `generate` samples; llama.cpp takes the
likeliest token by NumPy, and copies the prompt's KV within a group, as the engine does. Called by
`scripts.bench.engine`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from actors.engines import ragged_attention
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import folder
from areal_like.types import Completion, Limits

from .figures import best_seconds

GROUPS, SIZE, PROMPT = 8, 8, 45
SHORTEST, LONGEST = 16, 64
SEQUENCES = GROUPS * SIZE
DTYPES = ("float32", "bfloat16")


class Ours:
    """An engine, and what it sampled last."""

    def __init__(self, path: Path, dtype: Any, batch_invariant: bool = False):
        model = folder(0, 0, path=str(path))
        self.engine = TorchEngine(model, slots=SEQUENCES, compute_dtype=dtype, batch_invariant=batch_invariant)
        self.done: list[Completion] = []

    def __call__(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        async def sample_all() -> None:
            limits = [Limits(int(n), key=i) for i, n in enumerate(lengths)]
            self.done = await asyncio.gather(*map(self.engine.generate, prompts, limits))

        asyncio.get_event_loop().run_until_complete(sample_all())


class Padded(Ours):
    """The engine before its attention knew how long each sequence is."""

    def __call__(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        with torchs_attention():
            super().__call__(prompts, lengths)


@contextmanager
def torchs_attention() -> Iterator[None]:
    """Engines attend as they do without numba."""
    least, ragged_attention.COMPILED_FROM = ragged_attention.COMPILED_FROM, sys.maxsize
    try:
        yield
    finally:
        ragged_attention.COMPILED_FROM = least


class Static:
    """transformers' `generate` with a static cache, to the longest answer."""

    def __init__(self, path: Path, dtype: str):
        self._model: Any = folder(0, 0, path=str(path)).to(getattr(torch, dtype)).eval()

    def __call__(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        ids, longest = torch.from_numpy(prompts), int(lengths.max())
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            cache_implementation="static",
        )


class LlamaCpp:
    """llama.cpp's batched decode of a GGUF file, through llama-cpp-python's low-level functions."""

    def __init__(self, gguf: Path, threads: int, longest: int):
        self._api: Any = importlib.import_module("llama_cpp")
        api = self._api
        self._quiet = api.llama_log_callback(lambda *_: None)  # held: C keeps the pointer
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(gguf).encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = SEQUENCES * (PROMPT + longest + 19)
        settings.n_batch = SEQUENCES * PROMPT
        settings.n_seq_max = SEQUENCES
        settings.n_threads = settings.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, settings)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(settings.n_batch, 0, 1)

    def __call__(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, True)
        first: dict[bytes, int] = {}
        sources = [first.setdefault(prompt.tobytes(), i) for i, prompt in enumerate(prompts)]
        fed = [(i, at, int(t), at == PROMPT - 1) for i in first.values() for at, t in enumerate(prompts[i])]
        likeliest = dict(zip(first.values(), self._decode(fed), strict=True))
        for i, source in enumerate(sources):
            if i != source:
                self._api.llama_memory_seq_cp(memory, source, i, -1, -1)
        tokens = [likeliest[source] for source in sources]
        for step in range(1, int(lengths.max())):
            alive = np.flatnonzero(lengths > step).tolist()
            found = self._decode([(i, PROMPT + step - 1, tokens[i], True) for i in alive])
            for i, token in zip(alive, found, strict=True):
                tokens[i] = token

    def _decode(self, fed: list[tuple[int, int, int, bool]]) -> list[int]:
        """(sequence, position, token, whether its successor is wanted) → the likeliest successors."""
        batch = self._batch
        batch.n_tokens = len(fed)
        for row, (sequence, position, token, wanted) in enumerate(fed):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode has failed")
        rows = sum(wanted for *_, wanted in fed)
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (rows, self._vocab))
        return [int(token) for token in logits.argmax(axis=1)]


def contenders_of(path: Path, ggufs: list[Path], threads: int, longest: int = LONGEST) -> dict[str, Callable[[], Any]]:
    """Name → what makes it, for answers of up to `longest` tokens."""
    found: dict[str, Callable[[], Any]] = {f"engine_{dtype}": partial(Ours, path, dtype) for dtype in DTYPES}
    found |= {f"invariant_{dtype}": partial(Ours, path, dtype, True) for dtype in DTYPES}
    found |= {f"padded_{dtype}": partial(Padded, path, dtype) for dtype in DTYPES}
    found |= {f"generate_{dtype}": partial(Static, path, dtype) for dtype in DTYPES}
    if importlib.util.find_spec("llama_cpp"):
        found |= {f"llama_{gguf.stem}": partial(LlamaCpp, gguf, threads, longest) for gguf in ggufs}
    return found


def compare(
    path: Path,
    makers: dict[str, Callable[[], Any]],
    threads: int,
    repeats: int,
    rng: np.random.Generator,
    answers: tuple[int, int] = (SHORTEST, LONGEST),
) -> dict[str, float]:
    """Tokens per second of each contender, and seconds until 64 different prompts have their first token."""
    contenders = {name: make() for name, make in makers.items()}
    vocab = AutoConfig.from_pretrained(path).vocab_size
    different = rng.integers(0, vocab, (SEQUENCES, PROMPT))
    groups = np.repeat(different[:GROUPS], SIZE, axis=0)
    lengths = rng.integers(answers[0], answers[1] + 1, SEQUENCES)
    ones = np.ones(SEQUENCES, int)
    clock = time.process_time if threads == 1 else time.perf_counter
    first = best_seconds({n: partial(c, different, ones) for n, c in contenders.items()}, repeats, clock)
    whole = best_seconds({n: partial(c, groups, lengths) for n, c in contenders.items()}, repeats, clock)
    found = {f"{name}_tokens_per_second": float(lengths.sum()) / seconds for name, seconds in whole.items()}
    found |= {f"{name}_first_token_seconds": seconds for name, seconds in first.items()}
    for dtype in DTYPES:
        if f"engine_{dtype}" not in contenders:
            continue
        done = contenders[f"engine_{dtype}"].done
        engine = np.concatenate([completion.logprobs for completion in done])
        exact, rounded = (_logprobs(path, groups, done, half) for half in (False, True))
        found |= _off(f"{dtype}_engine_to_float32_learner", engine, exact)
        found |= _off(f"{dtype}_engine_to_bfloat16_learner", engine, rounded)
        found |= _off(f"float32_to_bfloat16_learner_on_{dtype}_answers", exact, rounded)
    for contender in contenders.values():
        if isinstance(contender, Ours):
            asyncio.get_event_loop().run_until_complete(contender.engine.close())
    return found


@torch.no_grad()
def _logprobs(path: Path, prompts: np.ndarray, done: list[Completion], half: bool) -> np.ndarray:
    """A learner's logprobs of the answers: float32, or (`half`) bfloat16 by autocast below a float32 head."""
    model: Any = folder(0, 0, path=str(path)).eval()
    found = []
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            hidden = model.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        logprobs = model.lm_head(hidden.float()).log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(found)


def _off(name: str, some: np.ndarray, others: np.ndarray) -> dict[str, float]:
    off = np.abs(some - others)
    return {f"logprobs_{name}_mean": float(off.mean()), f"logprobs_{name}_max": float(off.max())}
