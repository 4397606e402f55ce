"""Models loaded by shard: the weights equal those of a whole model, which no rank ever holds."""

import pytest
import torch

from areal_like.models.causal_lm import deferred_weights, folder, handed_on, qwen2, weight_files
from tests.forked import forked, said
from tests.learners.batches import tiny_model
from tests.learners.loaded import RANDOM


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
