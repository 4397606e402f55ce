"""One of two processes that share a model by tensor parallelism: `python -m tests.actors.sglang_ranks RANK FOLDER`."""

import asyncio
import base64
import dataclasses
import pickle
import sys

import pytest
import torch
from torch import nn

from actors.engines import sglang_loader, sglang_patch, sglang_weights
from actors.engines.sglang_shared import SharedCopy
from areal_like.models.causal_lm import tensors_of
from areal_like.weights.state import TensorSpec
from areal_like.weights.update import Update
from tests.actors.test_sglang_loader import SPECS, Fused, changed, patch_between, random_state

ODD = [*SPECS, TensorSpec("odd", "bfloat16", (3, 6)), TensorSpec("rows", "bfloat16", (4096, 8))]


class Rank(Fused):
    """One of two ranks: `odd` is cut between columns 3 and 4, in the middle of a word; `rows` is cut in half."""

    def __init__(self, rank):
        super().__init__(rank)
        self.odd, self.rows = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(2048, 8, dtype=torch.bfloat16))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "odd":
                self.odd.data.copy_(tensor.narrow(1, 3 * self.rank, 3))
            elif name == "rows":
                self.rows.data.copy_(tensor.narrow(0, 2048 * self.rank, 2048))
            else:
                super().load_weights([(name, tensor)])


class Joined:
    """The two ranks as a server that runs elsewhere: each reads only what is meant for it, and answers."""

    is_ours, ranks, name = False, 2, "joined"

    def __init__(self, rank):
        self.rank, self.model, self.read = rank, Rank(rank), 0

    async def post(self, path, body, extra=0.0):
        payload = base64.b64decode(body["serialized_named_tensors"][self.rank])
        self.read += len(payload)
        updater = type("Updater", (), {"__module__": __name__, "get_model": lambda _: self.model})()
        message = {"named_tensors": pickle.loads(payload), "load_format": body["load_format"]}
        success, message = sglang_loader.answered(pytest.fail, updater, **message)
        assert success, message
        return {"success": True, "message": message}


def follow_slices(rank, group, state):
    """All weights, then a patch: half of the bytes reach each rank, and both confirm the digest of the whole."""
    sglang_loader._group, sglang_weights.BUCKET_BYTES = lambda: group, 20_000
    server, held = Joined(rank), SharedCopy(state, {})
    held.digest = state.digest()
    assert asyncio.run(sglang_weights._send_all(server, held))
    assert state.nbytes / 2 < server.read < 0.6 * state.nbytes + 10_000
    latest = changed(state, 0.2, 11)
    patch = held.advance(Update(1, latest.digest(), latest), True)
    server.read = 0
    message = sglang_weights._Message(server, patch).payload
    asyncio.run(sglang_weights._patch(server, message, held.state, held.digest))
    assert patch.nbytes / 2 < server.read < 0.5 * patch.nbytes + 2000
    held.close()


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    group, reduced = torch.distributed.group.WORLD, []
    all_reduce = torch.distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counted
    sglang_loader.SPARSE = 2.0
    model, held = Rank(rank), None
    for seed, share in enumerate([1, 0.1, 0.5, 0.01]):
        state = random_state(0, ODD) if held is None else changed(held, share, seed)
        reduced.clear()
        assert sglang_loader.apply(model, patch_between(held, state, sweep=seed != 3), group) == state.digest()
        assert 0 < sum(reduced) <= 1024
        held = state
    loaded = Rank(rank)
    loaded.load_weights(tensors_of(held))
    for mine, right in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, right)
    probe = sglang_patch.read(sglang_patch.digest_probe(held, held.digest()))
    for name in ("norm", "odd") if rank else ("norm", ""):  # both have `norm`; of `odd` each has a part
        before = [each.clone() for each in model.parameters()]
        if rank and name:
            getattr(model, name).data.flatten()[3] *= 2
        with pytest.raises(sglang_loader.LoaderError, match="copies .* differ: norm" if name == "norm" else "digest"):
            sglang_loader.apply(model, probe, group)
        for each, old in zip(model.parameters(), before, strict=True):
            each.data.copy_(old)
    change = sglang_patch.read(sglang_patch.write(changed(held, 0.1, 9), "d", held))
    if rank:
        change.changes[0] = dataclasses.replace(change.changes[0], bits=change.changes[0].bits[:1])  # fits nowhere
    with pytest.raises(sglang_loader.LoaderError):
        sglang_loader.apply(model, change, group)
    assert sglang_loader.apply(model, patch_between(None, held), group) == held.digest()
    follow_slices(rank, group, held)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
