"""From logits to tokens and behaviour logprobs, for all sequences of a decode step at once."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

GOLDEN, FIRST, SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""splitmix64's constants (`areal_like.sampling`) as signed numbers, the only 64-bit ones that torch computes with."""
WIDTH = 128
"""Tokens per block of a large vocabulary: first a block is drawn, then one of its tokens."""
BLOCKS_FROM = 4096
"""Vocabulary from which that is faster than one running sum in float64."""
Read = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def sample(logits: torch.Tensor, temperatures: np.ndarray, draws: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One token per row of logits [n, vocab] → ids int64 [n], logprobs float32 [n] of softmax(logits / temperature).

    `temperatures` float32 [n]: 0 takes the likeliest token, with the logprob at temperature 1. `draws` float64 [n] in
    [0, 1) picks the token by the inverse CDF, summed in float64; None where no row samples. The logits are overwritten.
    Raises RuntimeError if a logprob is not a number."""
    logits, scale = logits.float(), torch.from_numpy(temperatures).to(logits.device)
    greedy = scale == 0 if (temperatures == 0).any() else None
    if not (temperatures == 1).all():
        logits.div_((scale if greedy is None else scale.masked_fill(greedy, 1.0))[:, None])
    if draws is None:  # drawn all the same: a greedy row's sum must not depend on whether others sample
        draws = np.zeros(len(logits))
    tokens, found = _sampled(logits, greedy, torch.from_numpy(draws).to(logits.device))
    logprobs = found.cpu().numpy()
    refuse_nan(logprobs)
    return tokens.cpu().numpy(), logprobs


def sample_static(
    logits: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, read: Read | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` on the logits' device, for any values: every row both takes its likeliest token and draws.
    The caller looks for logprobs that are not a number. `read`: `read_blocks`, compiled, for a large vocabulary."""
    greedy, logits, vocab = temperatures == 0, logits.float(), logits.shape[1]
    scale = temperatures.masked_fill(greedy, 1.0)[:, None]
    if read is None or vocab < BLOCKS_FROM:
        return _sampled(logits / scale, greedy, draws)
    most, sums = read(logits, scale)
    largest, block = most.max(dim=-1, keepdim=True)

    def weights_at(tokens: torch.Tensor) -> torch.Tensor:
        known = (logits.gather(-1, tokens.clamp(max=vocab - 1)) / scale - largest).exp()
        return known.masked_fill(tokens >= vocab, 0.0)

    tokens, total = _drawn_by_blocks(sums * (most - largest).exp(), draws[:, None], weights_at, vocab)
    likeliest = block * WIDTH + logits.gather(-1, _tokens_of(block).clamp(max=vocab - 1)).argmax(dim=-1, keepdim=True)
    tokens = torch.where(greedy[:, None], likeliest.clamp_(max=vocab - 1), tokens)
    return tokens.flatten(), (weights_at(tokens) / total).log().float().flatten()


def read_blocks(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits / scale by blocks of tokens: the largest and the sum of exp(x - largest), [n, blocks]. For a compiler,
    which reads the logits once and writes nothing of their size."""
    blocks = F.pad(logits / scale, (0, -logits.shape[1] % WIDTH), value=-torch.inf).view(len(logits), -1, WIDTH)
    most = blocks.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(blocks.dtype).min)  # -inf - -inf is no number
    return most.squeeze(-1), (blocks - most).exp().sum(dim=-1)


def _tokens_of(block: torch.Tensor) -> torch.Tensor:
    """Blocks [n, 1] → their tokens [n, WIDTH]."""
    return block * WIDTH + torch.arange(WIDTH, device=block.device)


def _sampled(
    logits: torch.Tensor, greedy: torch.Tensor | None, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] and logprobs [n] of scaled logits, which are overwritten. `greedy` bool [n]; None: no row."""
    # In place: so large a tensor is new memory each time, and the system's pages cost more than the arithmetic.
    likeliest = None if greedy is None else logits.argmax(dim=-1, keepdim=True)
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    tokens, total = _drawn(weights, draws[:, None])
    if greedy is not None and likeliest is not None:
        tokens = torch.where(greedy[:, None], likeliest, tokens)
    return tokens.flatten(), (weights.gather(-1, tokens) / total).log().float().flatten()


def keyed_uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`areal_like.sampling.uniforms` on the tensors' device, bit for bit: keys int64 [n], with the bits of the uint64
    keys, and positions int64 [n] → float64 [n] in [0, 1)."""
    return shifted(mixed(keys + (positions + 1) * GOLDEN), 11).double() * 2.0**-53


def mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser of int64 with the bits of uint64."""
    x = (x ^ shifted(x, 30)).mul_(FIRST)
    x = (x ^ shifted(x, 27)).mul_(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Right by so many bits, zeros in front: torch's own shift repeats the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def refuse_nan(logprobs: np.ndarray) -> None:
    if np.isnan(logprobs).any():
        raise RuntimeError("the model's logits are NaN or infinite: its weights are broken")


def _drawn(weights: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [n, vocab], draws float64 [n, 1] → tokens int64 [n, 1], sums of the weights float64 [n, 1]."""
    vocab = weights.shape[1]
    if vocab < BLOCKS_FROM:
        ends = weights.cumsum(dim=-1, dtype=torch.float64)
        return _passed(ends, draws * ends[:, -1:]), ends[:, -1:]
    padded = F.pad(weights, (0, -vocab % WIDTH)) if vocab % WIDTH else weights
    sums = padded.view(len(weights), -1, WIDTH).sum(dim=-1)
    return _drawn_by_blocks(sums, draws, lambda tokens: padded.gather(-1, tokens), vocab)


def _drawn_by_blocks(
    sums: torch.Tensor, draws: torch.Tensor, weights_at: Callable[[torch.Tensor], torch.Tensor], vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_drawn`, from the sums over blocks [n, blocks] and the weights at tokens int64 [n, k] → [n, k]."""
    sums = sums.double()
    ends = sums.cumsum(dim=-1)
    targets = draws * ends[:, -1:]
    block = _passed(ends, targets)
    rest = (targets - (ends.gather(-1, block) - sums.gather(-1, block))).clamp_(min=0)
    within = weights_at(_tokens_of(block)).cumsum(dim=-1, dtype=torch.float64)
    # Where weights are NaN, too, a token of the vocabulary: a GPU does not survive another.
    return (block * WIDTH + _passed(within, rest)).clamp_(max=vocab - 1), ends[:, -1:]


def _passed(ends: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Index of the first running sum [n, m] above its target [n, 1] → int64 [n, 1]. Never a zero-probability token."""
    last = ends[:, -1:]
    targets = torch.minimum(targets, last.nextafter(torch.zeros_like(last)))
    return torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[1] - 1)  # NaN passes nowhere
