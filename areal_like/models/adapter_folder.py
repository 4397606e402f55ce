"""Reads a LoRA adapter's folder, as `peft` writes it (adapter_config.json, adapter_model.safetensors), without loading
its weights. Imports neither torch nor peft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from areal_like.config.registry import ConfigError

KEY = "learner.lora.path"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_MUST_BE: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}
"""Keys of the config → the values that can be trained here. The published model, base + B A, can't express others."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """`shapes`: name of a layer → (outputs, inputs) of the base matrix that its A and B belong to. `targets`: as its
    config names the layers."""

    rank: int
    alpha: float
    targets: list[str] | str
    shapes: dict[str, tuple[int, int]]


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Raises ConfigError where the folder has no LoRA adapter that can be trained on."""
    place = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise ConfigError(f"{KEY}: no {name} in {str(folder)!r}: want an adapter's folder, as peft writes it", KEY)
    config = _object(place / CONFIG, (place / CONFIG).read_bytes())
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{KEY}: {place / CONFIG} describes {config.get('peft_type')!r}, not LORA", KEY)
    for key, allowed in _MUST_BE.items():
        if config.get(key) not in allowed:
            raise ConfigError(f"{KEY}: {place / CONFIG} has {key}={config[key]!r}, which is not supported here", KEY)
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not isinstance(targets, list | str):
        raise ConfigError(f"{KEY}: {place / CONFIG} lacks r, lora_alpha or target_modules", KEY)
    named = sorted(map(str, targets)) if isinstance(targets, list) else targets
    return AdapterFolder(rank, float(alpha), named, _shapes(place / WEIGHTS, rank))


def _shapes(file: Path, rank: int) -> dict[str, tuple[int, int]]:
    """From the file's header."""
    with file.open("rb") as content:
        header = _object(file, content.read(int.from_bytes(content.read(8), "little")))
    sizes: dict[str, dict[str, list[int]]] = {}
    for name, tensor in header.items():
        layer, _, which = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if name != "__metadata__" and isinstance(tensor, dict) and which in ("A", "B"):
            sizes.setdefault(layer, {})[which] = tensor["shape"]
    found: dict[str, tuple[int, int]] = {}
    for layer, both in sizes.items():
        a, b = both.get("A"), both.get("B")
        if a is None or b is None or a[0] != rank or b[1] != rank:
            raise ConfigError(f"{KEY}: {file}: A {a} and B {b} of {layer} do not fit rank {rank} ({CONFIG})", KEY)
        found[layer] = b[0], a[1]
    if not found:
        raise ConfigError(f"{KEY}: {file} has no weights of adapters (lora_A, lora_B)", KEY)
    return found


def _object(file: Path, text: bytes) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{KEY}: {file} can't be read: get the adapter again", KEY)
    return content
