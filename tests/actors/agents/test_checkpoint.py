"""A checkpoint behind the chat endpoint: OpenAI's client against the engine, and lm-eval."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM

from actors.agents.checkpoint import CheckpointServer
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.chat import TokenizerCodec
from areal_like.types import Limits
from tests.folders import write_folder

torch.set_num_threads(1)
CODEC, STOP = TokenizerCodec(byte_tokenizer(), chat=True), (256, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_folder(tmp_path_factory.mktemp("model"), "llama tied"))


Scene = Callable[[AsyncOpenAI, TorchEngine], Awaitable[Any]]


def served(folder: Path, scene: Scene) -> Any:
    """What a scene finds, with OpenAI's client."""

    async def run() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = TorchEngine(model, slots=4)
        serving = CheckpointServer(engine, CODEC, STOP, 256, "tiny").served()
        async with serving as url, AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            found = await scene(client, engine)
        await engine.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_messages_are_answered_in_the_chat_template_and_a_seed_says_the_same_again(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
        ask = client.chat.completions.create
        greedy = await ask(model="any", messages=messages, temperature=0, max_tokens=20)
        expected = await engine.generate(CODEC.opening(messages), Limits(20, 0.0, STOP))
        assert greedy.choices[0].message.content == CODEC.decode(expected.tokens)
        assert greedy.usage.completion_tokens == len(expected.tokens)

        async def sampled(**knobs: Any) -> str:
            said = await ask(model="any", messages=messages, max_tokens=20, **knobs)
            return said.choices[0].message.content

        assert await sampled(seed=3) == await sampled(seed=3) != await sampled(seed=4)
        assert await sampled() != await sampled(), "without a seed each request has random numbers of its own"
        parts = [part async for part in await ask(model="any", messages=messages, max_tokens=20, seed=3, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == await sampled(seed=3)
        assert [each.id async for each in client.models.list()] == ["tiny"]

    served(folder, scene)


def test_what_it_cannot_do_is_refused_with_its_key(folder: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 0.5}, "top_p"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 256}]}, "messages"),
    ]

    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        asked = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
        for knobs, key in refused:
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(**(asked | knobs))  # type: ignore[call-overload]
            assert error.value.param == key
        with pytest.raises(NotFoundError):
            await client.completions.create(model="any", prompt="a")

    served(folder, scene)


def test_a_stop_and_a_client_that_hangs_up_free_the_slot(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        knobs: Any = {"model": "any", "max_tokens": 200, "messages": [{"role": "user", "content": "Once upon a time"}]}
        text = (await client.chat.completions.create(temperature=0, **knobs)).choices[0].message.content or ""
        cut = (await client.chat.completions.create(temperature=0, stop=text[2], **knobs)).choices[0]
        assert cut.message.content == text[: text.index(text[2])] and cut.finish_reason == "stop"
        asking = asyncio.ensure_future(client.chat.completions.create(temperature=5, **knobs))
        while not engine.stats()["running"]:
            await asyncio.sleep(0.001)
        asking.cancel()
        while engine.stats()["running"]:
            await asyncio.sleep(0.001)

    served(folder, scene)


@pytest.mark.slow
def test_lm_eval_gets_its_answers_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed: the extra dev-more, or pip install 'lm_eval[api]'"
    )
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"{i} + {i} =", "answer": f" {2 * i}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.yaml").write_text(
        "task: words\noutput_type: generate_until\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs: {until: ['e'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
        "doc_to_text: '{{question}}'\n"
    )

    def evaluated(url: str) -> Any:
        knobs = f"base_url={url}chat/completions,model=tiny"
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)  # the thousands that it ships
        tasks: Any = {"tasks": ["words"], "task_manager": manager, "apply_chat_template": True}
        return lm_eval.simple_evaluate("local-chat-completions", model_args=knobs, bootstrap_iters=0, **tasks)

    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> Any:
        return await asyncio.to_thread(evaluated, str(client.base_url))

    texts = [sample["filtered_resps"][0] for sample in served(folder, scene)["samples"]["words"]]
    assert len(texts) == 6 and any(texts) and not any("e" in text for text in texts)
