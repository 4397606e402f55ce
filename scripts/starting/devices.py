"""Device by device: which processes a run has there, what they hold, and what is left; or what to change.

    python -m scripts.train CONFIG --dry-run --devices 8 --device-memory 80GB

Bytes are those of `scripts.starting.estimate`, for the longest answers, and a guess of what each process needs to run
at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.config.registry import knobs
from areal_like.config.run_config import Config
from areal_like.launch.plan import RoleSpec

from .estimate import Lengths, actor_of, learner_of, lengths_of, plain_of
from .memory import FLOAT, HALF, KV_SHARE, RUNTIME, SERVER_FRACTION, SERVER_RUNTIME, STEP_LOGITS, Figures, Sizes

GIB = 1 << 30
FEW = 8
"""A server with room for fewer longest sequences than this part of its slots would wait for memory most of the time."""
KINDS = {True: "each rank of the learner", False: "each actor's device"}
FRACTION = "mem-fraction-static"
LEARNER_PARTS = (
    *("weights", "master weights", "Adam's moments", "gradient", "reference", "weights and gradients of layers"),
    *("activations", "logits at once"),
)


@dataclass(frozen=True, slots=True)
class Use:
    """What one process holds on one device. `lacking`: bytes that it needs and does not take; `note`: for people.
    `few`: most of an engine's slots have no room for a longest sequence."""

    parts: Figures
    lacking: float = 0.0
    note: str = ""
    few: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class Devices:
    """The devices of a run's plan, each with `memory` bytes (0: unknown), and the model that is computed there."""

    def __init__(self, config: Config, roles: Sequence[RoleSpec], model: Any, memory: int):
        self.plain, self.model, self.memory = plain_of(config), model, memory
        self.longest, self.sizes = lengths_of(self.plain), Sizes.of(model)
        self.on: dict[str, list[RoleSpec]] = {}
        for role in roles:
            unknown = [f"{role.name}.{number}" for number in range(role.gpus)]  # Slurm's or Ray's choice
            for device in unknown if role.devices is None else role.devices:
                self.on.setdefault(str(device), []).append(role)

    def use(self, role: RoleSpec, plain: dict[str, Any] | None = None) -> Use:
        """Of one process on each of its devices; `plain`: under another config."""
        plain = plain or self.plain
        if role.essential:
            return learner_use(plain, self.model, self.longest)
        server = plain["engine"]["name"] == "sglang"
        return (server_use if server else engine_use)(plain, self.sizes, self.longest, self.memory)


def learner_use(plain: dict[str, Any], model: Any, longest: Lengths) -> Use:
    """Of a rank."""
    figures = learner_of(plain, model, longest)
    kept = next(name for name in figures if name.startswith("activations of"))
    parts = {name: figures[kept if name == "activations" else name] for name in LEARNER_PARTS}
    return Use({name: value for name, value in parts.items() if value} | {"runtime": RUNTIME})


def engine_use(plain: dict[str, Any], sizes: Sizes, longest: Lengths, memory: int) -> Use:
    """Of an embedded engine: it takes its keys' and values' memory at the start."""
    known, figures = knobs("engine", "torch") | plain["engine"], actor_of(plain, sizes, longest)
    token, slots = figures["KV cache, per token"], slots_of(plain)
    wanted = slots * longest.whole
    tokens = min(wanted, known["kv_tokens"] or wanted)
    if known.get("memory") is not None:
        tokens = min(known["kv_tokens"] or wanted, int(known["memory"] * GIB / token))
    elif known["kv_tokens"] is None and memory:
        tokens = min(tokens, int(KV_SHARE * memory / token))
    narrow = HALF if known["compute_dtype"] == "bfloat16" else FLOAT
    parts = {
        "weights": figures["weights"],
        "keys and values": token * tokens,
        "logits of a step": STEP_LOGITS * FLOAT * slots * sizes.vocabulary,
        "a prefill": 8192 * (4 * FLOAT * sizes.hidden + 3 * narrow * sizes.inner),
        "runtime": RUNTIME,
    }
    return Use(parts, max(0.0, token * (longest.whole - tokens)), room(tokens, longest, slots))


