"""A checkpoint behind the chat endpoint: OpenAI's client against the engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.agents.checkpoint import CheckpointServer
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.text import byte_tokenizer
from areal_like.types import Limits
from tests.actors.agents.scene import user
from tests.actors.looped import looped
from tests.folders import write_folder

torch.set_num_threads(1)
CODEC, STOP = TokenizerCodec(byte_tokenizer(), chat=True), (256, 10)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Any, TorchEngine]]:
    """OpenAI's client of a served model, and the engine behind it."""
    from openai import AsyncOpenAI  # long: no process that lists tests shall wait for it

    model = AutoModelForCausalLM.from_pretrained(write_folder(folder, "llama tied"), dtype=torch.float32)
    engine = TorchEngine(model, slots=4)
    serving = CheckpointServer(engine, CODEC, STOP, 256, "tiny").served()
    async with serving as url, AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client, engine
    await engine.close()


@looped
async def test_messages_are_answered_in_the_chat_template_and_a_seed_repeats_an_answer(tmp_path: Path) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
    async with served(tmp_path) as (client, engine):

        async def ask(**knobs: Any) -> Any:
            return await client.chat.completions.create(model="any", messages=messages, max_tokens=20, **knobs)

        async def sampled(**knobs: Any) -> str:
            return (await ask(**knobs)).choices[0].message.content

        greedy = await ask(temperature=0)
        expected = await engine.generate(CODEC.opening(messages), Limits(20, 0.0, STOP))
        assert greedy.choices[0].message.content == CODEC.decode(expected.tokens)
        assert greedy.usage.completion_tokens == len(expected.tokens)
        text = greedy.choices[0].message.content
        cut = (await ask(temperature=0, stop=text[2])).choices[0]
        assert cut.message.content == text[: text.index(text[2])] and cut.finish_reason == "stop"
        assert await sampled(seed=3) == await sampled(seed=3) != await sampled(seed=4)
        assert await sampled() != await sampled(), "without a seed each request has random numbers of its own"
        parts = [part async for part in await ask(seed=3, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == await sampled(seed=3)
        assert [each.id async for each in client.models.list()] == ["tiny"]


@looped
async def test_other_requests_are_refused_with_the_key(tmp_path: Path) -> None:
    from openai import BadRequestError, NotFoundError, PermissionDeniedError

    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
    refused = {"top_p": 0.5, "n": 2, "temperature": -1, "max_tokens": 0, "messages": [user("x" * 256)]}
    async with served(tmp_path) as (client, _):
        for name, value in refused.items():
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(**(asked | {name: value}))
            assert error.value.param == name
        with pytest.raises(BadRequestError):
            await client.chat.completions.create(**asked, logprobs=True, top_logprobs=20)
        with pytest.raises(PermissionDeniedError):
            await client.with_options(default_headers={"Host": "example.org"}).models.list()
        with pytest.raises(NotFoundError):
            await client.completions.create(model="any", prompt="a")
