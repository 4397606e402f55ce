"""A judge: a model behind an OpenAI-compatible endpoint grades the answers of a group (`group_reward=judge`). Every
reply is kept, by the content of its request: a resume repeats no request. One that fails after all retries, or brings
no grade, costs its group ("group reward crashed")."""

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any

from actors.measures import quotient
from actors.reward_pool import RewardError

TEMPLATE = """Question:
$question

Reference answer: $reference

Answer to grade:
$answer

Grade the answer from $lowest (useless) to $highest (perfect). End with a line `Score: NUMBER`."""
SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.I)


class Judge:
    """`score` returns, for each answer, `own` × the reward of the task's verifier + `weight` × the judge's verdict: its
    grade, between the two numbers of `scale`, as a number from 0 to 1.

    template: the request, with $question, $reference and $answer, in place of the shipped one. The reply must hold
        `Score: NUMBER`; the last one counts.
    base_url, model_name, api_key: the endpoint, the model there, and the name of the environment variable with the
        key (a local server needs none).
    temperature, max_tokens: of the judge's reply.
    concurrency: requests of one actor at a time. timeout: seconds per attempt. retries: attempts after the first.
    cache: a folder to keep replies in, which several runs may share; null: RUN/judge.

    Raises ValueError without the package openai.
    """

    def __init__(  # noqa: PLR0913 (most are knobs)
        self,
        folder: Path,
        name: str,
        *,
        base_url: str,
        model_name: str,
        own: Annotated[float, "(-inf, inf)"] = 0.0,
        weight: Annotated[float, "(-inf, inf)"] = 1.0,
        scale: Sequence[float] = (0.0, 10.0),
        template: str | None = None,
        temperature: Annotated[float, "[0, inf)"] = 0.0,
        max_tokens: Annotated[int, "[1, inf)"] = 512,
        concurrency: Annotated[int, "[1, inf)"] = 16,
        timeout: Annotated[float, "(0, inf)"] = 60.0,
        retries: Annotated[int, "[0, inf)"] = 4,
        api_key: str = "OPENAI_API_KEY",
        cache: str | None = None,
    ):
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise ValueError("group_reward=judge needs more: pip install 'areal_like[judge]'") from None
        self.lowest, self.highest = scale
        self.own, self.weight, self.base_url = own, weight, base_url
        self.template = Template(template or TEMPLATE)
        self.settings = {"model": model_name, "temperature": temperature, "max_tokens": max_tokens}
        self.replies = Replies(Path(cache) if cache else folder, name)
        key = os.environ.get(api_key) or "none"
        self._client: Any = AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=retries)
        self._places = asyncio.Semaphore(concurrency)
        self._pending: dict[str, asyncio.Task[str]] = {}
        self.requests = self.cached = self.failures = self.request_tokens = self.reply_tokens = 0
        self.seconds = 0.0

    async def score(self, prompt: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rewards of a group (`actors.group_rewards.described`). Raises RewardError."""
        if any(answer["text"] is None for answer in answers):
            raise RewardError("a judge reads text, and this task has none (Prompt.codec)")
        words = {
            "question": "\n\n".join(str(each["content"]) for each in prompt["messages"]) or prompt["text"],
            "reference": str(prompt["answer"]),
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }
        replies = await asyncio.gather(*(self._ask(words | {"answer": answer["text"]}) for answer in answers))
        own = [self.own * float(answer["reward"]) for answer in answers]
        return [mine + self.weight * self._verdict(reply) for mine, reply in zip(own, replies, strict=True)]

    def _verdict(self, reply: str) -> float:
        """Raises RewardError for a reply without a grade."""
        found = SCORE.findall(reply)
        if not found or not self.lowest <= float(found[-1]) <= self.highest:
            self.failures += 1
            wanted = f"`Score: NUMBER` from {self.lowest:g} to {self.highest:g}"
            raise RewardError(f"the judge at {self.base_url}: got {reply[-200:]!r}, expected {wanted}")
        return (float(found[-1]) - self.lowest) / (self.highest - self.lowest)

    async def _ask(self, words: dict[str, str]) -> str:
        """The judge's reply, cached. Equal requests of one moment are one, which a cancelled group leaves to others."""
        messages = [{"role": "user", "content": self.template.substitute(words)}]
        body = json.dumps([self.settings, messages], sort_keys=True, ensure_ascii=False)
        key = hashlib.sha256(body.encode()).hexdigest()
        if key in self.replies.known:
            self.cached += 1
            return self.replies.known[key]
        if key in self._pending:
            self.cached += 1
        else:
            self._pending[key] = asyncio.create_task(self._request(key, messages))
        return await asyncio.shield(self._pending[key])

    async def _request(self, key: str, messages: list[dict[str, str]]) -> str:
        from openai import OpenAIError

        async with self._places:
            begin = time.monotonic()
            self.requests += 1
            try:
                said = await self._client.chat.completions.create(messages=messages, **self.settings)
                reply = "" + (said.choices[0].message.content or "")
            # The client checks little of what it gets.
            except (OpenAIError, LookupError, AttributeError, TypeError, ValueError) as error:
                self.failures += 1
                raise RewardError(f"the judge at {self.base_url}: {type(error).__name__}: {error}"[:500]) from error
            finally:
                self.seconds += time.monotonic() - begin
                del self._pending[key]
        if said.usage:
            self.request_tokens += getattr(said.usage, "prompt_tokens", None) or 0
            self.reply_tokens += getattr(said.usage, "completion_tokens", None) or 0
        self.replies.add(key, reply)
        return reply

    def stats(self) -> dict[str, float]:
        names = ("requests", "cached", "failures", "request_tokens", "reply_tokens")
        counted = {f"sum:judge/{name}": float(getattr(self, name)) for name in names}
        return counted | quotient("judge/seconds", self.seconds, self.requests)

    async def close(self) -> None:
        for pending in list(self._pending.values()):
            pending.cancel()
        await self._client.close()


class Replies:
    """Replies by the hash of their request: lines of JSON in a folder, a file per actor. A crash may tear the last."""

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, str] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                    self.known[str(row["key"])] = str(row["reply"])
                except (ValueError, KeyError, TypeError):
                    continue
        self._file = (folder / f"{name}.jsonl").open("a", encoding="utf-8")

    def add(self, key: str, reply: str) -> None:
        self.known[key] = reply
        # The first newline ends a line that a crash has torn.
        print("\n" + json.dumps({"key": key, "reply": reply}), file=self._file, flush=True)
