"""Models loaded by shard: the weights equal those of a whole model, which no rank ever holds."""

import pytest
import torch

from areal_like.models.causal_lm import deferred_weights, folder, handed_on, qwen2, weight_files
from tests.forked import forked, said
from tests.learners.batches import tiny_model
from tests.learners.loaded import RANDOM


@pytest.mark.parametrize(("kind", "ranks"), [("random", 2), ("renamed", 2), ("own names", 2), ("own names", 4)])
def test_what_ranks_load_by_shard_are_the_weights_of_a_whole_model(kind, ranks, tmp_path):
    """Rank 0 makes weights that no file has as they are. Files of several shards; rows that do not divide evenly."""
    path, model = str(tmp_path / "model"), tiny_model("llama") if ranks == 4 else qwen2(0, 300, **RANDOM)
    if kind == "renamed":
        model.save_pretrained(path, state_dict={n.removeprefix("model."): p for n, p in model.named_parameters()})
    elif kind == "own names":
        model.save_pretrained(path, max_shard_size="500KB")
    arguments = [
        [str(rank), str(ranks), str(tmp_path), "random" if kind == "random" else path] for rank in range(ranks)
    ]
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
