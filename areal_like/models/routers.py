"""The routers of transformers' mixture-of-experts models: which modules they are, and what they choose.

Only those that choose the `top_k` experts with the largest probabilities, and weigh them by these: of other families
(groups of experts, biases for balance) weights of given experts would have to be computed otherwise.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from areal_like.models.experts import Routing
from areal_like.models.model_folder import ROUTED


def routers_of(model: PreTrainedModel) -> list[tuple[int, nn.Module, nn.Module]]:
    """(number of the decoder layer, layer, its router) of each layer that has experts, in order. A router maps hidden
    states [N, H] to (logits [N, experts], weights [N, k], experts [N, k]). Raises ValueError for a model without, or of
    another family."""
    kind = model.config.model_type
    layers = list(model.get_decoder().layers) if kind in ROUTED else []
    found = [(i, layer, layer.mlp.gate) for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    if not found:
        raise ValueError(
            f"learner.router_replay needs a mixture-of-experts model of the kinds {', '.join(sorted(ROUTED))}, and "
            f"this one is of {kind}: leave it out"
        )
    return found


def routing_of(model: PreTrainedModel) -> Routing:
    """Raises as `routers_of`."""
    routers = [router for _, _, router in routers_of(model)]
    return Routing(len(routers), int(routers[0].top_k), int(routers[0].num_experts))  # type: ignore[arg-type]
