"""Checks a model's Hugging Face folder without loading the model: its config, and whether the weights are whole. Of
each safetensors file only the header is read, and compared with the file's size."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areal_like.config.registry import ConfigError

KEY = "model.path"
ROUTED = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""`model_type` of the models whose experts can be replayed (`areal_like.models.causal_lm`)."""
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of models whose logits are not their head's."""
_ATTENDS = {"full_attention", "sliding_attention"}


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
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: {file} is no JSON ({error}): download it again", KEY) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{KEY}: {file} holds no JSON object: download it again", KEY)
    return content


def bounds(config: Any, embedded: bool) -> dict[str, int]:
    """Setting of a transformers config → most tokens of a sequence that every role computes alike: the positions; those
    of LongRoPE before longer sequences change all angles; a sliding window in the `embedded` engine, which has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    found = {
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "original_max_position_embeddings": rope.get("rope_type") == "longrope"
        and rope["original_max_position_embeddings"],
        "sliding_window": embedded and slides and getattr(config, "sliding_window", None),
    }
    return {name: most for name, most in found.items() if most}


def computed_config(folder: str | Path, *, embedded: bool, trained: bool, key: str = KEY) -> Any:
    """transformers' config of the folder's model. Raises ConfigError for one that transformers does not know, or that
    learner (`trained`) or embedded engine (`embedded`) would compute otherwise than it does."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind, file = str(read_config(folder)["model_type"]), Path(folder) / "config.json"
    if kind not in KNOWN:
        raise ConfigError(f"{key}: {file}: transformers has no causal language model of model_type {kind!r}", key)
    name, config = model_type_to_module_name(kind), AutoConfig.from_pretrained(folder, local_files_only=True)
    code = resources.files("transformers.models").joinpath(name, f"modeling_{name}.py")
    text = code.read_text(encoding="utf-8") if code.is_file() else ""
    if problem := next(_problems(config, text, embedded, trained), None):
        raise ConfigError(f"{key}: {file}: {kind} has {problem}, not computed here: take another model", key)
    return config


def _problems(config: Any, code: str, embedded: bool, trained: bool) -> Iterator[str]:
    """What learner and embedded engine lack, which attend in their own way. `code`: of transformers' model."""
    settings = [*CHANGES_LOGITS] * trained + ["kv_lora_rank"] * embedded + ["attn_logit_softcapping"]
    if embedded or trained:
        yield from sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENDS)
        yield from (key for key in settings if getattr(config, key, None))
        yield from ["attention sinks"] * ("s_aux=" in code)
        yield from ["custom attention"] * (code != "" and "_supports_attention_backend = True" not in code)
