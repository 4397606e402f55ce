"""The arguments of SGLang servers, and the models that they may serve."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from actors.engines.sglang_loader import LOAD_FORMAT

FOR_CPU = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "max-total-tokens": 65536,
}
OURS = {"model-path", "load-format", "dtype", "host", "port", "custom-weight-loader", "device"} | {
    "base-gpu-id",
    "tp-size",
    "tp",
    "tensor-parallel-size",
}
"""Arguments that the engine sets from its own knobs."""
CHANGE_LOGPROBS = ("preferred_sampling_params", "quantization", "speculative_algorithm")
"""Settings of a server under which its logprobs are not those of the published weights (or not of all tokens)."""


_PARALLEL = {"dp": "data-parallel-size", "pp": "pipeline-parallel-size", "ep": "expert-parallel-size"}
UNSUPPORTED = {
    *("enable-dp-attention", "enable-dp-lm-head", "attn-dp-size", "attention-data-parallel-size", "moe-dense-tp-size"),
    *("moe-dp-size", "moe-data-parallel-size", "attn-cp-size", "attention-context-parallel-size"),
    *("dcp-size", "decode-context-parallel-size", "enable-eplb", "ep-num-redundant-experts", "init-expert-location"),
    *("elastic-ep-backend", "cpu-offload-gb", "offload-group-size", "weight-cache-mode", "enable-lora", "lora-paths"),
    *("kv-cache-dtype", "modelopt-quant", "quantize-and-serve", "torchao-config"),
    *(spelling for short, long in _PARALLEL.items() for spelling in (short, f"{short}-size", long)),
}
"""Arguments that would put weights where patches do not reach them, or change logprobs."""
LATENT = "kv_lora_rank"
"""Name in a model's config."""
LATENT_TRIED = ("deepseek_v2",)
"""`model_type` of the models with latent attention that have been tried: SGLang's own follows published weights."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The engine's knobs that concern a server; `more` are further arguments. `first_device`: of its `tp_size` GPUs in
    a row."""

    device: str
    dtype: str | None
    tp_size: int
    slots: int
    more: dict[str, Any]
    first_device: int = 0

    @property
    def computed_in(self) -> str:
        """The dtype of weights and computing."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


def refuse_model(model: PreTrainedModel) -> None:
    """Raises ValueError for quantised weights, and for an architecture unless SGLang's own model is known to follow
    published weights (with latent attention it computes further ones from them)."""
    if getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"engine=sglang does not support quantised weights ({type(model).__name__} has a quantization_config): "
            "use the folder of the unquantised model"
        )
    rank, kind = getattr(model.config, LATENT, None), model.config.model_type
    if rank and kind not in LATENT_TRIED:
        raise ValueError(
            f"engine=sglang supports latent attention of {', '.join(LATENT_TRIED)} only ({type(model).__name__} is of "
            f"{kind}, and has {LATENT}={rank}): use engine=torch, or another model"
        )


def command(model: PreTrainedModel, folder: Path, wanted: Wanted) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server for a model. Raises ValueError for arguments that are not free.

    The server reads the weights of a local folder itself; of a model that was made here it gets the config, and later
    all weights.
    """
    more = {str(key).replace("_", "-"): value for key, value in wanted.more.items()}
    if taken := sorted(OURS & more.keys()):
        raise ValueError(f"engine.server: {', '.join(taken)}: the engine sets that itself")
    if changing := sorted(each for each in CHANGE_LOGPROBS if each.replace("_", "-") in more):
        raise ValueError(
            f"engine.server: {', '.join(changing)}: behaviour logprobs would differ from the learner's; leave it out"
        )
    if unsupported := sorted(UNSUPPORTED & more.keys()):
        raise ValueError(
            f"engine.server: {', '.join(unsupported)}: engine=sglang does not support that; leave it out "
            "(engine.replicas and engine.tp_size spread the work over devices)"
        )
    placed = {"device": wanted.device, "base-gpu-id": wanted.first_device}
    flags: dict[str, Any] = dict(FOR_CPU) if wanted.device == "cpu" else placed
    flags |= {
        "dtype": wanted.computed_in,
        "tp-size": wanted.tp_size,
        "max-running-requests": wanted.slots,
        "skip-tokenizer-init": True,
        "sleep-on-idle": True,
        "log-level": "warning",
        "custom-weight-loader": LOAD_FORMAT,
        **_source(model, folder),
        **more,
    }
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if wanted.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return _as_arguments(flags), environment


def commands(
    model: PreTrainedModel, folder: Path, wanted: Wanted, replicas: int
) -> tuple[list[list[str]], dict[str, str]]:
    """Arguments of each of `replicas` servers, and the environment of all. `wanted.slots` are over all servers."""
    one = replace(wanted, slots=-(-wanted.slots // replicas))
    told = [command(model, folder, replace(one, first_device=i * wanted.tp_size)) for i in range(replicas)]
    return [arguments for arguments, _ in told], told[0][1]


def _source(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    path = Path(model.name_or_path or "")
    if model.name_or_path and (path / "config.json").is_file():
        return {"model-path": str(path.resolve())}
    made, config = folder / "model", copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(made)
    return {"model-path": str(made.resolve()), "load-format": "dummy"}


def _as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """`{a: 1, b: True, c: False}` → `--a 1 --b`."""
    arguments: list[str] = []
    for key, value in flags.items():
        if value is False or value is None:
            continue
        arguments.append(f"--{key}")
        if value is not True:
            arguments += [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return arguments
