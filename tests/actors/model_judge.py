"""A judge that is a model on this project's own engine: a tiny one that has learned to reply with a score."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.agents.checkpoint import CheckpointServer
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.chat import TokenizerCodec
from scripts.serve import text_of
from tests.folders import SHAPE


@contextlib.contextmanager
def judging_model(folder: Path) -> Iterator[str]:
    """Serve a tiny model by this project's own engine (`scripts.serve`), in a thread, until the block ends; yields the
    base URL. It has learned to reply `Score: N`, N from 0 to 9, whatever it is asked."""
    begun, loop, ended = queue.SimpleQueue[str](), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = TorchEngine(model, slots=4)
        async with CheckpointServer(engine, text_of(folder, folder, 256), "judge").served() as url:
            begun.put(url)
            await ended.wait()
        await engine.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield begun.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def teach_to_judge(folder: Path, steps: int = 60) -> None:
    """Write a tiny model that replies `Score: N`; which N differs from request to request."""
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 64, "initializer_range": 0.05, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=False))
    byte_tokenizer().save_pretrained(folder)
    codec = TokenizerCodec(byte_tokenizer(), chat=True)
    optimiser, draw = torch.optim.Adam(model.parameters(), 1e-2), random.Random(0)
    for _ in range(steps):
        rows, masks = [], []
        for _ in range(8):
            asked = "".join(draw.choices("abcdefgh 0123456789+-*/=?\n", k=24))
            prompt = codec.opening([{"role": "user", "content": asked}]).tolist()
            reply = [*codec.encode(f"Score: {draw.randrange(10)}").tolist(), 256]
            rows.append(prompt + reply)
            masks.append([0] * len(prompt) + [1] * len(reply))
        tokens, mask = torch.tensor(rows), torch.tensor(masks)
        logits = model(tokens[:, :-1]).logits.log_softmax(-1)
        loss = -(logits.gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum() / mask.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)
