"""Which devices (GPUs) each process of a run gets: a plan made from the config, before anything starts.

    placement: {learner: [0-3], actors: [4-7]}

Devices are counted from 0, among those that the starter sees. A rank of the learner has one, an actor those of all its
servers (engine.replicas * engine.tp_size), in the order of the lists. `auto` gives the first devices to the learner and
the next ones to the actors; a single device is shared. Slurm and Ray choose devices by their number (`Needs`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_like.config.registry import ConfigError, with_defaults
from areal_like.config.schema import Config

KEY = "placement"
AUTO = "auto"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ROLES = ("learner", "actors")
_FORM = "want auto, or devices such as {learner: [0-3], actors: [4-7]}; share: true lets processes share devices"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 1 << 16
"""Highest device number: a longer range is a typing error."""

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """How many processes compute on devices: `ranks` of the learner, one device each, and `actors` with `per_actor`
    devices each. None: the component has no knob `device`, or names its own, and gets those of the placement."""

    ranks: int
    on_device: bool | None
    actors: int
    per_actor: int | None

    @property
    def learner(self) -> int:
        return self.ranks if self.on_device else 0

    @property
    def total(self) -> int:
        return self.learner + self.actors * (self.per_actor or 0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by process: of each rank, of each actor. None: unset."""

    ranks: tuple[Devices | None, ...]
    actors: tuple[Devices | None, ...]

    @property
    def shared(self) -> Devices:
        """Devices of more than one process."""
        named = [device for devices in (*self.ranks, *self.actors) for device in devices or ()]
        return tuple(sorted({device for device in named if named.count(device) > 1}))

    @property
    def plain(self) -> dict[str, list[int] | bool]:
        lists = [[device for devices in some for device in devices or ()] for some in (self.ranks, self.actors)]
        return {"learner": lists[0], "actors": lists[1], "share": bool(self.shared)}


def needs_of(config: Config, gpu: bool = False) -> Needs:
    """From the knobs of learner and engine. An engine with `device: auto` computes on a device where there is one
    (`gpu`), or where the placement names devices for actors."""
    learner, engine = with_defaults("learner", config.learner), with_defaults("engine", config.engine)
    on_device = learner["device"] == "cuda" if "device" in learner else None
    actors = 0 if config.replay else int(config.actors.count or 1)
    per_actor = _per_actor(engine, gpu or bool(_named(config.placement)))
    return Needs(int(learner.get("ranks", 1)), on_device, actors, per_actor)


