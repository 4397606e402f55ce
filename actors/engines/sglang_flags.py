"""The arguments of SGLang servers, and the models that they may serve."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

FOR_CPU = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "max-total-tokens": 65536,
}
REFUSED = {
    "the engine sets that itself": """
        model-path load-format dtype host port custom-weight-loader device base-gpu-id tp-size tp tensor-parallel-size
    """,
    "behaviour logprobs would differ from the learner's; leave it out": """
        preferred-sampling-params quantization speculative-algorithm kv-cache-dtype modelopt-quant quantize-and-serve
        torchao-config
    """,
    # Weights would lie where patches do not reach them.
    "engine=sglang does not support that; use engine.replicas and engine.tp_size to spread the work over devices": """
        dp dp-size data-parallel-size pp pp-size pipeline-parallel-size ep ep-size expert-parallel-size
        enable-dp-attention enable-dp-lm-head attn-dp-size attention-data-parallel-size moe-dense-tp-size
        moe-dp-size moe-data-parallel-size attn-cp-size attention-context-parallel-size
        dcp-size decode-context-parallel-size enable-eplb ep-num-redundant-experts init-expert-location
        elastic-ep-backend cpu-offload-gb offload-group-size weight-cache-mode enable-lora lora-paths
    """,
}
"""Arguments that a config may not set, by the reason."""
LATENT_TRIED = ("deepseek_v2",)
"""`model_type` of the models with latent attention that have been tried: SGLang's own follows published weights."""


def refuse_model(model: PreTrainedModel) -> None:
    """Raises ValueError for quantised weights, and for an architecture unless SGLang's own model is known to follow
    published weights (with latent attention it computes further ones from them)."""
    if getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"engine=sglang does not support quantised weights ({type(model).__name__} has a quantization_config): "
            "use the folder of the unquantised model"
        )
    rank, kind = getattr(model.config, "kv_lora_rank", None), model.config.model_type
    if rank and kind not in LATENT_TRIED:
        raise ValueError(
            f"engine=sglang supports latent attention of {', '.join(LATENT_TRIED)} only ({type(model).__name__} is of "
            f"{kind}, and has kv_lora_rank={rank}): use engine=torch, or another model"
        )


def commands(
    model: PreTrainedModel,
    folder: Path,
    *,
    device: str,
    dtype: str,
    tp_size: int,
    replicas: int,
    slots: int,
    more: Mapping[str, Any],
) -> tuple[list[list[str]], dict[str, str]]:
    """Arguments of each of `replicas` servers for a model, and the environment of all. `slots` are over all servers,
    `more` are further arguments. Raises ValueError for arguments that are not free."""
    own = {str(key).replace("_", "-"): value for key, value in more.items()}
    for reason, names in REFUSED.items():
        if refused := sorted(own.keys() & set(names.split())):
            raise ValueError(f"engine.server: {', '.join(refused)}: {reason}")
    flags = {
        **(FOR_CPU if device == "cpu" else {"device": device}),
        "dtype": dtype,
        "tp-size": tp_size,
        "max-running-requests": -(-slots // replicas),
        "skip-tokenizer-init": True,
        "sleep-on-idle": True,
        "log-level": "warning",
        **_source(model, folder),
        **own,
    }
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    places = [{} if device == "cpu" else {"base-gpu-id": i * tp_size} for i in range(replicas)]
    return [_as_arguments(flags | place) for place in places], environment


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
