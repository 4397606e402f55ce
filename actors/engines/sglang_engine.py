"""The SGLang engine: a `RolloutEngine` over SGLang servers, which it starts. It speaks HTTP only.

    generate() → a server that is ready, the one with the fewest requests → tokens, logprobs, label per token → versions
    load()     → what has changed, as a patch → every server: pause, patch, compare digests, label, continue
    watch()    → servers are started, given their weights, watched, and started again when they die (`sglang_server`)

A *label* stands for the weights of one `load`. The server records its current label with each token, so versions are
exact however updates and requests overlap; an unknown label is an error. A request shares cached prompts under the
label that its server has confirmed: until the server pauses for an update it computes with the weights before. Only the
digest identifies the weights of a server; without a right one it gets all weights before any request.

A request that ended without `abort` (its server died, was replaced, or paused with `abort`) continues, here or on
another server, from the returned tokens. Waits for a server that is ready (unblocked by `watch`).
"""

import asyncio
import math
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedModel

from actors.engines import sglang_flags, sglang_replies, sglang_weights
from actors.engines.sglang_replies import Reply, Returned, concatenated
from actors.engines.sglang_server import NOTE_CHARACTERS, ServerGone, ServerRefused, SglangServer
from actors.engines.sglang_weights import SharedCopy, stored_names
from actors.engines.slot_table import check_prompt
from areal_like.interfaces import Scored
from areal_like.models.causal_lm import routers_of, routing_of, state_of
from areal_like.stops import beginning, finish_of
from areal_like.types import Completion, Limits
from areal_like.weights.replica import Update

CHUNK = 64
"""Tokens of a request with stop texts, which a server does not see: it has no tokenizer."""
_TRIES = 5
"""Answers in a row without a token, and without an update that interrupted them, before a request is given up."""
OF_SERVERS = ("patch_bytes", "whole_updates", "resampled")
TOTALS = ("tokens", "updates", "busy_seconds", "apply_seconds", "pause_seconds", "pauses", *OF_SERVERS)
"""What an engine counts."""


@dataclass(eq=False)
class _Call:
    """A running `generate`: its id at the server that works on it now, if any, and what it has sampled."""

    name: str
    work: asyncio.Task | None = None
    rid: str = ""
    server: SglangServer | None = None
    aborted: bool = False
    replies: list[Reply] = field(default_factory=list)