def server_use(plain: dict[str, Any], sizes: Sizes, longest: Lengths, memory: int) -> Use:
    """Of an SGLang server on one of its devices: it takes a share of the card at the start."""
    known = knobs("engine", "sglang") | plain["engine"]
    tp_size, slots = known["tp_size"], -(-slots_of(plain) // known["replicas"])
    width = FLOAT if known["dtype"] == "float32" else HALF
    weights, token = width * sizes.count / tp_size, sizes.kv(width) / tp_size
    wanted = slots * longest.whole
    cache = fraction_of(plain) * memory - weights if memory else token * wanted
    tokens = max(0, int(cache / token))
    parts = {"weights": weights, "keys and values": token * tokens, "runtime": SERVER_RUNTIME}
    tokens = min(tokens, wanted)
    return Use(parts, max(0.0, token * longest.whole - cache), room(tokens, longest, slots), FEW * tokens < wanted)


def room(tokens: int, longest: Lengths, slots: int) -> str:
    """How many sequences fit into memory for so many tokens."""
    return f"room for {min(slots, tokens // longest.whole)} of {slots} longest sequences"


def slots_of(plain: dict[str, Any]) -> int:
    known = knobs("engine", plain["engine"]["name"]) | plain["engine"]
    return known["slots"] or 64


def fraction_of(plain: dict[str, Any]) -> float:
    server = plain["engine"].get("server") or {}
    return float(server.get(FRACTION, server.get(FRACTION.replace("-", "_"), SERVER_FRACTION)))


# For people


def describe(devices: Devices) -> str:
    """A table of devices, what each kind of process has there, and what to change where that is too much. Empty for a
    run without devices."""
    if not devices.on:
        return ""
    of = f" of {gib(devices.memory)}" if devices.memory else " (say how large they are: --device-memory 80GB)"
    lines, kinds = [f"\n{len(devices.on)} device{'s' * (len(devices.on) > 1)}{of}"], dict[str, Use]()
    for device, roles in sorted(devices.on.items(), key=lambda item: (item[0].zfill(6), item[0])):
        uses = [devices.use(role) for role in roles]
        total, lacking = sum(use.total for use in uses), sum(use.lacking for use in uses)
        names = ", ".join(role.name for role in roles)
        lines.append(f"  {device:<10}{names:<22}{gib(total):>10}  {left(devices.memory, total, lacking)}")
        kinds |= {KINDS[role.essential]: use for role, use in zip(roles, uses, strict=True)}
    for kind, use in kinds.items():
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in use.parts.items())
        lines.append(f"{kind}, in GiB: {parts}{'; ' * bool(use.note)}{use.note}")
    if devices.memory:
        lines += list(hints(devices)) or ["it fits"]
    return "\n".join(lines) + "\n"


def left(memory: int, total: float, lacking: float) -> str:
    if not memory:
        return ""
    if total + lacking > memory:
        return f"{gib(total + lacking - memory)} TOO MUCH"
    return f"{gib(memory - total)} left"


def gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"


def fits(devices: Devices, roles: Sequence[RoleSpec]) -> bool:
    uses = [devices.use(role) for role in roles]
    return sum(use.total + use.lacking for use in uses) <= devices.memory


def hints(devices: Devices) -> Iterator[str]:
    """Keys to change where a device is too small for its processes, or a server has room for few sequences."""
    small = [roles for roles in devices.on.values() if not fits(devices, roles)]
    serves = devices.plain["engine"]["name"] == "sglang"
    if any(len(roles) > 1 for roles in small):
        yield "too small for both: placement={learner: 0, actors: 1} gives learner and actors devices of their own"
    if any(role.essential for roles in small for role in roles):
        yield (
            "too small for the learner: learner.checkpoint_activations=true, a smaller learner.micro_batch_tokens or "
            "learner.max_logits, more learner.ranks, or learner.lora={rank: 16}"
        )
    if any(not role.essential for roles in small for role in roles):
        yield f"too small for the engine: {'engine.tp_size=2' if serves else 'a smaller engine.kv_tokens'}"
    elif serves and any(devices.use(role).few for roles in devices.on.values() for role in roles):
        yield "little room for keys and values: engine.tp_size=2, or fewer engine.slots"
