"""A pretrained policy of the studies off policy: SmolLM2-135M-Instruct answers sums of reasoning_gym (`chain_sum`).

Two numbers of one or two digits, plus or minus, whose result lies from 0 to 99. Answers are decoded under a grammar: a
digit, then a digit or the end; so every answer is two tokens of eleven, and all 110 are scored by one pass over the
question and ten branches behind it. The upper `UPPER` layers are trained; what the lower ones make of each question is
computed once. An inexact actor is inexact in all layers, and its lower ones once and for all.

Rewards are 1 for the right result, else 0. The held-out reward is exact: the mean probability of the right answer to
questions that are never trained, at temperature 1. These come last among different ones, when most of the easy ones
are gone: they are harder than those trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.engines.inexact import perturb

from .stacks import Parameters
from .tokens import Task

SUMS = Task(length=2, vocabulary=11, prompts=12, samples=8)
END = 10
"""The token behind a single digit, after the ten digits."""
UPPER = 2
TRAINED, HELD_OUT = 288, 96
CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
NEVER = -1e9
BELOW = "below"
"""What the lower layers make of the questions, among an actor's parameters."""


def questions(count: int) -> tuple[list[str], list[int]]:
    """Different questions and their results, always the same. Raises UserError without reasoning_gym."""
    from areal_like.tasks.procedural import item

    found: dict[str, int] = {}
    number = 0
    while len(found) < count:
        each = item("chain_sum", json.dumps(CONFIG | {"size": 100 * count}, sort_keys=True), number)
        result = int(str(each["answer"]))
        if 0 <= result <= 99:
            found[str(each["question"])] = result
        number += 1
    return list(found), list(found.values())


