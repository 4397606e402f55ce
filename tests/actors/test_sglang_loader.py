"""The loader inside SGLang servers, on models that fuse, split, rebind or derive weights: what it applies."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from actors.engines import sglang_boxes, sglang_digest, sglang_loader, sglang_patch
from areal_like.models.causal_lm import tensors_of
from areal_like.weights.digest import lanes_of
from areal_like.weights.state import State, TensorSpec
from tests.forked import forked, said

SPECS = [
    TensorSpec("q", "bfloat16", (6, 5)),
    TensorSpec("k", "bfloat16", (3, 5)),
    TensorSpec("o", "float32", (4, 8)),
    TensorSpec("norm", "bfloat16", (5,)),
]


def random_state(seed, specs=SPECS):
    state, random = State(specs), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(state):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return state


def changed(state, share, seed=0):
    """A copy with about this share of the elements changed."""
    other, random = State(state.specs, state.buffer.copy()), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(other):
        tensor[torch.rand(tensor.shape, generator=random) < share] *= 1.5
    return other


class Fused(nn.Module):
    """A model as rank `rank` of two holds it: q and k in one padded parameter, and half of the columns of `o`."""

    def __init__(self, rank=None, dtype=torch.float32, broken="", columns=8):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 5, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(4, columns if rank is None else 4, dtype=torch.float32))
        self.norm = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.rank, self.broken = rank, broken

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.broken == "values" and tensor.sum().item() > 0:
                continue
            if self.broken == "transposed" and name == "q":
                tensor = tensor.t().contiguous().t()
            if self.broken == "missing" and name == "norm":
                continue
            target = {"q": self.qk.data[:6], "k": self.qk.data[6:9], "o": self.o.data, "norm": self.norm.data}[name]
            if name == "o" and self.rank is not None:
                tensor = tensor.narrow(1, 4 * self.rank, 4)
            target.copy_(tensor)


def patch_between(base, state, sweep=True):
    return sglang_patch.read(sglang_patch.write(state, state.digest(), base, sweep=sweep))


@pytest.mark.parametrize("sweep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_bring_fused_parameters_to_just_the_published_bits(dtype, sweep, monkeypatch):
    monkeypatch.setattr(sglang_loader, "SPARSE", 2.0)
    model, loaded = Fused(dtype=dtype), Fused(dtype=dtype)
    held = None
    for seed, share in enumerate([1, 0.1, 0.03, 0.5, 0]):
        state = random_state(0) if held is None else changed(held, share, seed)
        assert sglang_loader.apply(model, patch_between(held, state, sweep)) == state.digest()
        loaded.load_weights(list(tensors_of(state)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name
        held = state
    assert not model.qk[9:].any(), "what is padding stays as it is"


def test_a_rank_alone_is_missed_the_other():
    state = random_state(0)
    with pytest.raises(sglang_loader.LoaderError, match="o: not all of it is stored"):
        sglang_loader.apply(Fused(rank=0), patch_between(None, state))


@pytest.mark.slow
def test_two_ranks_digest_their_own_parts_and_exchange_a_few_bytes(tmp_path):
    """A patch reaches the rank that holds the place. Both ranks find copies that differ, a wrong part, and a failed
    rank."""
    arguments = [[str(rank), str(tmp_path)] for rank in range(2)]
    with forked("tests.actors.sglang_ranks", arguments, tmp_path) as running:
        assert [process.wait(120.0) for process in running] == [0, 0], said(tmp_path)


def peak_of(function):
    """The most bytes that torch had allocated, above what was there at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("share", [None, 0.02])
def test_temporaries_do_not_grow_with_the_weights(share, monkeypatch):
    """Temporaries take a fixed number of bytes per element of a stride; for the largest tensor at once they would be 60
    times this limit."""
    specs = [TensorSpec("q", "bfloat16", (1 << 15, 64)), TensorSpec("k", "bfloat16", (64, 64))]

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Parameter(torch.zeros(1 << 15, 64)), nn.Parameter(torch.zeros(64, 64))

        def load_weights(self, weights):
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    stride, places, limit = sglang_boxes.STRIDE, sglang_loader.PLACES, 256 << 20
    monkeypatch.setattr(sglang_boxes, "STRIDE", stride >> 7)
    monkeypatch.setattr(sglang_loader, "PLACES", places >> 7)
    monkeypatch.setattr(sglang_loader, "SPARSE", 2.0)
    model, state = Large(), random_state(0, specs)
    sglang_loader.apply(model, patch_between(None, state))
    target = changed(state, share or 1, 1)
    patch = patch_between(None if share is None else state, target, sweep=share is None)
    assert peak_of(lambda: sglang_loader.apply(model, patch)) < limit >> 7
    assert sglang_loader.apply(model, patch) == target.digest()


