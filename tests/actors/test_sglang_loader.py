"""The loader inside SGLang servers, on models that fuse, cut up, rebind, derive: what it applies, what it confirms."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from actors.engines import sglang_loader, sglang_patch
from areal_like.models import tensors_of
from areal_like.weights.digest import lanes_of
from areal_like.weights.state import State, TensorSpec

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
    """A copy in which about this share of the elements is another."""
    other, random = State(state.specs, state.buffer.copy()), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(other):
        tensor[torch.rand(tensor.shape, generator=random) < share] *= 1.5
    return other


class Fused(nn.Module):
    """Stores q and k in one parameter, pads it, and of `o` only half of the columns: as rank `rank` of two would."""

    def __init__(self, rank=None, dtype=torch.float32, broken=""):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 5, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(4, 8 if rank is None else 4, dtype=torch.float32))
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


def patch_between(base, state):
    return sglang_patch.read(sglang_patch.write(state, state.digest(), base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_bring_fused_parameters_to_just_the_published_bits(dtype):
    model, loaded = Fused(dtype=dtype), Fused(dtype=dtype)
    held = None
    for seed, share in enumerate([1, 0.1, 0.03, 0.5, 0]):
        state = random_state(0) if held is None else changed(held, share, seed)
        assert sglang_loader.apply(model, patch_between(held, state)) == state.digest()
        loaded.load_weights(list(tensors_of(state)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name
        held = state
    assert not model.qk[9:].any(), "what is padding stays as it is"


def test_a_rank_takes_its_part_of_a_patch():
    """Dense and scattered alike; its digest alone can't be right: the other rank has the rest."""
    first, second = random_state(0), changed(random_state(0), 0.2)
    for rank in (0, 1):
        model = Fused(rank)
        places = sglang_loader.ParameterMap(model, SPECS)
        for patch in (patch_between(None, first), patch_between(first, second)):
            for piece in patch.changes:
                places.apply(piece)
        whole = dict(tensors_of(second))
        assert torch.equal(model.o, whole["o"][:, 4 * rank : 4 * rank + 4])
        assert torch.equal(model.qk[:6], whole["q"].float())
        with pytest.raises(sglang_loader.LoaderError, match="o: not all of it is stored"):
            places.digest()


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_wrong_weights_are_told_of(share):
    """A patch for other weights than those that are there; a parameter that has been changed meanwhile."""
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
    """As SGLang does for some kernels, it moves a parameter to other memory after an update."""

    def rebind(self):
        self.norm.data = self.norm.data.clone()


def test_a_parameter_that_is_bound_to_other_memory_gets_the_next_patch_too():
    """Else the patch goes into memory that nobody uses any more, and its digest confirms it."""
    states = [random_state(0)]
    model = Rebinding()
    sglang_loader.apply(model, patch_between(None, states[0]))
    states.append(changed(states[0], 0.3))
    model.rebind()
    assert sglang_loader.apply(model, patch_between(*states)) == states[1].digest()
    assert torch.equal(model.norm.data, dict(tensors_of(states[1]))["norm"].float())


class Derived(Fused):
    """Keeps a weight that it computes from others, as SGLang's models with latent attention do."""

    def post_load_weights(self):
        self.twice = 2 * self.norm.data


class Aside(Fused):
    """Puts a tensor into memory that is no parameter's."""

    def __init__(self):
        super().__init__()
        self.aside = torch.zeros(5)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.aside.copy_(tensor) if name == "norm" else super().load_weights([(name, tensor)])


def answer_of(model, patch, **more):
    """What a server with this model says to a patch (uint8, or its parts)."""
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
        (Derived(), {}, "LoaderRefused: Derived computes further weights"),
        (Fused(broken="missing"), {}, "LoaderRefused: norm: SGLang's model has no place"),
        (Fused(), {"_assert_weight_cache_inactive": inactive}, "LoaderRefused: update_weights_from_tensor: the weight"),
        (Aside(), {}, "LoaderUnable: norm: the model's loader puts it elsewhere"),
    ],
    ids=["derived", "unknown name", "SGLang's own", "aside"],
)
def test_what_can_not_be_followed_is_never_confirmed(model, more, why, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    state = random_state(0)
    success, said = answer_of(model, sglang_patch.write(state, state.digest(), None), **more)
    assert not success and said.startswith(why)


def test_a_server_that_holds_other_weights_than_it_is_asked_for_is_no_error(monkeypatch, caplog):
    """Each server is asked at its start; SGLang logs what fails as an error."""
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
    found = sglang_loader.lanes_of(torch.from_numpy(words.view(np.int64)), 77).numpy().view(np.uint64)
    assert np.array_equal(found, lanes_of(words, 77))
