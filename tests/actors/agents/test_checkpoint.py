"""A checkpoint behind OpenAI's endpoints: OpenAI's own client against transformers' own forward, and lm-eval."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM

from actors.agents.checkpoint import CheckpointServer
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.types import Limits
from scripts.serve import text_of
from tests.folders import write_folder

torch.set_num_threads(1)
IDS = byte_tokenizer().encode
PROMPTS = ["What is 6*7?", "A", "Once upon a time there was a byte"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_folder(tmp_path_factory.mktemp("model"), "llama tied"))


Scene = Callable[[AsyncOpenAI, TorchEngine], Awaitable[Any]]


def served(folder: Path, scene: Scene) -> Any:
    """What a scene finds, with OpenAI's client."""

    async def run() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = TorchEngine(model, slots=4)
        serving = CheckpointServer(engine, text_of(folder, folder, 256), "tiny").served()
        async with serving as url, AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            found = await scene(client, engine)
        await engine.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), 60))


def truth(folder: Path, text: str) -> torch.Tensor:
    """Log-probabilities [t, vocab] after each byte of a text, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([IDS(text)])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_logprobs_of_a_prompt_are_those_of_transformers(folder: Path, tokens: int) -> None:
    """0 and 1 are one forward, 5 are sampled; several prompts of other lengths go together."""

    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> Any:
        knobs = {"max_tokens": tokens, "temperature": 0, "echo": True, "logprobs": 3}
        return await client.completions.create(model="any", prompt=PROMPTS, **knobs)

    found = served(folder, scene)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    for prompt, choice in zip(PROMPTS, found.choices, strict=True):
        told, count = choice.logprobs, len(choice.logprobs.tokens)
        assert choice.text.startswith(prompt) and told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert len(prompt) <= count <= len(prompt) + tokens
        expected = truth(folder, prompt)
        for place in range(1, len(prompt)):
            row = expected[place - 1]
            assert told.token_logprobs[place] == pytest.approx(float(row[IDS(prompt)[place]]), abs=1e-4)
            assert max(told.top_logprobs[place].values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert len(told.top_logprobs[place]) <= 4
        if tokens:
            best = float(expected[-1].max())
            assert told.token_logprobs[len(prompt)] == pytest.approx(best, abs=1e-4), "the first one said, greedily"
            assert told.token_logprobs[len(prompt)] == max(told.top_logprobs[len(prompt)].values())
    assert found.usage.prompt_tokens == sum(map(len, PROMPTS))


def test_a_text_is_continued_greedily_up_to_a_stop_and_ends_soon_after_it(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        limits = Limits(150, 0.0, (256, 10))
        ids = np.array(IDS(PROMPTS[0]), np.int32)
        said = byte_tokenizer().decode((await engine.generate(ids, limits)).tokens.tolist(), skip_special_tokens=True)
        knobs = {"model": "any", "max_tokens": 150, "temperature": 0}
        whole = (await client.completions.create(prompt=PROMPTS[0], **knobs)).choices[0]
        assert whole.text and whole.text == said
        again = (await client.completions.create(prompt=ids.tolist(), **knobs)).choices[0]
        assert again.text == whole.text and again.finish_reason == whole.finish_reason, "token ids say the same"
        stop = whole.text[3:5]
        cut = (await client.completions.create(prompt=PROMPTS[0], stop=[stop, "never there"], **knobs)).choices[0]
        assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"

    served(folder, scene)


def test_a_stop_ends_the_request_in_the_engine(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        knobs = {"model": "any", "max_tokens": 200, "temperature": 0, "prompt": PROMPTS[2]}
        text = (await client.completions.create(**knobs)).choices[0].text
        before = engine.stats()["tokens"]
        assert before > 20, "this model does not stop at once"
        await client.completions.create(stop=text[2], **knobs)
        assert 3 <= engine.stats()["tokens"] - before <= 9 and engine.stats()["running"] == 0

    served(folder, scene)


def test_messages_are_answered_in_the_chat_template_and_a_seed_says_the_same_again(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        codec = text_of(folder, folder, 256).codec
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
        ask = client.chat.completions.create
        greedy = await ask(model="any", messages=messages, temperature=0, max_tokens=20)
        expected = await engine.generate(codec.opening(messages), Limits(20, 0.0, (256, 10)))
        assert greedy.choices[0].message.content == codec.decode(expected.tokens)
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


def test_what_it_cannot_do_is_refused_with_the_reason(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"top_p": 0.5}, "samples from the whole distribution"),
            ({"n": 2}, "n=2 is not supported here"),
            ({"temperature": -1}, "temperature must be a number"),
            ({"max_tokens": 0}, "at least 1"),
            ({"logprobs": 21}, "from 0 to 20"),
            ({"prompt": ""}, "none of them empty"),
            ({"prompt": [[1], []]}, "none of them empty"),
            ({"prompt": [999]}, "outside 0..263"),
            ({"prompt": [-1]}, "from 0 on"),
            ({"prompt": [1 << 70]}, "from 0 on"),
            ({"prompt": "x" * 256}, "leave no room"),
            ({"prompt": "x" * 257, "echo": True, "logprobs": 1, "max_tokens": 0}, "exceed the model's 256 positions"),
        ]
        for knobs, words in refused:
            with pytest.raises(BadRequestError, match=words):
                await client.completions.create(**{"model": "any", "prompt": "a", **knobs})
        with pytest.raises(BadRequestError, match=r"top_p=0\.5 is refused: this engine samples"):
            await client.chat.completions.create(model="a", messages=[{"role": "user", "content": "a"}], top_p=0.5)
        with pytest.raises(NotFoundError, match="only /v1/completions"):
            await client.embeddings.create(model="any", input="a")
        said = await client.completions.create(model="any", prompt="x" * 250, max_tokens=99)
        assert said.usage.total_tokens <= 256, "an answer gets the room that there is"

    served(folder, scene)


def test_half_a_character_is_read_as_a_question_mark(folder: Path) -> None:
    text = text_of(folder, folder, 256)
    assert text.encode("a\ud800b").tolist() == text.encode("a?b").tolist()


def test_a_client_that_hangs_up_frees_its_slot(folder: Path) -> None:
    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> None:
        asking = asyncio.ensure_future(
            client.completions.create(model="any", prompt="a", max_tokens=250, temperature=5, stop="never there at all")
        )
        while not engine.stats()["running"]:
            await asyncio.sleep(0.001)
        asking.cancel()
        while engine.stats()["running"]:
            await asyncio.sleep(0.001)
        assert engine.stats()["tokens"] < 250

    served(folder, scene)


@pytest.mark.slow
def test_lm_eval_gets_its_figures_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed: the extra dev-more, or pip install 'lm_eval[api]'"
    )
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"{i} + {i} =", "choices": [f" {2 * i}", f" {i}!", " a"], "label": i % 3} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    choice = "task: choice\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\n"
    choice += "target_delimiter: ''\n"
    words = "task: words\noutput_type: generate_until\ndoc_to_target: '{{choices[0]}}'\n"
    words += "generation_kwargs: {until: ['e'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n"
    for name, text in (("choice", choice), ("words", words)):
        (tmp_path / f"{name}.yaml").write_text(text + data + "doc_to_text: '{{question}}'\n")

    def evaluated(url: str) -> Any:
        knobs = f"base_url={url}completions,model=tiny,tokenizer={folder},tokenizer_backend=huggingface,max_length=256"
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)  # the thousands that it ships
        tasks = {"tasks": ["choice", "words"], "task_manager": manager}
        return lm_eval.simple_evaluate("local-completions", model_args=knobs, batch_size=4, bootstrap_iters=0, **tasks)

    async def scene(client: AsyncOpenAI, engine: TorchEngine) -> Any:
        return await asyncio.to_thread(evaluated, str(client.base_url))

    found = served(folder, scene)
    samples = sorted(found["samples"]["choice"], key=lambda sample: sample["doc_id"])
    for row, sample in zip(rows, samples, strict=True):
        for text, [chance, is_greedy] in zip(row["choices"], sample["filtered_resps"], strict=True):
            expected = truth(folder, row["question"] + text)
            places = range(len(row["question"]), len(row["question"] + text))
            ids = IDS(row["question"] + text)
            assert chance == pytest.approx(sum(float(expected[at - 1, ids[at]]) for at in places), abs=1e-3)
            assert is_greedy == all(int(expected[at - 1].argmax()) == ids[at] for at in places)
    assert found["results"]["choice"]["acc,none"] == sum(sample["acc"] for sample in samples) / 6
    texts = [sample["filtered_resps"][0] for sample in found["samples"]["words"]]
    assert len(texts) == 6 and any(texts) and not any("e" in text for text in texts)
