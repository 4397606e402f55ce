"""Device by device: which processes a run has there, what they hold, and what is left; or what to change.

    areal-like train CONFIG --dry-run --devices 8 --device-memory 80GB

Bytes are those of `scripts.starting.estimate`, for the longest answers, and a guess of what each process needs to run
at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from areal_like.config.run_config import Config
from areal_like.launch.plan import RoleSpec

from .estimate import FLOAT, HALF, Figures, Sizes, actor_of, knobs_of, learner_of, lengths_of, plain_of

GIB = 1 << 30
STEP_LOGITS = 3
"""In a decode step: logits, their sum with noise, logprobs."""
RUNTIME = 3 << 29
"""Of a process on a GPU (a guess): CUDA's context, libraries' workspaces, NCCL's buffers, the allocator's gaps."""
SERVER_RUNTIME = 4 << 30
"""Of an SGLang server beside its static memory: activations, CUDA graphs, RUNTIME."""
SERVER_FRACTION = 0.85
"""Of the memory that SGLang takes for weights and KV cache where mem-fraction-static is not set."""
KV_SHARE = 0.25
"""Of a GPU's memory that the embedded engine takes for keys and values by default."""
FRACTION = "mem-fraction-static"
BESIDE = ("ranks, of which one needs (n)", "trained parameters (n)", "published versions (host)", "sum")


def use_of(plain: dict[str, Any], model: Any, memory: int, learns: bool) -> Figures:
    """Bytes by part, of a rank of the learner or of an actor's engine, on a device of `memory` bytes (0: unknown). An
    engine has keys and values for one longest sequence at least."""
    longest, known = lengths_of(plain), knobs_of(plain, "engine")
    if learns:
        figures = learner_of(plain, model, longest)
        return {name: value for name, value in figures.items() if value and name not in BESIDE} | {"runtime": RUNTIME}
    sizes, slots = Sizes(model), known["slots"] or 64
    if plain["engine"]["name"] == "sglang":  # one of the devices of a server, which takes a share of the card
        width = FLOAT if known["dtype"] == "float32" else HALF
        weights, token = width * sizes.count / known["tp_size"], sizes.kv(width) / known["tp_size"]
        server = known.get("server") or {}
        fraction = float(server.get(FRACTION, server.get(FRACTION.replace("-", "_"), SERVER_FRACTION)))
        cache = max(fraction * memory - weights if memory else token * slots * longest.whole, token * longest.whole)
        return {"weights": weights, "keys and values": cache, "runtime": SERVER_RUNTIME}
    figures = actor_of(plain, sizes, longest)
    token, wanted = figures["KV cache, per token"], slots * longest.whole
    tokens = min(wanted, known["kv_tokens"] or wanted)
    if known.get("memory") is not None:
        tokens = min(known["kv_tokens"] or wanted, int(known["memory"] * GIB / token))
    elif known["kv_tokens"] is None and memory:
        tokens = min(tokens, int(KV_SHARE * memory / token))
    narrow = HALF if known["compute_dtype"] == "bfloat16" else FLOAT
    return {
        "weights": figures["weights"],
        "keys and values": token * max(tokens, longest.whole),
        "logits of a step": STEP_LOGITS * FLOAT * slots * sizes.vocabulary,
        "a prefill": 8192 * (4 * FLOAT * sizes.hidden + 3 * narrow * sizes.inner),
        "runtime": RUNTIME,
    }


def describe(config: Config, roles: Sequence[RoleSpec], model: Any, memory: int) -> str:
    """A table of devices of `memory` bytes each (0: unknown), of the parts of each kind of process, and of keys to
    change where a device is too small. Empty for a run without devices."""
    on: dict[str, list[RoleSpec]] = {}
    for role in roles:
        unknown = [f"{role.name}.{number}" for number in range(role.gpus)]  # Slurm's or Ray's choice
        for device in unknown if role.devices is None else role.devices:
            on.setdefault(str(device), []).append(role)
    if not on:
        return ""
    plain, small = plain_of(config), list[list[RoleSpec]]()
    uses = {learns: use_of(plain, model, memory, learns) for learns in {r.essential for rs in on.values() for r in rs}}
    of = f" of {_gib(memory)}" if memory else " (state their size: --device-memory 80GB)"
    lines = [f"\n{len(on)} device{'s' * (len(on) > 1)}{of}"]
    for device, here in sorted(on.items(), key=lambda item: (item[0].zfill(6), item[0])):
        needed = sum(sum(uses[role.essential].values()) for role in here)
        left = f"{_gib(memory - needed)} left" if needed <= memory else f"{_gib(needed - memory)} TOO MUCH"
        lines.append(f"  {device:<10}{', '.join(r.name for r in here):<22}{_gib(needed):>10}  {left if memory else ''}")
        small += [here] if needed > memory else []
    for learns, use in uses.items():
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in use.items())
        lines.append(f"{'each rank of the learner' if learns else 'each device of an actor'}, in GiB: {parts}")
    if memory:
        lines += list(_hints(small, plain["engine"]["name"] == "sglang")) or ["it fits"]
    return "\n".join(lines) + "\n"


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"


def _hints(small: list[list[RoleSpec]], serves: bool) -> Iterator[str]:
    """Keys to change where a device is too `small` for its roles."""
    kinds = {role.essential for roles in small for role in roles}
    if any(len(roles) > 1 for roles in small):
        yield "too small for both: placement={learner: 0, actors: 1} gives learner and actors devices of their own"
    if True in kinds:
        yield (
            "too small for the learner: learner.checkpoint_activations=true, a smaller learner.micro_batch_tokens or "
            "learner.max_logits, more learner.ranks, or learner.lora={rank: 16}"
        )
    if False in kinds:
        yield f"too small for the engine: {'engine.tp_size=2' if serves else 'a smaller engine.kv_tokens'}"