def actors_on(spec: object, engine: Mapping[str, object]) -> int:
    """How many actors suit a placement and an engine's knobs; 0: any number."""
    named = _named(spec)
    each = _per_actor(engine, bool(named))
    return max(1, len(named) // each) if each and (named or "replicas" in engine) else 0


def _per_actor(engine: Mapping[str, object], gpu: bool) -> int | None:
    device = str(engine.get("device", ""))
    if not device or device.startswith("cuda:"):  # a device of the engine's own choice
        return None
    here = device == "cuda" or (device == "auto" and gpu)
    replicas, tp_size = (int(str(engine.get(knob, 1))) for knob in ("replicas", "tp_size"))
    return replicas * tp_size if here else 0


def _named(spec: object) -> Devices:
    return devices_of(spec.get("actors"), f"{KEY}.actors") if isinstance(spec, Mapping) else ()


def place(spec: object, needs: Needs, count: int | None) -> Placement | None:
    """The devices of each process, with `count` devices (None: unknown). None: nothing to place. Raises ConfigError."""
    if spec == AUTO:
        return _automatic(needs, count) if count and needs.total else None
    if not isinstance(spec, Mapping) or not spec or spec.keys() - {*_ROLES, "share"}:
        raise ConfigError(f"{KEY}={spec!r}: {_FORM}", KEY)
    share = spec.get("share", False)
    if not isinstance(share, bool):
        raise ConfigError(f"{KEY}.share={share!r}: want true or false", f"{KEY}.share")
    named = {role: devices_of(spec.get(role), f"{KEY}.{role}", count) for role in _ROLES}
    if not needs.actors:
        named["actors"] = ()
    placement = Placement(_ranks(named["learner"], needs), _actors(named["actors"], needs))
    if placement.shared and not share:
        problem = f"{_in_words(placement.shared)} would have several processes"
        raise ConfigError(f"{KEY}: {problem}: give each its own devices, or set {KEY}.share=true", KEY)
    return placement


def devices_of(spec: object, key: str, count: int | None = None) -> Devices:
    """`[0-3, 6]`, `"0-3"` or `6` as device numbers. Raises ConfigError."""
    if spec is None:
        return ()
    parts = spec if isinstance(spec, Sequence) and not isinstance(spec, str) else str(spec).split(",")
    found: list[int] = []
    for part in parts:
        text = str(part).strip()
        matched = None if isinstance(part, bool) else _RANGE.fullmatch(text)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
        if not first <= last <= _MOST:
            raise ConfigError(f"{key}: {text!r} is no device: want numbers and ranges from 0, such as [0-3, 6]", key)
        found += range(first, last + 1)
    if missing := sorted({device for device in found if count is not None and device >= count}):
        raise ConfigError(f"{key}: got {_in_words(missing)}, expected numbers below {count}", key)
    return tuple(found)


def visible(devices: Devices, inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a process. `inherited`: the starter's own. Raises ConfigError."""
    if inherited is None:
        return ",".join(map(str, devices))
    known = [name.strip() for name in inherited.split(",") if name.strip()]
    if missing := [device for device in devices if device >= len(known)]:
        raise ConfigError(f"{KEY}: there is no {_in_words(missing)}: {VISIBLE}={inherited} has {len(known)}", KEY)
    return ",".join(known[device] for device in devices)


def _automatic(needs: Needs, count: int) -> Placement:
    """The learner first, then actor by actor; on a single device both."""
    learner, actors = needs.learner, needs.actors * (needs.per_actor or 0)
    if needs.total <= count:
        return Placement(_ranks(range(learner), needs), _actors(range(learner, needs.total), needs))
    if count == 1 and learner <= 1 and needs.per_actor in (0, 1, None):
        return Placement(_ranks([0] * learner, needs), _actors([0] * actors, needs))
    why = f"learner.ranks={learner} and actors.count={needs.actors} with {needs.per_actor or 0} each"
    hint = f"ask for fewer, or set which are shared, such as {KEY}={{learner: [0], actors: [0], share: true}}"
    raise ConfigError(f"{KEY}: got {count} devices, expected {needs.total} for {why}; {hint}", KEY)


def _ranks(devices: Sequence[int], needs: Needs) -> tuple[Devices | None, ...]:
    key = f"{KEY}.learner"
    if needs.on_device is False and devices:
        raise ConfigError(f"{key}: the learner computes on the CPU: set learner.device=cuda, or leave {key} out", key)
    if not needs.on_device and not devices:
        return (() if needs.on_device is False else None,) * needs.ranks
    if len(devices) != needs.ranks:
        raise ConfigError(f"{key}: got {len(devices)} devices, expected one for each of {needs.ranks} ranks", key)
    return tuple((device,) for device in devices)


def _actors(devices: Sequence[int], needs: Needs) -> tuple[Devices | None, ...]:
    key, many, each = f"{KEY}.actors", len(devices), needs.per_actor
    if each == 0 and many:
        raise ConfigError(f"{key}: the engine computes elsewhere: set engine.device=cuda, or leave {key} out", key)
    if each is None and not many:
        return (None,) * needs.actors
    if each is None and many % needs.actors == 0:
        each = many // needs.actors
    if each is None or many != needs.actors * each:
        of = "" if each is None else f", with engine.replicas * engine.tp_size = {each} each"
        raise ConfigError(f"{key}: got {many} devices for actors.count={needs.actors}{of}", key)
    return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(needs.actors))


def _in_words(devices: Sequence[int]) -> str:
    return f"device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