def test_a_small_patch_costs_by_what_it_changes(monkeypatch):
    """It reads no other words, unless a sweep is due."""
    state = random_state(0)
    later, model = changed(state, 0.1), Fused()
    sglang_loader.apply(model, patch_between(None, state))
    read = []
    words = sglang_boxes.Box.words
    monkeypatch.setattr(sglang_boxes.Box, "words", lambda box, *args: read.append(box.count) or words(box, *args))
    monkeypatch.setattr(sglang_loader, "SPARSE", 2.0)
    assert sglang_loader.apply(model, patch_between(state, later, sweep=False)) == later.digest()
    assert sum(read) <= 2 * 5, "norm came whole"
    monkeypatch.setattr(sglang_loader, "SPARSE", 0.01)  # not worth it for so many changes
    assert sglang_loader.apply(model, patch_between(state, later, sweep=False)) == later.digest()
    assert sglang_loader.apply(model, patch_between(later, later)) == later.digest()
    assert sum(read) >= sum(spec.count for spec in SPECS)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_wrong_weights_are_told_of(share):
    """A patch made for other weights than those held; a parameter that was changed in between."""
    state = random_state(0)
    model = Fused()
    sglang_loader.apply(model, patch_between(None, state))
    later = changed(state, share)
    latest = changed(later, 0.1, 1)
    with pytest.raises(sglang_loader.LoaderError, match="the weights have the digest"):
        sglang_loader.apply(model, patch_between(later, latest))
    sglang_loader.apply(model, patch_between(None, latest))
    model.norm.data[3] += 2.0**-30  # rounds to the same published bits
    with pytest.raises(sglang_loader.LoaderError, match="norm"):
        sglang_loader.apply(model, sglang_patch.read(sglang_patch.digest_probe(latest, latest.digest())))


