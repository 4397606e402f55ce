"""A judge: a model behind an OpenAI-compatible endpoint grades the answers of a group. README.md has the command."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from openai import AsyncOpenAI

TEMPLATE = """Question:
{question}

Reference answer: {reference}

Answer to grade:
{answer}

Grade the answer from 0 (useless) to 10 (perfect). End with a line `Score: NUMBER`."""
SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
HIGHEST = 10.0


class Judge:
    """`score` returns, for each answer, `own` × the reward of the task's verifier + `weight` × the judge's verdict, a
    number from 0 to 1. Any error costs the group ("group reward crashed"): no reward stands in for a missing verdict.

    timeout: seconds per attempt. retries: attempts of the client after the first. concurrency: requests at once."""

    def __init__(  # noqa: PLR0913 (knobs)
        self,
        folder: Path,
        name: str,
        *,
        base_url: str,
        model_name: str,
        own: float = 0.0,
        weight: float = 1.0,
        concurrency: Annotated[int, "[1, inf)"] = 16,
        timeout: Annotated[float, "(0, inf)"] = 60.0,
        retries: Annotated[int, "[0, inf)"] = 4,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a local server needs none
        self._client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=retries)
        self._places = asyncio.Semaphore(concurrency)
        self.model_name, self.own, self.weight = model_name, own, weight

    async def score(self, prompt: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[float]:
        question = "\n\n".join(str(each["content"]) for each in prompt["messages"]) or prompt["text"]
        if question is None:
            raise ValueError("a judge reads text, and this task has none; take one with text, such as jsonl")
        verdicts = await asyncio.gather(*(self._verdict(question, prompt["answer"], each["text"]) for each in answers))
        pairs = zip(answers, verdicts, strict=True)
        return [self.own * answer["reward"] + self.weight * verdict for answer, verdict in pairs]

    async def _verdict(self, question: str, reference: Any, answer: str) -> float:
        text = TEMPLATE.format(question=question, reference=reference, answer=answer)
        async with self._places:
            reply = await self._client.chat.completions.create(
                model=self.model_name, temperature=0, max_tokens=512, messages=[{"role": "user", "content": text}]
            )
        content = reply.choices[0].message.content or ""
        found = SCORE.findall(content)
        if not found or not 0 <= float(found[-1]) <= HIGHEST:
            wanted = f"a last line `Score: NUMBER`, from 0 to {HIGHEST:g}"
            raise ValueError(f"the judge at {self._client.base_url}: got {content[-200:]!r}, expected {wanted}")
        return float(found[-1]) / HIGHEST

    async def close(self) -> None:
        await self._client.close()
