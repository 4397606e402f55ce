"""Checks a model's Hugging Face folder without loading the model: its config, and whether the weights are whole. Of
each safetensors file only the header is read, and compared with the file's size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areal_like.config.registry import ConfigError

KEY = "model.path"
ROUTED = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""`model_type` of the models whose experts can be replayed (`areal_like.models.causal_lm`)."""
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
        try:
            with safe_open(file, "numpy"):  # compares its header with its size
                pass
        except SafetensorError as error:
            hint = "download it again (a pointer of Git LFS: run git lfs pull)"
            raise ConfigError(f"{KEY}: {file} is no whole safetensors file ({error}): {hint}", KEY) from None


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
