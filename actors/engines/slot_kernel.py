"""Attention of one new token per slot by PyTorch's flash attention (CUDA, half precision), which reads each sequence
only as far as it goes. It is compared with the usual attention once per process, before the first use."""

import logging

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)
KERNEL = torch.ops.aten._flash_attention_forward.default
"""What `torch.nn.attention.varlen` calls. An older torch can not say how far slots are filled; 2.11 can."""
AVAILABLE = any(argument.name == "seqused_k" for argument in KERNEL._schema.arguments)
TOLERANCE = 2e-2
"""Half precision has three digits."""
AMPERE = (8, 0)
"""The oldest GPU generation that the kernel supports."""


_kernel_verified: bool | None = None
"""Whether the kernel equals the usual attention here; None before the comparison."""


def takes(keys: torch.Tensor) -> bool:
    """Whether the kernel can attend to a cache [layer, slot, head, time, dim]. Compares it at first, so not in a
    capture."""
    if keys.device.type != "cuda" or keys.dtype not in (torch.bfloat16, torch.float16):
        return False
    dim = keys.shape[-1]
    if dim > 256 or dim % 8 or not AVAILABLE:
        return False
    global _kernel_verified
    if _kernel_verified is None:
        _kernel_verified = torch.cuda.get_device_capability(keys.device) >= AMPERE and _agrees(keys)
    return _kernel_verified


Used = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Lengths of a step's slots int32 [n], and where their queries and keys begin, int32 [n + 1]: one for all layers."""


def used(lengths: torch.Tensor, keys: torch.Tensor) -> Used:
    """For `attend`: slot i of a cache [..., kv_heads, time, dim] reads its first `lengths[i]` positions (int64 [n])."""
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return lengths.to(torch.int32), ends, ends * (keys.shape[-3] * keys.shape[-2])


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: Used, scale: float) -> torch.Tensor:
    """query [n, heads, 1, dim] over keys and values [slots, kv_heads, time, dim] → [n, heads, 1, dim]."""
    n, heads, _, dim = query.shape
    q, k, v = query.reshape(n, heads, dim), _as_row(keys, n), _as_row(values, n)
    whole = {"scale": scale, "seqused_k": slots[0]}
    # No dropout, no mask, no debugging.
    return KERNEL(q, k, v, *slots[1:], 1, keys.shape[2], 0.0, False, False, **whole)[0].view(n, heads, 1, dim)


def _as_row(cache: torch.Tensor, n: int) -> torch.Tensor:
    """[slots, head, time, dim] → a view [positions, head, dim] of the first n slots in which slot i begins at position
    i · heads · time, as the kernel wants it: positions of one head lie side by side, those of the next behind them."""
    _, heads, time, dim = cache.shape
    positions = n * heads * time - (heads - 1) * time
    return cache.as_strided((positions, heads, dim), (dim, time * dim, 1), cache.storage_offset())


@torch.inference_mode()
def _agrees(keys: torch.Tensor) -> bool:
    """Compare the kernel with the usual attention on random slots of this cache's shape."""
    heads, dim, device = keys.shape[2], keys.shape[4], keys.device
    made = torch.Generator(device).manual_seed(0)
    lengths = torch.tensor([1, 33, 96], device=device)
    k, v = (torch.randn(4, heads, 96, dim, generator=made, device=device).to(keys.dtype) for _ in range(2))
    query = torch.randn(3, 2 * heads, 1, dim, generator=made, device=device).to(keys.dtype)
    hidden = (torch.arange(96, device=device) >= lengths[:, None])[:, None, None]
    wide_k, wide_v = (each[:3].repeat_interleave(2, 1).float() for each in (k, v))
    truth = F.scaled_dot_product_attention(query.float(), wide_k, wide_v, attn_mask=~hidden, scale=dim**-0.5)
    try:
        found = attend(query, k, v, used(lengths, k), dim**-0.5)
    except Exception as error:  # anything that it does not support here
        log.warning("torch's flash attention does not run over slots here (%s): attending with masks", error)
        return False
    agrees = torch.allclose(found.float(), truth, rtol=TOLERANCE, atol=TOLERANCE)
    if not agrees:
        log.warning(
            "torch's flash attention disagrees with scaled_dot_product_attention over slots: attending with masks"
        )
    return agrees
