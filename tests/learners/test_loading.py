"""Models loaded by shard from a folder: the weights equal those of a whole model, which no rank ever holds."""

import pytest
import torch

from areal_like.models.causal_lm import deferred_weights, folder, handed_on, qwen2, weight_files
from tests.forked import forked, said
from tests.learners.batches import tiny_model
from tests.learners.loaded import RANDOM


@pytest.mark.parametrize("renamed", [False, True], ids=["random", "renamed"])
def test_weights_that_no_file_has_as_they_are_come_from_rank_0(renamed, tmp_path):
    """Bit for bit those of whole models. Rank 0 has them once in main memory, other ranks one tensor at a time."""
    path, model = "random", qwen2(0, 300, **RANDOM)
    if renamed:
        path = str(tmp_path / "model")
        model.save_pretrained(path, state_dict={n.removeprefix("model."): p for n, p in model.named_parameters()})
    arguments = [[str(rank), "2", str(tmp_path), path] for rank in range(2)]
    with forked("tests.learners.loaded", arguments, tmp_path) as running:
        assert [process.wait(240.0) for process in running] == [0, 0], said(tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert all(
        rank[True]["row"] == rank[False]["row"] and rank[True]["start"] == rank[False]["start"] for rank in found
    )
    assert found[0][True]["digest"] == found[0][False]["digest"]
    sizes = [4 * p.numel() for p in model.parameters()]
    whole, largest = sum(sizes), max(sizes)
    assert found[1][True]["peak"] < whole / 2 + 2 * largest, (found[1][True]["peak"], whole, largest)
    assert found[0][True]["peak"] < 1.5 * whole + 2 * largest


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_own_shards_alone(ranks, tmp_path):
    """Two and four ranks; rows that do not divide evenly, and a tied embedding. A rank has its shards, and beside them
    the rows of one tensor."""
    model = tiny_model("llama")
    if ranks == 2:
        model = qwen2(0, 300, hidden_size=64, num_hidden_layers=8, num_attention_heads=2, intermediate_size=128)
    model.save_pretrained(tmp_path / "model", max_shard_size="500KB")
    arguments = [[str(rank), str(ranks), str(tmp_path), str(tmp_path / "model")] for rank in range(ranks)]
    with forked("tests.learners.loaded", arguments, tmp_path) as running:
        codes = [process.wait(240.0) for process in running]
        assert codes == [0] * ranks, said(tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    assert all(rank[True]["row"] == rank[False]["row"] == found[0][True]["row"] for rank in found)
    assert all(rank[True]["start"] == rank[False]["start"] for rank in found)
    assert found[0][True]["digest"] == found[0][False]["digest"]
    if ranks == 2:
        sizes = [4 * p.numel() for p in model.parameters()]
        whole, largest = sum(sizes), max(sizes)
        assert all(rank[True]["peak"] < whole / 2 + 2 * largest for rank in found)
        assert all(4 * rank[False]["held"] == whole and rank[True]["held"] == 0 for rank in found)


def test_a_model_without_weights_names_their_files_and_one_that_is_stored_otherwise_comes_whole(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with deferred_weights():
        made = folder(0, 13, path=str(tmp_path))
    assert {p.device.type for p in made.parameters()} == {"meta"}
    assert weight_files(made).keys() == dict(made.named_parameters()).keys()
    assert not weight_files(folder(0, 13, path=str(tmp_path)))
    model.save_pretrained(tmp_path, state_dict={f"other.{name}": p for name, p in model.named_parameters()})
    with deferred_weights(maker=False):
        made = folder(0, 13, path=str(tmp_path))
    assert not weight_files(made) and handed_on(made) is not None and handed_on(made).tensors is None