@pytest.mark.parametrize("broken", ["values", "transposed", "missing"])
def test_a_model_that_stores_otherwise_is_left_to_its_own_loader(broken, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    answer = sglang_loader.answered(
        lambda *args, **kwargs: pytest.fail("not for SGLang's own loader"),
        type("Updater", (), {"get_model": lambda self: Fused(broken=broken)})(),
        named_tensors=[("p", torch.from_numpy(sglang_patch.write(random_state(0), random_state(0).digest(), None)))],
        load_format=sglang_loader.LOAD_FORMAT,
    )
    assert answer[0] is False
    assert ("LoaderUnable" in answer[1]) == (broken != "missing")


class Rebinding(Fused):
    """Moves a parameter to other memory after an update, as SGLang does for some kernels."""

    def rebind(self):
        self.norm.data = self.norm.data.clone()


def test_a_parameter_that_is_bound_to_other_memory_gets_the_next_patch_too():
    """Otherwise the patch goes into memory that nobody uses any more, and its digest confirms it."""
    states = [random_state(0)]
    model = Rebinding()
    sglang_loader.apply(model, patch_between(None, states[0]))
    states.append(changed(states[0], 0.3))
    model.rebind()
    assert sglang_loader.apply(model, patch_between(*states)) == states[1].digest()
    assert torch.equal(model.norm.data, dict(tensors_of(states[1]))["norm"].float())


class Derived(Fused):
    """Keeps a weight that it computes from others, like SGLang's models with latent attention."""

    spoils = False

    def post_load_weights(self):
        self.twice = 2 * self.norm.data
        self.o.data[0, 0] += self.spoils


@pytest.mark.parametrize("sweep", [True, False])
def test_what_a_model_derives_from_its_weights_follows_each_patch(sweep, monkeypatch):
    monkeypatch.setattr(sglang_loader, "SPARSE", 2.0)
    model, held = Derived(), None
    for seed, share in enumerate([1, 0.3, 0.1]):
        state = random_state(0) if held is None else changed(held, share, seed)
        assert sglang_loader.apply(model, patch_between(held, state, sweep)) == state.digest()
        assert torch.equal(model.twice, 2 * dict(tensors_of(state))["norm"].float())
        held = state
    model.twice = None
    sglang_loader.apply(model, sglang_patch.read(sglang_patch.digest_probe(held, held.digest())))
    assert model.twice is None, "a question changes nothing"
    model.spoils = True
    with pytest.raises(sglang_loader.LoaderError, match="the weights have the digest"):
        sglang_loader.apply(model, patch_between(held, changed(held, 0.1, 9)))


class Aside(Fused):
    """Moves a tensor into memory that belongs to no parameter."""

    def __init__(self):
        super().__init__()
        self.aside = torch.zeros(5)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.aside.copy_(tensor) if name == "norm" else super().load_weights([(name, tensor)])


def answer_of(model, patch, **more):
    """The answer of a server with this model to a patch (uint8, or its parts)."""
    own = {"get_model": lambda self: model, **more}
    return sglang_loader.answered(
        lambda *args, **kwargs: pytest.fail("not for SGLang's own loader"),
        type("Updater", (), {"__module__": __name__, **own})(),
        named_tensors=[("p", torch.from_numpy(patch))],
        load_format=sglang_loader.LOAD_FORMAT,
    )


def inactive(self, what):
    raise RuntimeError(f"{what}: the weight cache is active")


@pytest.mark.parametrize(
    ("model", "more", "why"),
    [
        (Fused(broken="missing"), {}, "LoaderRefused: norm: SGLang's model has no place"),
        (Fused(), {"_assert_weight_cache_inactive": inactive}, "LoaderRefused: update_weights_from_tensor: the weight"),
        (Aside(), {}, "LoaderUnable: norm: the model's loader puts it elsewhere"),
    ],
    ids=["unknown name", "SGLang's own", "aside"],
)
def test_what_can_not_be_followed_is_never_confirmed(model, more, why, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    state = random_state(0)
    success, said = answer_of(model, sglang_patch.write(state, state.digest(), None), **more)
    assert not success and said.startswith(why)


def test_an_answer_says_whether_all_weights_were_looked_at(monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)
    monkeypatch.setattr(sglang_loader, "SPARSE", 2.0)
    model, states = Fused(), [random_state(0)]
    said = [answer_of(model, sglang_patch.write(states[0], states[0].digest(), None, sweep=False))]
    for sweep in (False, True, False):
        states.append(changed(states[-1], 0.1, len(states)))
        said.append(answer_of(model, sglang_patch.write(states[-1], states[-1].digest(), states[-2], sweep=sweep)))
    assert [success for success, _ in said] == [True] * 4
    assert [text.endswith(sglang_loader.SWEPT) for _, text in said] == [True, False, True, False]
    assert [text.removesuffix(sglang_loader.SWEPT) for _, text in said] == [
        sglang_loader.APPLIED + state.digest() for state in states
    ]


def test_a_server_that_holds_other_weights_than_it_is_asked_for_is_no_error(monkeypatch, caplog):
    """Each server is asked at its start, and SGLang logs every failure as an error."""
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)
    state = random_state(0)
    success, said = answer_of(Fused(), sglang_patch.digest_probe(state, state.digest()))
    assert success and not said.startswith(sglang_loader.APPLIED)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_failures_of_the_servers_own_loader_are_answers_too():
    def original(updater, *, named_tensors, load_format=None):
        raise KeyError("no such tensor")

    assert sglang_loader.answered(original, None, named_tensors=[]) == (False, "KeyError: 'no such tensor'")
    assert sglang_loader.answered(lambda *args, **kwargs: (True, "fine"), None, named_tensors=[]) == (True, "fine")


def test_without_the_plugin_the_loader_raises_nothing(caplog):
    sglang_loader.load(Fused(), [("p", torch.zeros(16, dtype=torch.uint8))])
    assert "not applied" in caplog.text


def test_lanes_are_those_of_the_published_digest():
    words = np.random.default_rng(0).integers(0, 1 << 64, 1000, dtype=np.uint64)
    found = sglang_digest.lanes_of(torch.from_numpy(words.view(np.int64)), torch.arange(77, 1077))
    assert np.array_equal(found.numpy().view(np.uint64), lanes_of(words, 77))