class Arithmetic:
    """`model` is a Llama as transformers has it; `tokens` int64 [N, T] are questions, filled up on the left with −1;
    `digits` int64 [11] are the tokens of the ten digits and of the end; `results` are from 0 to 99. The last `held`
    questions are held out. `kept`: a folder where the lower layers' work is kept."""

    embeddings: tuple[str, ...] = ()
    at_once = 1

    def __init__(
        self, model: Any, tokens: Tensor, digits: Tensor, results: Sequence[int], held: int, kept: Path | None = None
    ):
        self._model, self._tokens, self._digits, self._held = model.eval(), tokens, digits, held
        numbers = torch.tensor(results)
        self._right = torch.where(
            (numbers < END)[:, None], torch.stack([numbers, torch.full_like(numbers, END)], 1),
            torch.stack([numbers // 10, numbers % 10], 1),
        )  # fmt: skip
        layers, config = model.model.layers, model.config
        self._upper, self._eps, self._dim = layers[-UPPER:], config.rms_norm_eps, layers[0].self_attn.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        norms = [[layer.input_layernorm.weight, layer.post_attention_layernorm.weight] for layer in self._upper]
        self._norms = [[weight.detach() for weight in pair] for pair in norms]
        self._norm, self._head = model.model.norm.weight.detach(), model.lm_head.weight.detach()[digits]
        length = tokens.shape[1]
        self._places = torch.cat([torch.arange(length), torch.full((10,), length)])[None]
        embedded = torch.zeros(1, length + 10, config.hidden_size)
        self._cos, self._sin = (each[:, None] for each in model.model.rotary_emb(embedded, self._places))
        own = torch.eye(length + 10, dtype=torch.bool)
        earlier = torch.ones(length + 10, length, dtype=torch.bool).tril()
        there = F.pad(tokens >= 0, (0, 10))[:, None]
        self._seen = ((F.pad(earlier, (0, 10)) & there) | own)[:, None]
        self._below: dict[str | float | None, Tensor] = {}
        self._kept = kept

    def start(self, seeds: Sequence[int], task: Task) -> dict[str, Tensor]:
        """The pretrained matrices of the upper layers, [L, in, out]: all learners begin alike."""
        made = {
            f"{i}.{name}": weight for i, layer in enumerate(self._upper) for name, weight in matrices(layer).items()
        }
        return {name: weight.detach().T[None].repeat(len(seeds), 1, 1) for name, weight in made.items()}

    def acting(self, how: str | float | None) -> Mapping[str, Tensor]:
        """The lower layers of such an actor, as parameters of `distributions`."""
        return {BELOW: self._lower(how)}

    def _lower(self, how: str | float | None) -> Tensor:
        """Hidden states [N, T + 10, width] before the upper layers."""
        if how not in self._below:
            file = self._kept and self._kept / f"below {UPPER} layers, {how}, {len(self._tokens)} questions.npy"
            if file and file.exists():
                self._below[how] = torch.from_numpy(np.load(file))
            else:
                self._below[how] = self._computed(how)
                if file:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    np.save(file, self._below[how].numpy())
        return self._below[how]

    @torch.no_grad()
    def _computed(self, how: str | float | None) -> Tensor:
        body = self._model.model
        layers, norm = body.layers, body.norm
        held = dict(layers[:-UPPER].named_parameters())
        exact = {name: weight.clone() for name, weight in held.items()}
        if how is not None:
            perturb(held, how, 0)
        body.layers, body.norm = layers[:-UPPER], nn.Identity()
        branches = self._digits[:10].expand(len(self._tokens), 10)
        tokens, found = torch.cat([self._tokens.clamp(min=0), branches], 1), []
        for rows in torch.arange(len(tokens)).split(16):
            mask = torch.zeros(self._seen[rows].shape).masked_fill_(~self._seen[rows], NEVER)
            known = {"input_ids": tokens[rows], "attention_mask": mask, "position_ids": self._places}
            found.append(body(**known, use_cache=False).last_hidden_state)
        body.layers, body.norm = layers, norm
        for name, weight in exact.items():
            held[name].copy_(weight)
        return torch.cat(found)

    def tree(self, parameters: Parameters, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs of the first token [L, P, 11], and of the second behind each digit [L, P, 10, 11], of questions
        int64 [L, P]."""
        below = parameters[BELOW] if BELOW in parameters else self._lower(None)
        x, seen = below[prompts], self._seen[prompts.flatten()]
        for place in range(UPPER):
            last = slice(-11, None) if place == UPPER - 1 else slice(None)
            x = self._layer(
                {n[2:]: w for n, w in parameters.items() if n.startswith(f"{place}.")}, place, x, seen, last
            )
        logits = _normed(x, self._norm, self._eps) @ self._head.T
        first = logits[:, :, 0].index_fill(-1, torch.tensor([END]), NEVER)
        return first.log_softmax(-1), logits[:, :, 1:].log_softmax(-1)

    def _layer(self, weights: Parameters, place: int, x: Tensor, seen: Tensor, last: slice) -> Tensor:
        """One layer over x [L, P, T, width]; of its results those at the places `last`."""
        inner, outer = self._norms[place]
        h = _normed(x, inner, self._eps)
        q, k, v = (
            self._split(_product(each, weights[name])) for name, each in zip("qkv", (h[:, :, last], h, h), strict=True)
        )
        q, k = self._turned(q, last), self._turned(k, slice(None))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, :, last], enable_gqa=True)
        x = x[:, :, last]
        x = x + _product(mixed.transpose(1, 2).reshape(*x.shape[:3], -1), weights["o"])
        h = _normed(x, outer, self._eps)
        return x + _product(F.silu(_product(h, weights["gate"])) * _product(h, weights["up"]), weights["down"])

    def _split(self, x: Tensor) -> Tensor:
        """[L, P, T, heads · dim] → [L · P, heads, T, dim]."""
        return x.flatten(0, 1).unflatten(-1, (-1, self._dim)).transpose(1, 2)

    def _turned(self, x: Tensor, places: slice) -> Tensor:
        """With rotary positions."""
        low, high = x.chunk(2, -1)
        return x * self._cos[:, :, places] + torch.cat([-high, low], -1) * self._sin[:, :, places]

    def distributions(self, parameters: Parameters, prompts: Tensor, answers: Tensor) -> Tensor:
        """Logprobs of every token at each place [L, P, G, 2, 11], with gradient, of answers [L, P, G, 2] to questions
        int64 [L, P, 1]."""
        first, second = self.tree(parameters, prompts[..., 0])
        behind = answers[..., 0, None].expand(*answers.shape[:3], second.shape[-1])
        second = second.gather(2, behind)
        return torch.stack([first[:, :, None].expand(second.shape), second], 3)

    @torch.no_grad()
    def roll_out(
        self, parameters: Parameters, task: Task, draws: Any, bug: float, *, silent: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `gated.roll_out`: questions [L, P, 1], answers, behaviour logprobs [L, P, G, 2] and rewards [L, P, G]."""
        assert not bug and not silent
        prompts = (draws(task.prompts, 1) * (len(self._tokens) - self._held)).long()
        uniform = draws(task.prompts, task.samples, task.length)
        first, second = self.tree(parameters, prompts[..., 0])
        one = _drawn(first[:, :, None].expand(*uniform.shape[:3], -1), uniform[..., 0])
        behind = second.gather(2, one[..., None].expand(*one.shape, second.shape[-1]))
        two = _drawn(behind, uniform[..., 1])
        answers = torch.stack([one, two], -1)
        chosen = [first.gather(2, one), behind.gather(3, two[..., None])[..., 0]]
        rewards = (answers == self._right[prompts]).all(-1).float()
        return prompts, answers, torch.stack(chosen, -1), rewards

    @torch.no_grad()
    def held_out(self, parameters: Parameters, task: Task, draws: Any, count: int) -> list[float]:
        """Each learner's mean probability of the right answer, over at most `count` held-out questions."""
        start = len(self._tokens) - self._held
        here = torch.arange(start, start + min(count, self._held))
        learners = next(iter(parameters.values())).shape[0]
        prompts = here.expand(learners, -1)[..., None]
        right = self._right[here].expand(learners, -1, -1)[:, :, None]
        each = self.distributions(parameters, prompts, right).gather(-1, right[..., None])[..., 0]
        return each.sum(-1).exp().mean((1, 2)).tolist()


def matrices(layer: Any) -> dict[str, Tensor]:
    """A layer's matrices by short names, [out, in]."""
    attention, mlp = layer.self_attn, layer.mlp
    named = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
    named |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    return {name: each.weight for name, each in named.items()}


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _product(x: Tensor, weights: Tensor) -> Tensor:
    """x [L, P, T, in] · weights [L, in, out]."""
    return torch.bmm(x.flatten(1, 2), weights).view(*x.shape[:3], -1)


def _drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """A token of each distribution [..., V] by inverse CDF."""
    return (logprobs.exp().cumsum(-1)[..., :-1] <= uniform[..., None]).sum(-1)


def pretrained(folder: Path, kept: Path) -> Arithmetic:
    """The policy from the folder that `python -m scripts.pretrained` makes. Raises UserError, OSError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from areal_like.errors import UserError

    if not folder.exists():
        raise UserError(f"{folder} is not there: make it with python -m scripts.pretrained")
    texts, results = questions(TRAINED + HELD_OUT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = [tokenizer(f"{text} ", add_special_tokens=False)["input_ids"] for text in texts]
    ends = ["\n" if digit == END else str(digit) for digit in range(END + 1)]
    digits = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in ends]
    assert all(len(each) == 1 for each in digits), digits
    longest = max(map(len, known))
    tokens = torch.tensor([[-1] * (longest - len(each)) + each for each in known])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Arithmetic(model, tokens, torch.tensor(digits)[:, 0], results, HELD_OUT, kept)