class SglangEngine:
    """A `RolloutEngine` (see `areal_like.interfaces`) for `model`. `folder` is for logs and the model's config.

    It starts `replicas` servers, each over `tp_size` devices (tensor parallelism).
    `server`: more of their arguments, as `{mem-fraction-static: 0.8}`. `slots`: most sequences at once, over all
    servers; more wait. `dtype` of them; null: float32 on the CPU, else bfloat16.
    `pause_mode`: at an update running sequences stay as they are (in_place), are computed again under the new weights
    (retract), or are broken off and sent again (abort). Cached prompts are used only under the weights that computed
    them.
    `start_timeout`: seconds for a server to be ready. `max_restarts` per server. `frozen_after`: seconds in which a
    server has made no token, not even when asked to (`sglang_server`), or has not answered a call, until it is killed
    and started again; longer than the longest forward pass. A call with weights may take so much longer as they need.
    `return_experts`: completions bring the experts that the model's routers chose (set by `learner.router_replay`). Of
    a sequence that an update makes a server compute again (retract), they are those of the newest computation.
    Raises ValueError for knobs out of range or that would make logprobs differ from the learner's, and for a model that
    servers have not been seen to follow (latent attention other than DeepSeek-V2's).
    """

    needs_model = True
    needs_folder = True
    METRICS: ClassVar = {name: f"sum:servers/{name}" for name in ("restarts", *OF_SERVERS)}

    def __init__(  # noqa: PLR0913 (each is a knob)
        self,
        model: PreTrainedModel,
        folder: Path,
        *,
        replicas: Annotated[int, "[1, inf)"] = 1,
        tp_size: Annotated[int, "[1, inf)"] = 1,
        slots: Annotated[int, "[1, inf)"] = 64,
        device: Literal["cuda", "cpu"] = "cuda",
        dtype: str | None = None,
        pause_mode: Literal["in_place", "retract", "abort"] = "retract",
        server: Mapping[str, Any] | None = None,
        start_timeout: Annotated[float, "(0, 1e7]"] = 600.0,
        max_restarts: Annotated[int, "[0, inf)"] = 3,
        frozen_after: Annotated[float, "(0, 1e7]"] = 120.0,
        return_experts: bool = False,
    ):
        sglang_flags.refuse_model(model)
        more = dict(server or {}) | ({"enable-return-routed-experts": True} if return_experts else {})
        self.slots, self.digest, self.dtype = slots, "", dtype or ("float32" if device == "cpu" else "bfloat16")
        self._config = model.config
        self._mode = pause_mode
        self._start_timeout, self._max_restarts = start_timeout, max_restarts
        self._returned = _returned(model) if return_experts else None
        state = state_of(model)
        self._held = SharedCopy(state, stored_names(model, state.specs))
        folder.mkdir(parents=True, exist_ok=True)
        commands, environment = sglang_flags.commands(
            model, folder, device=device, dtype=self.dtype, tp_size=tp_size, replicas=replicas, slots=slots, more=more
        )
        names = ["SGLang server"] if replicas == 1 else [f"SGLang server {i}" for i in range(replicas)]
        self._servers = [
            SglangServer(name, arguments, environment, folder / f"server-{i}.log", tp_size, frozen_after)
            for i, (name, arguments) in enumerate(zip(names, commands, strict=True))
        ]
        self._label, self._version = "areal-0", 0
        self._versions = {self._label: 0}
        self._updating = asyncio.Lock()
        self._places = asyncio.Semaphore(slots)
        self._calls: set[_Call] = set()
        self._errands: set[asyncio.Task] = set()
        self._closed = False
        self._busy_since: float | None = None
        self._totals = dict.fromkeys(TOTALS, 0.0)

    @property
    def version(self) -> int:
        """Set from outside where the bits that are held turn out to be those of that version."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = self._versions[self._label] = version

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Sample one completion of a prompt, int [P]. Cancelling the caller frees the slot. Raises ValueError
        (`check_prompt`) and RuntimeError (the server gives no tokens, closed engine)."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        check_prompt(tokens, limits.max_tokens, self._config, embedded=False)
        call = _Call(request)
        self._calls.add(call)
        call.work = asyncio.get_running_loop().create_task(self._finish(call, tokens, limits))
        try:
            return await call.work
        except asyncio.CancelledError:
            if call.aborted and call.work.cancelled():  # while it waited: see `abort`
                return concatenated(call.replies, "abort")
            raise
        finally:
            self._calls.discard(call)

    async def logprobs_of(self, sequences: list[np.ndarray]) -> list[Scored]:
        """Logprobs of sequences of tokens by each server that is ready, under its present weights, unless it ends or
        gets other weights meanwhile. Raises RuntimeError for answers that don't add up."""
        found = await asyncio.gather(*(self._scored(server, sequences) for server in self._ready()))
        return [each for each in found if each is not None]

    async def _scored(self, server: SglangServer, sequences: list[np.ndarray]) -> Scored | None:
        label = server.label
        asked = [sglang_replies.score_request(uuid.uuid4().hex, tokens) for tokens in sequences]
        try:
            answers = await asyncio.gather(*(server.post("/generate", body, math.inf) for body in asked))
        except (ServerGone, ServerRefused):  # its keeper will see it
            return None
        found = [
            sglang_replies.scored(answer, tokens, label) for answer, tokens in zip(answers, sequences, strict=True)
        ]
        rows = [row for row in found if row is not None]
        return Scored(server.name, self._versions[label], rows) if len(rows) == len(found) else None

    async def _finish(self, call: _Call, tokens: np.ndarray, limits: Limits) -> Completion:
        fruitless = 0
        async with self._places:
            while True:
                done = concatenated(call.replies, "abort")
                if ended := _ended(done, tokens, limits, call.aborted):
                    return ended
                if fruitless >= _TRIES:
                    raise RuntimeError(f"{fruitless} answers in a row without a token to {len(tokens)} prompt tokens")
                label = self._label
                reply = await self._ask(call, tokens, done, limits)
                if reply is not None:
                    fruitless = 0 if len(reply.tokens) or label != self._label else fruitless + 1
                    call.replies.append(reply)
                    self._totals["tokens"] += len(reply.tokens)

    async def _ask(self, call: _Call, prompt: np.ndarray, done: Completion, limits: Limits) -> Reply | None:
        """One request to one server; None where it must be asked again. Raises RuntimeError."""
        server = await self._pick()
        tokens, returned = np.concatenate([prompt, done.tokens]), self._returned if limits.trained else None
        experts_from = limits.experts_from + (0 if done.experts is None else len(done.experts))
        call.rid, call.server = uuid.uuid4().hex, server  # of one length: SGLang aborts by prefix of the id
        label, server.load = server.label, server.load + 1
        self._note_busy()
        try:
            wanted = experts_from if returned else None
            most = len(done.tokens) + CHUNK if limits.stop_texts else limits.max_tokens
            asked_for = replace(limits, max_tokens=min(most, limits.max_tokens))
            asked = sglang_replies.generate_request(call.rid, tokens, len(done.tokens), asked_for, label, wanted)
            answer = await server.post("/generate", asked, math.inf)
            if answer.get("output_ids") and answer["meta_info"]["finish_reason"]["type"] != "abort":
                server.beat()
            reply = sglang_replies.reply_of(answer, self._versions, returned, len(tokens) - experts_from)
            if reply.is_stale(label):
                self._totals["resampled"] += 1
                return None
            return reply
        except ServerGone:
            await asyncio.sleep(0.1)  # `watch` will see it
            return None
        except asyncio.CancelledError:
            self._send_abort(server, call.rid)  # frees the slot there
            raise
        finally:
            server.load -= 1
            self._note_busy()
            call.server = None

    def _ready(self) -> list[SglangServer]:
        return [server for server in self._servers if server.ready.is_set()]

    async def _pick(self) -> SglangServer:
        while not (ready := self._ready()):
            await asyncio.sleep(0.1)
        return min(ready, key=lambda server: server.load)

    def _note_busy(self) -> None:
        """Count as busy while a server works; waiting for a server is not busy."""
        now = monotonic()
        if self._busy_since is not None:
            self._totals["busy_seconds"] += now - self._busy_since
        self._busy_since = now if any(server.load for server in self._servers) else None

    def abort(self, requests: Iterable[str]) -> None:
        names = set(requests)
        for call in self._calls:
            if call.name in names:
                self._cut(call)

    def _cut(self, call: _Call) -> None:
        call.aborted = True
        if call.server is not None:
            self._send_abort(call.server, call.rid)
        elif call.work is not None:
            call.work.cancel()  # it waits for a slot, or for a server

    def _send_abort(self, server: SglangServer, rid: str) -> None:
        """In a task: a server that hangs must not delay the caller."""

        async def send() -> None:
            with suppress(ServerGone, ServerRefused):
                await server.open.wait()
                await server.post("/abort_request", {"rid": rid})

        errand = asyncio.get_running_loop().create_task(send())
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def load(self, update: Update) -> None:
        async with self._updating:
            begin, base = monotonic(), self._held.digest
            patch = await asyncio.to_thread(self._held.advance, update)
            self._label = f"areal-{len(self._versions)}"
            self._versions[self._label] = update.version
            await asyncio.gather(*(self._give(server, patch, base, self._mode) for server in self._ready()))
            self._version, self.digest = update.version, update.digest
            self._totals["updates"] += 1
            self._totals["apply_seconds"] += monotonic() - begin

    async def _give(self, server: SglangServer, patch: bytes, base: str, mode: sglang_weights.PauseMode) -> str:
        """Give weights to one server; `patch` leads there from those with the digest `base`. Returns why it refused."""
        begin, running = monotonic(), server.load > 0
        fitting = patch if base and server.digest in ("", base) else None
        try:
            whole, sent = await sglang_weights.give(server, self._held, self._label, fitting, mode)
        except (ServerGone, ServerRefused) as error:
            problem = f"did not take new weights: {error}"
            server.fail(problem)
            return problem
        self._totals["patch_bytes"] += sent
        self._totals["whole_updates"] += whole
        if running:
            self._totals["pauses"] += 1
            self._totals["pause_seconds"] += monotonic() - begin
        return ""

    async def watch(self) -> None:
        """Start the servers and keep them running. Raises RuntimeError when that fails, UserError where it must."""
        keepers = [
            asyncio.ensure_future(server.keep(self._equip, self._start_timeout, self._max_restarts))
            for server in self._servers
        ]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _equip(self, server: SglangServer) -> None:
        """Give a new server its weights, all unless it has them; then it may be used. Raises ServerRefused."""
        async with self._updating:
            if not self._held.digest:
                self._held.digest = await asyncio.to_thread(self._held.state.digest)
            if problem := await self._give(server, self._held.patch({}), self._held.digest, "abort"):
                raise ServerRefused(problem)
            server.ready.set()

    async def until_up(self) -> None:
        await self._pick()

    @property
    def condition(self) -> tuple[str, str]:
        """ "serving", or "starting" or "restarting" while no server is ready; and what is wrong, in words."""
        out = [server for server in self._servers if not server.ready.is_set()]
        notes = "; ".join(f"its {server.name} {server.note}" for server in out if server.note)[:NOTE_CHARACTERS]
        if len(out) < len(self._servers):
            return "serving", notes
        return "restarting" if any(server.proven for server in out) else "starting", notes

    def stats(self) -> dict[str, float]:
        """As of the embedded engine, and: `restarts` of servers; `patch_bytes` sent to them; `whole_updates`: with all
        weights; `resampled`: requests sampled again since their prefix was computed by other weights."""
        self._note_busy()
        running = float(sum(server.load for server in self._servers))
        restarts = float(sum(server.restarts for server in self._servers))
        return {**self._totals, "restarts": restarts, "running": running, "waiting": len(self._calls) - running}

    async def close(self) -> None:
        """End the servers; every caller gets its partial completion with finish "abort"."""
        self._closed = True
        for call in self._calls:
            self._cut(call)
        for errand in self._errands:
            errand.cancel()
        for server in self._servers:
            await server.close()
        self._held.close()


def _returned(model: PreTrainedModel) -> Returned:
    """Raises ValueError for a model without experts that can be replayed."""
    return Returned([number for number, *_ in routers_of(model)], model.config.num_hidden_layers, routing_of(model))


def _ended(done: Completion, prompt: np.ndarray, limits: Limits, aborted: bool) -> Completion | None:
    """The completion, if it has ended with `done`, all tokens so far; None if it goes on."""
    tokens, stops = done.tokens, (*limits.stop, *limits.stop_ids)
    is_stopped = len(tokens) > 0 and int(tokens[-1]) in stops
    if limits.stop_texts:
        own = np.concatenate([prompt[len(prompt) - limits.begun :], tokens])
        known = max(limits.begun, len(own) - CHUNK)  # where earlier answers of the server were looked through
        count = limits.stop_texts.first_end(own, known)
        if count is not None and not (is_stopped and count == len(own)):
            return beginning(done, count - limits.begun, "stop_text")
    if is_stopped:
        return replace(done, finish=finish_of(int(tokens[-1]), limits))
    if len(tokens) >= limits.max_tokens:
        return replace(done, finish="length")
    return replace(done, finish="abort") if aborted else None
