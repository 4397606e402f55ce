"""Models loaded by shard from a folder: the weights equal those of a whole model, which no rank ever holds."""

import pytest
import torch

from areal_like.models import deferred_weights, folder, qwen2, weight_files
from tests.forked import forked, said
from tests.learners.batches import tiny_model


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
    with deferred_weights():
        assert not weight_files(folder(0, 13, path=str(tmp_path)))
