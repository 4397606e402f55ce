"""A learner with two or four ranks equals one with a single rank: same losses, metrics and weights, up to rounding."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from areal_like.models.causal_lm import deferred_weights, folder, handed_on, qwen2, state_of, weight_files
from learners.attestation import Attestation
from learners.collectives import Ranks
from learners.follower import follow
from learners.untrainable import Untrainable
from tests.forked import forked, said
from tests.learners.batches import assert_metrics_close, make_batch, tiny_model
from tests.learners.exact import STEPPED, SUMMED
from tests.learners.loaded import RANDOM
from tests.learners.ranked import CASES, learner_of, train, train_on
from tests.rounding import assert_rounds_alike
from tests.seeds import seeded


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return train_on(2, tmp_path_factory.mktemp("ranks"))


FOUR = ("ranks without a group", "reference", "half parameters")
"""Fewer groups than ranks; a reference; gathering in half precision."""


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return train_on(4, tmp_path_factory.mktemp("ranks"), *FOUR)


EXACT = [name for name, case in CASES.items() if case.exact]


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in ("two", "four") for name in EXACT if ranks == "two" or name in FOUR]
)
def test_ranks_give_the_losses_and_weights_of_one_and_share_its_state(ranks, name, request):
    """Computed in float64; the weights are equal as float32, in which they are published."""
    found = [rank[name] for rank in request.getfixturevalue(ranks)]
    one, first = train(CASES[name], 0, 1), found[0]
    for step, (alone, together) in enumerate(zip(one["rows"], first["rows"], strict=True)):
        assert all(rank["rows"][step] == together for rank in found), "ranks report the same"
        assert_metrics_close(together, alone, **(STEPPED if step else SUMMED))
        if CASES[name].shared:
            assert together["computed_tokens"] < 0.9 * together["backward_tokens"]
    alone, together = (each["weights"].view(torch.float32) for each in (one, first))
    torch.testing.assert_close(together, alone, rtol=torch.finfo(torch.float32).eps, atol=STEPPED["atol"])
    torch.testing.assert_close(first["adapters"], one["adapters"], **STEPPED)
    assert (sum(rank["lanes"] for rank in found) == first["whole"]).all(), "the parts that they publish are the whole"
    assert bool(one["adapters"]) is ("lora" in CASES[name].knobs)
    start = torch.from_numpy(state_of(tiny_model(CASES[name].model), "float32").buffer).view(torch.float32)
    assert (alone - start).abs().max() > 1e-3, "training has moved the weights"
    held, parts = ([rank[name] for rank in found] for name in ("held", "part"))
    assert sum(held) == pytest.approx(one["held"], abs=32) and max(held) < 1.4 * one["held"] / len(held)
    assert sum(parts) == one["part"] and max(parts) < 1.1 * one["part"] / len(parts), "none publishes the whole model"


@pytest.mark.parametrize(
    "ranks, name", [("two", "half parameters"), ("four", "half parameters"), ("two", "adapters beside half")]
)
def test_ranks_that_gather_layers_in_half_precision_are_one_that_holds_them_so(ranks, name, request):
    """The float32 step of the same loss is the truth."""
    case = CASES[name]
    one, first = train(case, 0, 1), request.getfixturevalue(ranks)[0][name]
    exact = {key: value for key, value in case.knobs.items() if key not in ("compute_dtype", "param_dtype")}
    truth = train(replace(case, knobs=exact), 0, 1)
    for of in (lambda run: run["weights"].view(torch.bfloat16).float(), lambda run: numbers(run["rows"])):
        assert_rounds_alike(of(first), of(one), of(truth))
    assert first["dtypes"] == ["torch.bfloat16"], "while they compute"


def numbers(rows: list[dict]) -> torch.Tensor:
    return torch.tensor([row[name] for row in rows for name in ("loss", "grad_norm", "kl/k1", "kl/k3")])


@pytest.mark.parametrize("ranks, name", [("two", "adapters"), ("four", "half parameters")])
def test_the_files_of_ranks_make_one_model(ranks, name, request):
    found = request.getfixturevalue(ranks)[0][name]
    one = learner_of(CASES[name], 1)
    one.load_weights(found["checkpoint"])
    state, adapters = one.saving.gathered()
    assert torch.equal(torch.from_numpy(state.buffer), found["weights"])
    assert adapters.keys() == found["adapters"].keys() and bool(adapters) is (name == "adapters")
    assert all(torch.equal(weight, found["adapters"][path]) for path, weight in adapters.items())


def test_ranks_that_have_not_met_are_refused():
    with pytest.raises(ValueError, match=r"learner.ranks is 2, but 1 processes"):
        Ranks(2)


def test_a_rank_that_does_not_come_ends_the_others_and_one_without_a_command_waits(tmp_path):
    with forked("tests.learners.late", [[str(rank), str(tmp_path)] for rank in range(3)], tmp_path) as running:
        assert [process.wait(120.0) for process in running[:2]] == [0, 0], said(tmp_path)
    for rank in range(2):
        assert "learner.collective_timeout" in (tmp_path / f"{rank}.txt").read_text()


def test_another_rank_trusts_no_batch_of_weights_that_were_not_published(tmp_path):
    """Its commands, as rank 0 would broadcast them: a false share, then its replacement."""
    asked, commands = [], iter([("train", [0, 0]), ("train", [0, 1]), ("end", "")])
    true = make_batch(seeded(0))
    lie = replace(true, groups=[replace(each, digests={3: "a lie"}) for each in true.groups])
    record = Attestation(tmp_path)
    for version, digest in {pair for each in true.groups for pair in each.digests.items()}:
        record.add(version, digest)
    learner, shares = learner_of(CASES["plain"], 1), iter([(lie, {}), (true, {})])
    learner.ranks.broadcast, learner.ranks.barrier = lambda _: next(commands), lambda: None
    client = SimpleNamespace(want_share=lambda *about: asked.append(about), batch=lambda: next(shares), redo=0)
    with pytest.raises(KeyError):
        follow(learner, None, client, None, Attestation(tmp_path, writes=False))
    assert asked == [(0, 0), (1, 0), (0, 0), (1, 0)] and learner.optimizer.steps == 1, "the lie is not trained"
    learner.ranks.gathered = lambda fault: [fault, "group 1 of another rank is made by others"]
    with pytest.raises(Untrainable, match="batch 0 can't be trained: group 1 of another rank"):
        learner.train(true)
    learner.ranks.gathered = lambda fault: [fault]
    true.samples[-1].tokens[-1] = 1000
    with pytest.raises(Untrainable, match="token 1000"):
        learner.train(true)
    assert learner.optimizer.steps == 1


@pytest.mark.parametrize("kind", ["random", "renamed", "own names"])
def test_what_ranks_load_by_shard_are_the_weights_of_a_whole_model(kind, tmp_path):
    """Rank 0 makes weights that no file has as they are. Files of several shards; rows that do not divide evenly."""
    path, model, ranks = str(tmp_path / "model"), qwen2(0, 301, **RANDOM), 2
    if kind == "renamed":
        model.save_pretrained(path, state_dict={n.removeprefix("model."): p for n, p in model.named_parameters()})
    elif kind == "own names":
        model.save_pretrained(path, max_shard_size="200KB")
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    made = "random" if kind == "random" else path
    arguments = [[str(rank), str(ranks), str(tmp_path), made] for rank in range(ranks)]
    with forked("tests.learners.loaded", arguments, tmp_path) as running:
        assert [process.wait(240.0) for process in running] == [0] * ranks, said(tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    assert all(rank[True] == rank[False] and rank[True]["row"] == found[0][True]["row"] for rank in found)


def test_a_model_without_weights_names_their_files_and_one_that_is_stored_otherwise_comes_whole(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with deferred_weights():
        made = folder(0, 13, path=str(tmp_path))
    assert {p.device.type for p in made.parameters()} == {"meta"}, "no rank ever holds the whole model"
    assert weight_files(made).keys() == dict(made.named_parameters()).keys()
    assert not weight_files(folder(0, 13, path=str(tmp_path)))
    model.save_pretrained(tmp_path, state_dict={f"other.{name}": p for name, p in model.named_parameters()})
    with deferred_weights(maker=False):
        made = folder(0, 13, path=str(tmp_path))
    assert not weight_files(made) and handed_on(made) is not None and handed_on(made).tensors is None
