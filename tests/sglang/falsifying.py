"""Falsifies the weights that a real SGLang server computes with, behind the digest's back. Runs inside the server, as
another custom loader (`--custom-weight-loader`)."""

import torch

LOAD_FORMAT = "tests.sglang.falsifying.load"


@torch.no_grad()
def load(model, named_tensors):
    """Turn all angles of the rotary embedding: tables that the server has made itself, which are no parameters."""
    for module in model.modules():
        if hasattr(module, "cos_sin_cache"):
            module.cos_sin_cache.copy_(module.cos_sin_cache.roll(3, dims=0))
