"""The embedded engine: a transformers model in the actor's own process, with continuous batching and in-flight updates.

One asyncio task makes one decode step for all running sequences, then yields to the event loop once: messages, aborts
and weight updates come between two steps. A long prefill yields between its forwards, too.

    generate() → waiting (first in, first out) → slot, KV of all but the last token prefilled → one token per step
               → finished | aborted | cancelled: slot freed, caller answered

Every token comes from one decode path, and a prefill only fills the KV cache: an update with `kv_policy="recompute"` is
one more prefill of all running sequences.

On a GPU a step is a replayed CUDA graph (`static_step`); all else is the same code. There the device computes the next
step while the host handles the tokens of one. Wherever something is to be done between two steps (a sequence joins,
weights or memory change), the next one is not begun ahead; if it has been, its tokens come first.

The step task waits for `_wake` when there is nothing to do; unblocked by `generate`. `load` waits for the end of the
step or, where `interruptible` is false, of the running sequences.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines import ragged_attention
from actors.engines.chosen_experts import ChosenExperts
from actors.engines.decoders import check_batch_invariant, decoder_for
from actors.engines.prefill import Prefill
from actors.engines.sampler import sample
from actors.engines.slot_cache import SlotCache, bytes_per_token, device_of, kv_budget, pooled
from actors.engines.slot_table import SlotRequest, SlotTable, check_prompt, whole
from actors.engines.static_step import StaticStep
from actors.engines.step_costs import StepCosts
from areal_like.config.defaults import SLOTS
from areal_like.interfaces import Scored
from areal_like.sampling import uniforms
from areal_like.types import Completion, Finish, Limits
from areal_like.weights.device import replica_on
from areal_like.weights.replica import Replica, Update
from areal_like.weights.state import State

PEACE = 32
"""Decode steps without preemption after which one more sequence may run."""
TOTALS = (
    *("tokens", "updates", "busy_seconds", "apply_seconds", "pause_seconds", "pauses"),
    *("preemptions", "prefill_tokens", "shared_tokens"),
)
"""What an engine counts."""


class TorchEngine:
    """A `RolloutEngine` (see `areal_like.interfaces`) over `model`, which it takes over (attention, weights, mode).

    `slots`: most sequences that run at once; more wait (None: 64). `kv_policy`: what becomes of the KV cache of running
    sequences at a weight update: "recompute" under the new weights, or "keep" (cheaper; later tokens attend to old
    states). `interruptible` False: an update waits for the running sequences. `kv_tokens`: most tokens whose keys and
    values are held, padding included (None: as many as the slots need): where running sequences outgrow it the newest
    are preempted and continue later, and half as many may run, one more after each 32 steps without preemption.
    `memory`: the same bound in GiB; the smaller one counts. On a GPU this memory is taken at the start (neither given:
    what the slots need, at most a quarter of the card). `device`: auto (a GPU where there is one), cpu, cuda or e.g.
    cuda:0. `compute_dtype`: of matrix products and of the KV cache (None: bfloat16 on a GPU, else float32); sums over
    tokens and the head are float32 in any case. `return_experts`: completions bring the experts that the routers chose
    (set by `learner.router_replay`). `batch_invariant`: on a CPU, a sample of a Llama-like model depends on its prompt,
    its key and the weights alone, to the last bit, and not on what else runs; but for samples that go on after a
    prefill of their tokens (partial rollouts, `kv_tokens`, new weights in their midst). Cost: docs/results.md. Raises
    ValueError for a device that is not there, or memory that it does not have.
    """

    needs_model = True
    METRICS: ClassVar = {"limit": "mean:rollout/limit", "preemptions": "sum:rollout/preemptions"}

    def __init__(  # noqa: PLR0913 - a component's knobs are its keyword-only parameters
        self,
        model: PreTrainedModel,
        *,
        slots: Annotated[int, "[1, inf)"] | None = None,
        kv_policy: Literal["recompute", "keep"] = "recompute",
        interruptible: bool = True,
        kv_tokens: Annotated[int, "[1, inf)"] | None = None,
        memory: Annotated[float, "(0, inf)"] | None = None,
        compute_dtype: Literal["float32", "bfloat16"] | None = None,
        device: str = "auto",
        return_experts: bool = False,
        batch_invariant: bool = False,
    ):
        self._device = device_of(device, model.device)
        self.dtype = compute_dtype or ("bfloat16" if self._device.type == "cuda" else "float32")
        if batch_invariant:
            check_batch_invariant(model, self._device, self.dtype)
        self._batch_invariant = batch_invariant
        self.slots = SLOTS if slots is None else slots
        self.version, self.digest, self._config = 0, "", model.config
        self._recompute, self._interruptible = kv_policy == "recompute", interruptible
        model.eval()
        self._table = SlotTable(self.slots)
        dtype, longest = getattr(torch, self.dtype), model.config.max_position_embeddings
        per_token, static = bytes_per_token(model.config, dtype), is_static(self._device)
        self._kv_tokens = kv_budget(self._device, per_token, longest, self.slots, kv_tokens, memory)
        if static:
            most = self._kv_tokens or self.slots * longest
            self._cache: SlotCache = pooled(model.config, self.slots, self._device, dtype, most)
        else:
            invariant = {"batch_invariant": batch_invariant}
            self._cache = SlotCache(model.config, self.slots, self._device, dtype, self._kv_tokens, **invariant)
        self._decoder = decoder_for(model, self._cache)
        self._chosen = ChosenExperts(model, self.slots) if return_experts else None
        self._static = StaticStep(self._decoder, self._cache, self.slots, self._chosen) if static else None
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._prefill = Prefill(model, self._decoder, self._cache, self._chosen, batch_invariant)
        self._waiting: deque[SlotRequest] = deque()
        self._loads: list[tuple[Update, asyncio.Future[None]]] = []
        self._limit, self._peace, self._joined = self.slots, 0, 0
        self._stepping = False
        self._begun = False  # the next step, ahead
        self._ending: list[tuple[SlotRequest, Finish]] = []  # asked for during a step
        self._stale = False  # recompute the KV of the running sequences before the next step
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._pause_start: float | None = None
        self._totals = dict.fromkeys(TOTALS, 0.0)
        self.step_costs = StepCosts()

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Sample one completion of a prompt, int [P]. Cancelling the caller frees the slot.

        Raises ValueError (`check_prompt`) and RuntimeError (NaN logits, closed engine); another error of a decode step
        is raised in every caller.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        check_prompt(tokens, limits.max_tokens, self._config)
        if self._kv_tokens is not None and (total := len(tokens) + limits.max_tokens) > self._kv_tokens:
            raise ValueError(
                f"{total} tokens of prompt and response exceed engine.kv_tokens={self._kv_tokens} (engine.memory)"
            )
        asked = SlotRequest(request, tokens, limits, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="decode steps")
        self._wake.set()
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._end(asked, "abort")
            raise

    async def logprobs_of(self, sequences: list[np.ndarray]) -> list[Scored]:
        """Logprobs of sequences of tokens under the present weights, computed beside those that run."""
        logits, ids = self._prefill.logits(sequences)
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()
        return [Scored("", self.version, [row[: len(n) - 1] for row, n in zip(logprobs, sequences, strict=True)])]

    async def load(self, update: Update) -> None:
        if not self._table.requests:
            self._apply(update)
            return
        applied = asyncio.get_running_loop().create_future()
        self._loads.append((update, applied))
        await applied

    def replica_of(self, state: State | None) -> Replica:
        """The replica for this engine's weights, which begin with `state`: on a GPU, beside them."""
        return replica_on(self._device, state)

    def abort(self, requests: Iterable[str]) -> None:
        names = set(requests)
        for request in [*self._table.requests, *self._waiting]:
            if request.name in names:
                self._end(request, "abort")

    def stats(self) -> dict[str, float]:
        """Running totals, and `running`, `waiting` as of now.

        `busy_seconds`: in steps, prefill included. `apply_seconds`: writing new weights. `pause_seconds`: from the
        start of an update to the start of the next step, where sequences were running (`pauses` of them).
        `preemptions`: sequences that lost their slot for want of memory; `limit`: how many may run now.
        `prefill_tokens`: through prefills; `shared_tokens`: of another sequence with the same prompt.
        """
        now = {"limit": self._limit, "running": len(self._table), "waiting": len(self._waiting)}
        return self._totals | {name: float(value) for name, value in now.items()}

    def progress(self) -> dict[str, int]:
        """Tokens so far of each request that has a slot, by name; calls of one name add up."""
        found: dict[str, int] = {}
        for request in self._table.requests:
            before = sum(len(tokens) for tokens, _ in request.before)  # also part of `prompt`: see `_preempt`
            done = int(self._table.lengths[request.slot]) - len(request.prompt) + before
            found[request.name] = found.get(request.name, 0) + done
        return found

    async def close(self) -> None:
        """End the step task; every caller gets its partial completion with finish "abort"."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for request in [*self._table.requests, *self._waiting]:
            self._end(request, "abort")
        self._apply_waiting_loads()

    # ---- steps

    async def _run(self) -> None:
        while True:
            self.step_costs.end(perf_counter())
            if not self._table.requests:
                self._begun = False  # for sequences that have all left
                self._apply_waiting_loads()
                self._pause_start = None
                if not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
            elif self._interruptible and not self._begun:
                self._apply_waiting_loads()  # directly before the step: nothing else stands between the two
            self._stepping = True
            try:
                await self._step()
            except Exception as error:  # the callers must get any error
                self._fail(error)
            finally:
                self._stepping = False
            ending, self._ending = self._ending, []
            for request, finish in ending:
                if request.slot is not None or request in self._waiting:  # the step has not ended it
                    self._answer(request, finish)
            await asyncio.sleep(0)

    async def _step(self) -> None:
        start, table = perf_counter(), self._table
        if not self._begun:
            await self._prepare(start)
        if not table.requests:
            return
        self.step_costs.begin(perf_counter(), len(table), int(table.lengths[: len(table)].sum()))
        tokens, logprobs = self._decode()
        self._totals["tokens"] += len(tokens)
        self._peace += 1
        if self._peace % PEACE == 0:
            self._limit = min(self.slots, self._limit + 1)
        for slot, finish in table.append(tokens, logprobs):
            self._answer(table.requests[slot], finish)
        self._totals["busy_seconds"] += perf_counter() - start

    async def _prepare(self, start: float) -> None:
        """The work between two steps: of memory, keys and values of old weights, and sequences that join."""
        table = self._table
        if self._pause_start is not None:
            self._totals["pause_seconds"] += start - self._pause_start
            self._totals["pauses"] += 1
            self._pause_start = None
        self._relieve()
        if self._stale:
            self._reserve()
            await self._fill(list(range(len(table))), again=True)
            self._stale = False
        joined = self._admit()
        if not table.requests:
            return
        self._reserve()
        before = perf_counter()
        await self._fill(joined)
        self.step_costs.prefilled(int(table.lengths[joined].sum()), perf_counter() - before)

    def _goes_on(self) -> bool:
        """Whether, by the host's present knowledge, there is no work between the next step and the one behind it."""
        loads = self._loads and self._interruptible
        return self._table.longest < self._cache.capacity and not loads and not self._next_joins()

    def _relieve(self) -> None:
        """Put back the newest sequences until the others' next tokens find room."""
        table, before = self._table, len(self._table)
        while self._kv_tokens is not None and len(table) * table.longest > self._kv_tokens:
            self._preempt(max(table.requests, key=lambda request: request.joined))
        if len(table) < before:
            self._limit, self._peace = max(1, before // 2), 0

    def _preempt(self, request: SlotRequest) -> None:
        """Back to the front of the queue; it will go on at its next token."""
        self._take_out(request, "abort")
        tokens = request.before[-1][0]
        done = len(tokens)
        request.prompt = np.concatenate([request.prompt, tokens])
        limits = request.limits
        left, offset, begun = limits.max_tokens - done, limits.offset + done, limits.begun + done
        request.limits = replace(limits, max_tokens=left, offset=offset, begun=begun)
        self._waiting.appendleft(request)
        self._totals["preemptions"] += 1

    def _admit(self) -> list[int]:
        """Give slots to waiting sequences, as far as there is room → these slots."""
        joined = []
        while self._next_joins():
            request = self._waiting.popleft()
            self._joined += 1
            request.joined = self._joined
            joined.append(self._table.add(request))
        return joined

    def _next_joins(self) -> bool:
        """Whether the first waiting sequence gets a slot: there is room for it, and for one token more of each."""
        if not self._waiting or self._loads or len(self._table) >= self._limit:
            return False
        longest, running = max(self._table.longest, len(self._waiting[0].prompt)) + 1, len(self._table)
        return self._kv_tokens is None or not running or (running + 1) * longest <= self._kv_tokens

    @torch.inference_mode()
    def _reserve(self) -> None:
        rows, time = len(self._table), self._table.longest
        ragged_attention.prepare(self._cache.keys, rows, time, self._batch_invariant)
        self._cache.reserve(rows, time)
        if self._chosen:
            self._chosen.reserve(time)

    async def _fill(self, slots: list[int], again: bool = False) -> None:
        if slots:
            filled, shared = await self._prefill(self._table, slots, int(self._totals["updates"]), again)
            self._totals["prefill_tokens"] += filled
            self._totals["shared_tokens"] += shared

    @torch.inference_mode()
    def _decode(self) -> tuple[np.ndarray, np.ndarray]:
        """Feed each sequence's last token → the next ones int64 [n] and their logprobs float32 [n]."""
        table, n = self._table, len(self._table)
        lengths = table.lengths[:n]
        if self._static is not None:
            begun, self._begun = self._begun, self._goes_on()
            ids, logprobs, experts = self._static(table, begun, self._begun)
            if self._chosen:
                self._chosen.decoded(lengths, experts)
            return ids, logprobs
        self._cache.begin_decode(lengths)
        tokens = torch.from_numpy(table.last_tokens()).to(self._device)[:, None]
        positions = torch.from_numpy(lengths - 1).to(self._device)[:, None]
        logits = self._decoder.logits(tokens, positions, self._cache)[:, -1]
        if self._chosen:
            self._chosen.decoded(lengths, self._chosen.newest().cpu().numpy())
        temperatures = table.temperatures[:n]
        return sample(logits, temperatures, uniforms(*table.stream()) if temperatures.any() else None)

    # ---- ends

    def _end(self, request: SlotRequest, finish: Finish) -> None:
        if self._stepping:
            self._ending.append((request, finish))
        else:
            self._answer(request, finish)

    def _answer(self, request: SlotRequest, finish: Finish) -> None:
        if request.slot is not None:
            completion = self._take_out(request, finish)
        else:
            if request in self._waiting:
                self._waiting.remove(request)
            completion = whole(request, finish)
        if not request.future.done():
            request.future.set_result(completion)

    @torch.inference_mode()
    def _take_out(self, request: SlotRequest, finish: Finish) -> Completion:
        """Free its slot; what it has got."""
        table, slot = self._table, request.slot
        assert slot is not None
        if self._chosen and request.limits.trained:
            self._chosen.collect(request, int(table.lengths[slot]))
        completion = table.completion(slot, finish, self.version)
        moved = table.remove(slot)
        if moved is not None:
            self._cache.move(moved, slot, int(table.lengths[slot]))
            if self._chosen:
                self._chosen.move(moved, slot, int(table.lengths[slot]) - 1)
        return completion

    def _fail(self, error: Exception) -> None:
        """Raise `error` in every caller and start from nothing; a later `load` may heal the model."""
        for request in [*self._table.requests, *self._waiting]:
            request.slot = None
            if not request.future.done():
                request.future.set_exception(error)
        self._table = SlotTable(self.slots)
        self._begun = False
        self._waiting.clear()
        self._cache.clear()
        self._stale = False

    # ---- weights

    def _apply(self, update: Update) -> None:
        start = perf_counter()
        self._table.end_runs(self.version)
        sparse = update.changes if update.changes and update.changes.since == self.digest else None
        self._decoder.parameters.write(update.state, self._parameters, sparse)
        self.version, self.digest = update.version, update.digest
        if self._table.requests:
            self._stale = self._recompute
            self._pause_start = self._pause_start or start
        self._totals["updates"] += 1
        self._totals["apply_seconds"] += perf_counter() - start

    def _apply_waiting_loads(self) -> None:
        """Apply the newest of the updates that waited for the running sequences; it supersedes the others."""
        if self._loads:
            self._apply(self._loads[-1][0])
        for _, applied in self._loads:
            if not applied.done():
                applied.set_result(None)
        self._loads.clear()


def is_static(device: torch.device) -> bool:
    """Whether decode steps on this device have fixed shapes and memory."""
    return device.type == "cuda"
