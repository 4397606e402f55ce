"""A judge: a model behind an OpenAI-compatible endpoint scores the answers of a group (`group_reward=judge`).

Every reply is kept in RUN/judge, by the content of its request. A resume, or a run with the same `cache`, asks for none
of them again: it gets the same rewards, also while the judge is off. The client retries requests that fail for a time;
a request that fails for good costs its group ("group reward crashed"). So does a reply that holds no verdict, unless
`no_verdict` says what it counts as.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

from actors.measures import quotient
from actors.reward_pool import RewardError
from areal_like.config.judge_knobs import refuse_odd_judge

EACH = """Question:
$question

Reference answer: $reference

Answer to grade:
$answer

Grade the answer from $lowest (useless) to $highest (perfect). End with a line `Score: NUMBER`."""
PAIRS = """Question:
$question

Reference answer: $reference

Answer A:
$first

Answer B:
$second

Which answer is better? End with a line `Winner: A`, `Winner: B` or `Winner: tie`."""
SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.I)
WINNER = re.compile(r"winner\W*?\b(A|B|tie)\b", re.I)
Verdict = tuple[int, int]
"""Places of the answers that a comparison shows as A and B."""


class Judge:
    """`score` returns, for each answer, `own` × the reward of the task's verifier + `weight` × the judge's verdict, a
    number from 0 to 1.

    compare: each: the judge grades answers one by one, between the two numbers of `scale`. pairs: it compares two
        answers at a time; the verdict is the share of comparisons won, a tie counts half. An answer without others, as
        in an evaluation, gets ½.
    opponents: pairs: compare each answer with at most so many others, drawn from the content of the group; null: all.
    both_orders: pairs: ask for each pair twice, with A and B exchanged, since models prefer a place.
    template: the request, with $question, $reference and $answer (pairs: $first and $second), in place of the shipped
        one. The reply must hold `Score: NUMBER` (pairs: `Winner: A`, `B` or `tie`); the last one counts.
    base_url, model_name, api_key: the endpoint, the model there, and the name of the environment variable with the
        key (a local server needs none).
    no_verdict: the verdict, from 0 to 1, of a reply that holds none (pairs: the share of A); null: its group is
        dropped. Either way it is a failure in the metrics.
    temperature, max_tokens: of the judge's reply.
    concurrency: requests of one actor at a time. timeout: seconds per attempt. retries: attempts after the first.
    cache: a folder to keep replies in, which several runs may share; null: RUN/judge.
    prices: dollars per million tokens of requests and of replies, for the metric judge/cost.

    Raises ValueError for a knob or template that makes no sense, or without the package openai.
    """

    def __init__(  # noqa: PLR0913 (most are knobs)
        self,
        folder: Path,
        name: str,
        *,
        base_url: str,
        model_name: str,
        compare: Literal["each", "pairs"] = "each",
        own: Annotated[float, "(-inf, inf)"] = 0.0,
        weight: Annotated[float, "(-inf, inf)"] = 1.0,
        scale: Sequence[float] = (0.0, 10.0),
        opponents: Annotated[int, "[1, inf)"] | None = None,
        both_orders: bool = True,
        template: str | None = None,
        no_verdict: Annotated[float, "[0, 1]"] | None = None,
        temperature: Annotated[float, "[0, inf)"] = 0.0,
        max_tokens: Annotated[int, "[1, inf)"] = 512,
        concurrency: Annotated[int, "[1, inf)"] = 16,
        timeout: Annotated[float, "(0, inf)"] = 60.0,
        retries: Annotated[int, "[0, inf)"] = 4,
        api_key: str = "OPENAI_API_KEY",
        cache: str | None = None,
        prices: Sequence[float] | None = None,
    ):
        refuse_odd_judge(compare, scale, prices, template)
        self.lowest, self.highest = scale
        self.prices = prices or (0.0, 0.0)
        self.compare, self.own, self.weight = compare, own, weight
        self.opponents, self.both_orders, self.no_verdict = opponents, both_orders, no_verdict
        self.template = Template(template or (PAIRS if compare == "pairs" else EACH))
        self.settings = {"model": model_name, "temperature": temperature, "max_tokens": max_tokens}
        self.base_url, self.replies = base_url, Replies(Path(cache) if cache else folder, name)
        self._client = _client(base_url, os.environ.get(api_key) or "none", timeout, retries)
        self._places = asyncio.Semaphore(concurrency)
        self._asked: dict[str, asyncio.Future[str]] = {}
        self.requests = self.cached = self.failures = self.request_tokens = self.reply_tokens = 0
        self.seconds = 0.0

    async def score(self, prompt: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rewards of a group (`actors.group_rewards.described`). Raises RewardError."""
        if any(answer["text"] is None for answer in answers):
            raise RewardError("a judge reads text, and this task has none (Prompt.codec)")
        question = "\n\n".join(str(each["content"]) for each in prompt["messages"]) or prompt["text"]
        words = {"question": question, "reference": str(prompt["answer"])}
        texts = [answer["text"] for answer in answers]
        verdicts = await (self._pairs if self.compare == "pairs" else self._each)(words, texts)
        rewards = [float(answer["reward"]) for answer in answers]
        return [self.own * mine + self.weight * verdict for mine, verdict in zip(rewards, verdicts, strict=True)]

    async def _each(self, words: dict[str, str], texts: list[str]) -> list[float]:
        limits = {"lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}
        replies = await _all(self._ask(words | limits | {"answer": text}) for text in texts)
        return [self._grade(reply) for reply in replies]

    def _grade(self, reply: str) -> float:
        found = SCORE.findall(reply)
        if not found or not self.lowest <= float(found[-1]) <= self.highest:
            return self._without(f"`Score: NUMBER` from {self.lowest:g} to {self.highest:g} is missing", reply)
        return (float(found[-1]) - self.lowest) / (self.highest - self.lowest)

    async def _pairs(self, words: dict[str, str], texts: list[str]) -> list[float]:
        shown = self._shown(texts)
        replies = await _all(self._ask(words | {"first": texts[a], "second": texts[b]}) for a, b in shown)
        won, of = [0.0] * len(texts), [0] * len(texts)
        for (a, b), reply in zip(shown, replies, strict=True):
            share = self._share(reply)
            won[a], won[b] = won[a] + share, won[b] + 1 - share
            of[a], of[b] = of[a] + 1, of[b] + 1
        return [one / n if n else 0.5 for one, n in zip(won, of, strict=True)]

    def _share(self, reply: str) -> float:
        found = WINNER.findall(reply)
        if not found:
            return self._without("`Winner: A`, `B` or `tie` is missing", reply)
        return {"A": 1.0, "B": 0.0, "TIE": 0.5}[found[-1].upper()]

    def _shown(self, texts: list[str]) -> list[Verdict]:
        """The comparisons of a group: which answers, and which of them is A."""
        pairs = list(itertools.combinations(range(len(texts)), 2))
        draw = random.Random(hashlib.sha256("\0".join(texts).encode()).digest())
        if self.opponents is not None and self.opponents < len(texts) - 1:
            # Around a circle in a random order each answer meets as many others, up to one.
            order = draw.sample(range(len(texts)), len(texts))
            steps = range(1, self.opponents // 2 + 1)
            near = {(i, (i + step) % len(order)) for step in steps for i in range(len(order))}
            if self.opponents % 2:
                near |= {(i, i + len(order) // 2) for i in range(len(order) // 2)}
            pairs = sorted({(min(order[i], order[j]), max(order[i], order[j])) for i, j in near})
        if self.both_orders:
            return [shown for a, b in pairs for shown in ((a, b), (b, a))]
        return [(a, b) if draw.random() < 0.5 else (b, a) for a, b in pairs]

    async def _ask(self, words: dict[str, str]) -> str:
        """The judge's reply, from the cache if it is there. Equal requests of one moment are one request."""
        messages = [{"role": "user", "content": self.template.substitute(words)}]
        body = json.dumps([self.settings, messages], sort_keys=True, ensure_ascii=False)
        key = hashlib.sha256(body.encode()).hexdigest()
        if (known := self.replies.get(key)) is not None:
            self.cached += 1
            return known
        if (asked := self._asked.get(key)) is None:
            asked = self._asked[key] = asyncio.ensure_future(self._requested(key, messages))
            asked.add_done_callback(partial(self._answered, key))
        else:
            self.cached += 1
        return await asyncio.shield(asked)  # a group that is cancelled leaves the reply to others, and to the cache

    def _answered(self, key: str, asked: asyncio.Future[str]) -> None:
        self._asked.pop(key, None)
        if not asked.cancelled():
            asked.exception()  # seen, even if nobody waits for it any more

    async def _requested(self, key: str, messages: list[dict[str, str]]) -> str:
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
        if said.usage:
            self.request_tokens += getattr(said.usage, "prompt_tokens", None) or 0
            self.reply_tokens += getattr(said.usage, "completion_tokens", None) or 0
        self.replies.add(key, reply)
        return reply

    def _without(self, why: str, reply: str) -> float:
        """The verdict of a reply that holds none. Raises RewardError."""
        self.failures += 1
        if self.no_verdict is None:
            raise RewardError(f"the judge at {self.base_url}: {why} in its reply {reply[-200:]!r}")
        return self.no_verdict

    def stats(self) -> dict[str, float]:
        """As in `actors.measures`."""
        request, reply = self.prices
        cost = (request * self.request_tokens + reply * self.reply_tokens) / 1e6
        counted = {"requests": self.requests, "cached": self.cached, "failures": self.failures, "cost": cost}
        counted |= {"request_tokens": self.request_tokens, "reply_tokens": self.reply_tokens}
        return {f"sum:judge/{name}": float(value) for name, value in counted.items()} | quotient(
            "judge/seconds", self.seconds, self.requests
        )

    async def close(self) -> None:
        for asked in list(self._asked.values()):
            asked.cancel()
        await self._client.close()


class Replies:
    """What a judge has replied, by the content of the request: lines of JSON in a folder, a file per actor. A line that
    a crash has torn is lost."""

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, str] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)
        path = folder / f"{name}.jsonl"
        torn = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
            self._known[str(row["key"])] = str(row["reply"])
        except (ValueError, KeyError, TypeError):
            return

    def get(self, key: str) -> str | None:
        return self._known.get(key)

    def add(self, key: str, reply: str) -> None:
        self._known[key] = reply
        print(json.dumps({"key": key, "reply": reply}), file=self._file, flush=True)


async def _all(asked: Any) -> list[str]:
    """All replies, in order. The first failure ends the wait; its group is lost, but replies under way are kept."""
    return list(await asyncio.gather(*asked))


def _client(base_url: str, key: str, timeout: float, retries: int) -> Any:
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError:
        raise ValueError("group_reward=judge needs more: pip install 'areal_like[judge]'") from None
    return AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=retries)
