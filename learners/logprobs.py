"""Logprobs and entropies of trained tokens under a model, from one packed forward pass. The output head runs only on
positions that predict a trained token, some of them at a time, so the logits of a large vocabulary are never all in
memory; the backward pass computes a piece again. Temperature is applied as in the engines: logits / temperature."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_like.models.causal_lm import multiplied_into_float32
from areal_like.models.compiling import Compiling
from areal_like.models.model_folder import CHANGES_LOGITS
from learners.packing import MicroBatch

CACHED = 1 << 22
"""Number of logits that a CPU's cache holds between several reads."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` int64 [N] and entropies (nats), float32 [N] (float64 of such), from logits [N, V]."""
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    # A probability of 0 would give 0 · −inf.
    entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)
    return chosen, entropy


ONEDNN_FROM = 1 << 24
"""From this many multiplications on, oneDNN's float32 product beats MKL's, torch's own choice, on AMD."""


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [N, V] of states and weights as they are, in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.is_cuda and weight.dtype != wide:
        return multiplied_into_float32(states, weight, bias)
    states, weight, bias = states.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    many = len(states) * weight.numel() >= ONEDNN_FROM and torch.backends.mkldnn.is_available()
    if many and weight.is_cpu and weight.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return linear(states, weight, bias)


class _Chosen(torch.autograd.Function):
    """Logprobs and entropies of tokens under a linear head, `rows` of them at a time, without logits in the graph.

    Logits are made in float32, under any autocast and dtype of weights: losses clip ratios within a few thousandths,
    which needs more digits than half precision has. The backward pass multiplies in half precision. Up to `rows`
    tokens, all probabilities are kept for it in that dtype; otherwise it makes them again.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no keywords
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
        keep: bool = True,
        entropy_gradient: bool = True,
        chains: "Chains | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """`states` [N, H], `weight` [V, H], `bias` [V], `targets` int64 [N] → logprobs [N] and entropies [N]; entropies
        have a gradient only if `entropy_gradient`. `keep` false: there will be no backward pass."""
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chains = _dtype(weight), chains or PLAIN
        ctx.kept = None
        if keep and any(ctx.needs_input_grad) and len(states) <= rows:
            ctx.kept = weight.new_empty(len(states), len(weight), dtype=ctx.dtype)
        found = []
        for part in _parts(len(states), rows, weight):
            with torch.autocast(weight.device.type, enabled=False):
                into = None if ctx.kept is None else ctx.kept[part]
                found.append(ctx.chains.read(_logits(states[part], weight, bias), temperature, targets[part], into))
        chosen, entropy = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.save_for_backward(states, weight, bias, targets, chosen, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_chosen: Tensor | None, for_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d chosen / d logit = 1[target] − p; d entropy / d logit = −p (log p + entropy). None: 0."""
        states, weight, bias, targets, chosen, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # overwritten by the gradient; a second backward pass makes it again
        of_states, of_weight = torch.empty_like(states), None
        of_bias = None if bias is None else torch.zeros_like(bias)
        pull = torch.zeros_like(chosen) if for_chosen is None else for_chosen / ctx.temperature
        push = None if for_entropy is None else for_entropy / ctx.temperature
        wide = torch.promote_types(weight.dtype, torch.float32)
        narrow = weight.to(ctx.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            for start in range(0, len(states), ctx.rows):
                piece = slice(start, start + ctx.rows)
                gradient = weight.new_empty(len(states[piece]), len(weight), dtype=ctx.dtype) if kept is None else kept
                for part in _parts(len(gradient), ctx.rows, weight):
                    mine = slice(start + part.start, start + part.stop)
                    if kept is None:
                        ctx.chains.softmax(_logits(states[mine], weight, bias), ctx.temperature, gradient[part])
                    pushed = None if push is None else push[mine]
                    here = ctx.chains.differentiate(gradient[part], chosen[mine], entropy[mine], pull[mine], pushed)
                    gradient[part].scatter_(1, targets[mine, None], here[:, None].to(gradient.dtype))
                of_states[piece] = gradient @ narrow
                product = gradient.t() @ states[piece].to(ctx.dtype)
                of_weight = product.to(wide) if of_weight is None else of_weight.add_(product)
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_states, of_weight, of_bias, *(None for _ in range(6))


def _dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which the head's backward pass multiplies."""
    kind = weight.device.type
    lowered = torch.is_autocast_enabled(kind) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if lowered else weight.dtype


def _parts(count: int, rows: int, weight: Tensor) -> list[slice]:
    """`count` rows of logits, `rows` of them at a time, and on a CPU so few that they stay in its cache."""
    few = min(rows, max(1, CACHED // len(weight))) if weight.is_cpu else rows
    return [slice(start, min(start + few, count)) for start in range(0, count, few)]


def _read(logits: Tensor, temperature: float, targets: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` int64 [N] and entropies [N] from logits [N, V], which are overwritten; `into` receives the
    probabilities."""
    logits.div_(temperature)
    logits.sub_(logits.amax(-1, keepdim=True))
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    probabilities = logits.exp()
    total = probabilities.sum(-1)
    probabilities.div_(total[:, None])
    if into is not None:
        into.copy_(probabilities)
    # A probability of 0 would give 0 · −inf.
    below = torch.einsum("nv,nv->n", probabilities, logits.clamp_(min=torch.finfo(logits.dtype).min))
    return chosen - total.log(), total.log() - below


def _read_once(logits: Tensor, temperature: float, targets: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `_read`, for a compiler: it reads logits for their maximum, for both sums, and for `into`, and keeps them."""
    logits = logits / temperature
    logits = logits - logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    powers = logits.exp()
    total = powers.sum(-1)
    below = (powers * logits.clamp(min=torch.finfo(logits.dtype).min)).sum(-1) / total
    if into is not None:
        into.copy_(powers / total[:, None])
    return chosen - total.log(), total.log() - below


def _softmax(logits: Tensor, temperature: float, into: Tensor) -> None:
    """Write probabilities [N, V]; logits may be overwritten."""
    logits = logits / temperature if torch.compiler.is_compiling() else logits.div_(temperature)
    into.copy_(torch.softmax(logits, -1))


def _differentiate(probabilities: Tensor, chosen: Tensor, entropy: Tensor, pull: Tensor, push: Tensor | None) -> Tensor:
    """Turn probabilities [N, V], in place, into the gradient of Σ (pull · logprob + push · entropy) by the logits, but
    for the targets' [N], which are returned."""
    finite = chosen.clamp(min=torch.finfo(chosen.dtype).min)
    both = pull if push is None else pull + push * (finite + entropy)
    if push is not None:
        logprobs = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
        logprobs.add_(entropy[:, None]).mul_(push[:, None]).add_(pull[:, None])
        probabilities.mul_(logprobs.neg_())
    else:
        probabilities.mul_(-pull[:, None])
    return pull - finite.exp() * both  # where 1 − p needs all digits


class Chains(NamedTuple):
    """What the head computes from logits, in operations on single numbers and on rows."""

    read: Callable[[Tensor, float, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    softmax: Callable[[Tensor, float, Tensor], None]
    differentiate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


PLAIN = Chains(_read, _softmax, _differentiate)


def compiled(compiling: Compiling) -> Chains:
    """The chains in few passes over the logits: without a compiler there are ten."""
    wrap = partial(compiling.wrap, name="the logprob head")
    return Chains(wrap(_read_once, plain=_read), wrap(_softmax), wrap(_differentiate))


class LogprobHead:
    """In place of a head's `forward`: states [1, N, H] → logprob and entropy of each, [1, N, 2], where `targets` int64
    [N] are set; logits where they are not. At most `max_logits` logits are made at once (but those of one token).
    `entropy_gradient`: will anybody ask for the entropies' gradient?"""

    def __init__(
        self,
        head: nn.Module,
        vocabulary: int,
        max_logits: int,
        *,
        entropy_gradient: bool = True,
        chains: Chains = PLAIN,
    ):
        self._head, self._forward, self._vocabulary = head, head.forward, vocabulary
        self.limit(max_logits)
        self._entropy_gradient, self._chains = entropy_gradient, chains
        self.targets: Tensor | None = None
        self.temperature = 1.0

    def limit(self, max_logits: int) -> None:
        self._rows = max(1, max_logits // self._vocabulary)

    def __call__(self, states: Tensor) -> Tensor:
        if self.targets is None:
            return self._forward(states)
        targets = self.targets
        if type(self._head) is nn.Linear and len(targets):
            weight, bias = self._head.weight, self._head.bias
            how = (self.temperature, self._rows, torch.is_grad_enabled(), self._entropy_gradient, self._chains)
            return torch.stack(_Chosen.apply(states[0], weight, bias, targets, *how), -1)[None]
        if len(targets) <= self._rows:
            return self._piece(states, targets, self.temperature)
        pieces = [
            checkpoint(self._piece, *piece, self.temperature, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(states.split(self._rows, 1), targets.split(self._rows), strict=True)
        ]
        return torch.cat(pieces, 1)

    def _piece(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """For a head that is more than a matrix, such as one with an adapter: [1, n, 2]."""
        with torch.autocast(states.device.type, enabled=False):
            logits = self._forward(states.to(next(self._head.parameters()).dtype))[0]
        logprobs, entropy = token_logprobs(logits, targets, temperature)
        return torch.stack([logprobs, entropy if self._entropy_gradient else entropy.detach()], -1)[None]


def use_logprob_head(model: PreTrainedModel, max_logits: int, **how: Any) -> None:
    """Make a model's head a `LogprobHead` with these arguments. Raises ValueError if logits are not its own."""
    if changed := [key for key in CHANGES_LOGITS if getattr(model.config, key, None) is not None]:
        raise ValueError(f"the model changes its head's logits by {changed}, so the learner can't train it")
    head = model.get_output_embeddings()
    head.forward = LogprobHead(head, model.config.vocab_size, max_logits, **how)


def limit_logits(model: PreTrainedModel, max_logits: int) -> None:
    """Of a model that has been through `use_logprob_head`: make at most so many at once from now on."""
    model.get_output_embeddings().forward.limit(max_logits)  # type: ignore[union-attr]


def forward_logprobs(model: PreTrainedModel, microbatch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies, float32 [N], of a micro-batch's trained tokens.

    The model must have been through `learners.attention.use_packed_attention` and `use_logprob_head`.
    """
    head: LogprobHead = model.get_output_embeddings().forward  # type: ignore[assignment]
    head.targets, head.temperature = microbatch.targets, temperature
    experts = {} if microbatch.experts is None else {"experts": microbatch.experts}
    try:
        output = model(
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            use_cache=False,
            logits_to_keep=microbatch.outputs,
            layout=microbatch.layout,
            **experts,
        )
    finally:
        head.targets = None
    numbers = output.logits[0]
    return numbers[:, 0], numbers[:, 1]
