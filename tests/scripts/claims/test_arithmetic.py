"""The pretrained policy of the studies off policy, against transformers' own forward pass."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.inexact import perturb
from scripts.claims.arithmetic import END, NEVER, SUMS, Arithmetic
from scripts.claims.lagging import Actor, Method, inexact, train
from scripts.claims.studies import Cell, one_by_one
from scripts.claims.tokens import Draws

RESULTS = [7, 42, 10, 0, 99, 5]
DIGITS = torch.arange(20, 31)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True)).eval()


def policy(kept=None) -> Arithmetic:
    tokens = torch.randint(1, 20, (len(RESULTS), 5), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = tokens[3, :1] = -1
    return Arithmetic(model(), tokens, DIGITS, RESULTS, 2, kept)


def own(whole: LlamaForCausalLM, tokens: torch.Tensor, digit: int) -> torch.Tensor:
    """Logprobs [2, 11] of the model's own forward pass over a question and a first digit."""
    ids = torch.cat([tokens[tokens >= 0], DIGITS[[digit]]])
    logits = whole(ids[None]).logits[0, -2:, DIGITS]
    logits[0, END] = NEVER
    return logits.log_softmax(-1)


@pytest.mark.parametrize("how", [None, "int8"])
@torch.no_grad()
def test_a_tree_has_the_distributions_of_the_whole_model(how, tmp_path) -> None:
    made, whole = policy(tmp_path), model()
    if how:
        perturb({name: w for name, w in whole.named_parameters() if ".layers." in name}, how, 0)
    prompts, digits = torch.tensor([[[0], [3], [4]]]), [2, 0, 9]
    answers = torch.tensor(digits)[None, :, None, None].expand(1, 3, 1, 2)
    for each in (made, policy(tmp_path)):  # the second reads what the first has kept
        parameters = {**inexact(each.start([0], SUMS), how, [0], 0, ()), **each.acting(how)}
        found = each.distributions(parameters, prompts, answers)[0, :, 0]
        for row, (place, digit) in enumerate(zip(prompts[0, :, 0], digits, strict=True)):
            wanted = own(whole, made._tokens[place], digit)
            torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-4)


def test_rewards_and_logprobs_are_those_of_what_was_said() -> None:
    made = policy()
    start = made.start([0, 1], SUMS)
    prompts, answers, behaviour, rewards = made.roll_out(start, replace(SUMS, samples=64), Draws([0, 1]), 0.0)
    each = made.distributions(start, prompts, answers).gather(-1, answers[..., None])[..., 0]
    torch.testing.assert_close(each, behaviour)
    said = torch.where(answers[..., 1] == END, answers[..., 0], 10 * answers[..., 0] + answers[..., 1])
    wanted = (said == torch.tensor(RESULTS)[prompts]) & ((answers[..., 0] > 0) | (answers[..., 1] == END))
    assert torch.equal(rewards.bool(), wanted) and rewards.any()
    assert int(prompts.max()) < 4 and (answers[..., 0] < END).all(), "neither held out nor without a digit"
    right = [own(model(), made._tokens[place], digits[0]) for place, digits in ((4, (9, 9)), (5, (5, END)))]
    chance = (right[0][0, 9] + right[0][1, 9]).exp() + (right[1][0, 5] + right[1][1, END]).exp()
    assert made.held_out(start, SUMS, None, 512) == pytest.approx([float(chance) / 2] * 2, rel=1e-3)


def test_it_learns_behind_an_actor_that_is_old_and_inexact() -> None:
    knobs: Mapping = {"steps": 12, "every": 12, "task": SUMS, "policy": policy()}
    methods = {"tis": Method({"name": "tis"}, 0.0)}
    (found,) = train([Cell("tis", 1e-2, 0)], methods, Actor(2, "int8"), **knobs)
    assert found["curve"][-1][3] > 1e-4, "another policy than the behaviour's"
    (still,) = train([Cell("tis", 0.0, 0)], methods, Actor(), **knobs)
    assert found["curve"][-1][2] > 1.5 * still["curve"][-1][2]


def test_cells_are_kept_one_by_one(tmp_path) -> None:
    measured = []

    def measure(cells):
        measured.extend(cells)
        return [{"reward": cell.seed / 10} for cell in cells]

    cells = [Cell("a", 1e-2, seed) for seed in (0, 1)]
    one_by_one(measure, tmp_path, {"steps": 3}, {"a": 1})(cells[:1])
    found = one_by_one(measure, tmp_path, {"steps": 3}, {"a": 1})(cells)
    assert measured == cells and [one["reward"] for one in found] == [0.0, 0.1]
    for settings, method in (({"steps": 4}, 1), ({"steps": 3}, 2)):
        one_by_one(measure, tmp_path, settings, {"a": method})(cells[:1])
    assert len(measured) == 4 and not list(tmp_path.glob("*.part"))
