"""LoRA (arXiv 2106.09685) through `peft`: trains small matrices beside the model's frozen weights. The learner
publishes the merged model, base + scale · B A, rounded to the published dtype, under the model's names without
adapters, so actors need not know about LoRA. The learner differentiates the sum before rounding, so on-policy ratios
are 1 up to that rounding. B starts at 0, so version 0 has the bits that actors start with."""

from contextlib import AbstractContextManager
from typing import Annotated

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_like.hub import SNAPSHOT
from areal_like.models.causal_lm import layers_of
from learners.sharding import LazyWeights


class Adapters:
    """Adds adapters to `model`, in place, with random A that depends on `seed` alone. A matrix's update is `alpha` /
    `rank` · B A. `targets`: names of layers (q_proj, ...), or "all-linear": all but the output head. The model's own
    weights are rounded to `dtype` and frozen; the matrices of its layers are held in `hold_in`, which must round them
    no further (None: as they are). Raises ImportError without peft, ValueError for targets that can't be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        dtype: torch.dtype,
        hold_in: torch.dtype | None = None,
        *,
        rank: Annotated[int, "[1, inf)"] = 16,
        alpha: Annotated[float, "(0, inf)"] = 32.0,
        targets: list[str] | str = "all-linear",
    ):
        try:
            import peft
        except ImportError:
            raise ImportError("learner.lora needs peft: pip install 'areal_like[lora]'") from None
        self._names = [name for name, _ in model.named_parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._wrapped = peft.get_peft_model(model, config).eval()
        if found := SNAPSHOT.search(config.base_model_name_or_path or ""):  # its name holds on other machines, too
            config.base_model_name_or_path, config.revision = f"{found[2]}/{found[3]}", found[4]
        for module in [module for layer in layers_of(model) for module in layer.modules()]:
            if hold_in and isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.weight.data = module.weight.data.to(hold_in)
        self._model = model
        held = {id(parameter) for name, parameter in model.named_parameters() if ".base_layer." in name}
        if id(model.get_input_embeddings().weight) in held:
            raise ValueError(
                "learner.lora.targets: the embedding, or a head tied to it, takes no adapter here; leave it out"
            )

    def merged(self) -> LazyWeights:
        """The weights of the model with adapters."""
        weights = {name.replace(".base_layer.", "."): p.detach() for name, p in self._model.named_parameters()}
        return Merged(self._model, {name: weights[name] for name in self._names})

    def off(self) -> AbstractContextManager[None]:
        """In this context the model computes as before training: a reference that costs no memory."""
        return self._wrapped.disable_adapter()

    def trained(self) -> dict[str, Tensor]:
        """The adapters' own weights, or this rank's shards of them, by peft's names."""
        return {name: p for name, p in self._wrapped.named_parameters() if p.requires_grad}

    def save(self, folder: str, weights: dict[str, Tensor]) -> None:
        """Write `weights`, whole ones of all names in `trained`, as peft's folder
        (`PeftModel.from_pretrained(base, folder)`)."""
        self._wrapped.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)


class Merged(LazyWeights):
    """Parameter name without adapters → its value with them, in float32 and made when it is looked up. With several
    ranks each has its shard; all must look up the same names at the same time."""

    def __init__(self, model: PreTrainedModel, weights: dict[str, Tensor]):
        super().__init__(weights)
        found = model.named_modules()
        self._adapted = {f"{name}.weight": each for name, each in found if hasattr(each, "get_delta_weight")}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = super().__getitem__(name)
        return weight + self._adapted[name].get_delta_weight("default") if name in self._adapted else weight
