"""Checks a model's Hugging Face folder without loading the model: its config, and whether the weights are whole. Of
each safetensors file only the header is read, and compared with the file's size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.config.registry import ConfigError

KEY = "model.path"
MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file that the library accepts."""
ROUTED = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""`model_type` of the models whose experts can be replayed (`areal_like.models.causal_lm`)."""
_LFS = b"version https://git-lfs"
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises ConfigError where there is none, or it is no model's."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{KEY}: no config.json in {str(folder)!r}: want the folder of a Hugging Face model", KEY)
    config = _read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{KEY}: {file} describes no model: it has no model_type", KEY)
    return config


def weight_bytes(folder: str | Path) -> int:
    """Size of the folder's weights; 0 where there are none."""
    files = list(Path(folder).glob("*.safetensors")) or list(Path(folder).glob("*.bin"))
    return sum(file.stat().st_size for file in files)


def check_weights(folder: str | Path) -> None:
    """Raises ConfigError where weights are missing or cut off."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{KEY}: {index} has no weight_map: download the model again", KEY)
        files = [folder / str(name) for name in sorted(set(shards.values()))]
    elif any((folder / name).is_file() for name in _OTHERS):
        return  # pickles: only torch can read them
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{KEY}: no weights in {str(folder)!r} ({file.name} is missing): download them", KEY)
        _check_size(file)


def _check_size(file: Path) -> None:
    """A safetensors file is 8 bytes with the header's length, the header, and the tensors one behind the other."""
    size = file.stat().st_size
    with open(file, "rb") as content:
        start = content.read(len(_LFS))
        if start == _LFS:
            raise ConfigError(f"{KEY}: {file} is a pointer of Git LFS, not the weights: run git lfs pull", KEY)
        length = int.from_bytes(start[:8], "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{KEY}: {file} is no safetensors file: download it again", KEY)
        content.seek(8)
        header = content.read(length)
    needed = 8 + length
    if len(header) == length:
        try:
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            needed += max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{KEY}: the header of {file} can't be read: download it again", KEY) from None
    if size != needed:
        cut = "is cut off: it has" if size < needed else "is damaged: it has"
        raise ConfigError(f"{KEY}: {file} {cut} {size} bytes, and its header says {needed}: download it again", KEY)


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: {file} is no JSON ({error}): download it again", KEY) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{KEY}: {file} holds no JSON object: download it again", KEY)
    return content


def check_type(folder: str | Path, config: Mapping[str, object]) -> None:
    """Raises ConfigError for a `model_type` that transformers has no causal language model of. It is imported."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind = config["model_type"]
    if kind not in KNOWN and "auto_map" not in config:
        file = Path(folder) / "config.json"
        raise ConfigError(f"{KEY}: {file}: transformers knows no causal language model of model_type {kind!r}", KEY)
