"""The registry against Python itself: what it reads by `ast` must be what `inspect` sees and what a call accepts."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from areal_like.config.registry import (
    COMPONENTS,
    REQUIRED,
    ConfigError,
    bind,
    build,
    check,
    check_function,
    knobs,
    marks,
    resolve,
)
from areal_like.errors import UserError
from areal_like.wire.keys import KeysError
from areal_like.wire.link import BusError, WrongKeysError

OWN = """
raise_on_import = 1 / 0
from typing import Literal, Optional

def loss(batch, denominator, *, clip: float = 0.2, cap: "float | None" = None, kind: Literal["mask", "clamp"] = "mask"):
    pass

def positional(batch, denominator, cap=1):
    pass

class Base:
    def __init__(self, seed, *, digits: int = 4, path: str, sizes: list[int] = [1, 2], size: Optional[int] = 2 * 3):
        pass

class Inherits(Base):
    pass

class Passes(Base):
    def __init__(self, *args, extra: bool = False, **knobs):
        super().__init__(*args, **knobs)

class Holds:
    def __init__(self, *, extra: bool = False, **knobs):
        self.part = Inherits(0, **knobs)

class Anything:
    def __init__(self, **knobs):
        pass

constant = 3
"""
ELSEWHERE = """
from own_parts import Base as Renamed, loss

class Far(Renamed):
    pass
"""
SOUND = """
import functools

try:
    import own_fast_version
except ImportError:
    class Fallback:
        marked = True
        def __init__(self, first, *, second: int = 2):
            self.values = (first, second)

class Child(Fallback):
    other = True

class Unmarked(Child):
    marked = False

class Pair:
    def __init__(self, first, *, second: int, third: str = "c"):
        self.values = (first, second, third)
    async def method(self): ...

async def fetch(url, key, row): ...

def add(a, b, *, c=0):
    return a + b + c

def decorated(function):
    def inner(a, *, d: int = 4):
        return function(a, d)
    return inner

more = functools.partial(add, c=5)
later = functools.partial(Fallback, second=7)
plus = add
made = decorated(add)
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("own_parts", OWN), ("own_elsewhere", ELSEWHERE), ("own_sound", SOUND)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def refusal(kind: str, /, **spec: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(kind, spec)
    return str(error.value)


def test_checking_imports_nothing() -> None:
    check("loss", {"name": "own_parts:loss", "clip": 0.1})  # importing the module would divide by zero
    assert "own_parts" not in sys.modules


def test_defaults_are_read_from_the_source() -> None:
    assert knobs("loss", "own_parts:loss") == {"clip": 0.2, "cap": None, "kind": "mask", "correction": "none"}
    assert knobs("task", "own_parts:Base") == {"digits": 4, "path": REQUIRED, "sizes": [1, 2], "size": "2 * 3"}


@pytest.mark.parametrize("name", ["own_parts:Inherits", "own_elsewhere:Far", "own_elsewhere:Renamed"])
def test_inherited_and_imported_signatures_are_followed(name: str) -> None:
    assert knobs("task", name) == knobs("task", "own_parts:Base")


def test_an_init_that_passes_knobs_on_has_those_of_its_base_or_member() -> None:
    for name in ("own_parts:Passes", "own_parts:Holds"):
        assert set(knobs("task", name)) == {"digits", "path", "sizes", "size", "extra"}
        check("task", {"name": name, "path": "x", "extra": True})
        assert "dogits" in refusal("task", name=name, path="x", dogits=3)
    check("task", {"name": "own_parts:Anything", "whatever": 1})


def test_an_unknown_knob_is_refused_with_the_nearest_and_all() -> None:
    message = refusal("loss", name="own_parts:loss", clipp=0.1)
    assert message == (
        "loss.clipp: 'own_parts:loss' has no knob 'clipp'. Did you mean 'clip'? Its knobs: clip, cap, kind, correction"
    )


def test_a_component_of_the_users_gets_no_words_of_other_systems() -> None:
    assert "Here that is" in refusal("loss", name="ppo", beta=0.1)
    assert "Here that is" not in refusal("loss", name="own_parts:loss", beta=0.1)


def test_a_parameter_that_is_not_keyword_only_is_told_from_one_that_is_not_there() -> None:
    message = "loss.cap: 'cap' of own_parts:positional is not keyword-only: write `*, cap=1`"
    assert refusal("loss", name="own_parts:positional", cap=2) == message
    assert "has no knob 'batch'" in refusal("loss", name="own_parts:positional", batch=2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("more", {"c": 5}), ("plus", {"c": 0}), ("Fallback", {"second": 2}), ("later", {"second": 7}), ("made", {"d": 4})],
)
def test_partials_other_names_and_definitions_within_try_are_read(name: str, expected: dict[str, int]) -> None:
    assert knobs("task", f"own_sound:{name}") == expected
    assert list(keyword_only(resolve("task", f"own_sound:{name}"))) == list(expected)
    assert "no knob 'f'" in refusal("task", name=f"own_sound:{name}", f=1)


def test_a_partial_is_built_and_marked_as_what_it_binds() -> None:
    assert bind("loss", {"name": "own_sound:more"})(1, 2) == 8
    assert bind("loss", {"name": "own_sound:more", "c": 0})(1, 2) == 3
    assert build("task", {"name": "own_sound:later"}, 1).values == (1, 7)
    assert resolve("task", "own_sound:later").marked and marks("task", "own_sound:later") == {"marked"}


def test_marks_are_inherited_unless_a_class_unsets_them() -> None:
    assert marks("engine", "own_sound:Child") == {"marked", "other"}
    assert marks("engine", "own_sound:Unmarked") == {"other"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("own_parts:loss", False),
        ("own_sound:fetch", True),
        ("own_sound:more", False),
        ("operator:eq", False),
        ("math:sqrt", False),
        ("own_sound:Pair.method", True),
        ("nomod:f", "module 'nomod' cannot be found"),
        ("own_sound:fetsch", "defines no function or class 'fetsch'"),
        ("own_sound", "defines no function or class ''"),
    ],
)
def test_a_function_that_a_knob_names_is_found(path: str, expected: bool | str) -> None:
    if isinstance(expected, bool):
        assert check_function("batch_policy.key", path) is expected
    else:
        with pytest.raises(ConfigError, match=rf"policy\.key={path}: .*{expected}.* name a function as module:name"):
            check_function("batch_policy.key", path)


def test_a_missing_knob_without_default_is_refused() -> None:
    assert refusal("task", name="own_parts:Base").startswith("task.path: 'own_parts:Base' needs it")


@pytest.mark.parametrize(
    "spec",
    [
        {"clip": 1},
        {"clip": float("inf")},
        {"cap": None},
        {"cap": 2.5},
        {"kind": "clamp"},
    ],
)
def test_values_that_fit(spec: dict[str, Any]) -> None:
    check("loss", {"name": "own_parts:loss", **spec})


@pytest.mark.parametrize(
    "spec", [{"clip": "0.2"}, {"clip": None}, {"clip": True}, {"cap": "none"}, {"kind": "clamped"}]
)
def test_values_that_do_not_fit(spec: dict[str, Any]) -> None:
    knob = next(iter(spec))
    assert refusal("loss", name="own_parts:loss", **spec).startswith(f"loss.{knob}: expected ")


@pytest.mark.parametrize("spec", [{"digits": 2.0}, {"digits": True}, {"path": 3}, {"sizes": 3}, {"size": "6"}])
def test_values_of_a_class_that_do_not_fit(spec: dict[str, Any]) -> None:
    knob = next(iter(spec))
    assert refusal("task", name="own_parts:Base", **{"path": "x", **spec}).startswith(f"task.{knob}: expected ")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("loss", "decopled_ppo", "Did you mean 'decoupled_ppo'?"),
        ("loss", "own_nowhere:loss", "'own_nowhere' cannot be found"),
        ("loss", "own_parts:lost", "defines no function or class 'lost'"),
        ("loss", "own_parts:constant", "defines no function or class 'constant'"),
        ("loss", None, "is not the name of a component"),
        ("losses", "ppo", "Did you mean 'loss'?"),
    ],
)
def test_names_that_lead_nowhere(kind: str, name: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(kind, {"name": name}) if kind not in COMPONENTS else check(kind, {"name": name})
    assert words in str(error.value)


def test_building_and_binding() -> None:
    spec = OmegaConf.create({"name": "own_sound:Pair", "second": 2})
    assert build("task", spec, 1).values == (1, 2, "c")
    assert "name" in spec, "the caller's spec must stay as it was"
    assert bind("loss", {"name": "own_sound:add", "c": 3})(1, 2) == 6
    with pytest.raises(ConfigError, match="no knob 'd'"):
        bind("loss", {"name": "own_sound:add", "d": 3})


def test_a_value_that_the_component_refuses_is_the_users_error_and_no_other_is() -> None:
    """Processes that end with a UserError are not restarted."""

    def component(*ours: object, error: type[Exception]) -> None:
        raise error("what it says")

    def of_another_kind(*, error: type[Exception]) -> None: ...

    sys.modules["refusing"] = refusing = ModuleType("refusing")
    refusing.component, refusing.other = component, of_another_kind  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_like.config.registry.check", lambda kind, spec: None)
        with pytest.raises(UserError, match=r"^what it says$"):
            build("engine", {"name": "refusing:component", "error": ValueError})
        with pytest.raises(TimeoutError):
            build("engine", {"name": "refusing:component", "error": TimeoutError})
        with pytest.raises(TypeError, match=r"^what it says$"):
            build("task", {"name": "refusing:component", "error": TypeError}, 0)
        with pytest.raises(ConfigError, match=r"task=refusing:other is no task \(.*takes 0 positional arguments"):
            build("task", {"name": "refusing:other", "error": TypeError}, 0)
    del sys.modules["refusing"]
    assert issubclass(ConfigError, UserError) and issubclass(KeysError, UserError)
    assert issubclass(WrongKeysError, UserError) and not issubclass(BusError, UserError)


def test_resolving_tells_a_wrong_name_from_a_broken_module(tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("import own_not_installed\ndef loss(): pass\n")
    with pytest.raises(ModuleNotFoundError, match="own_not_installed"):
        resolve("loss", "own_broken:loss")
    with pytest.raises(ConfigError, match="cannot be found"):
        resolve("loss", "own_nowhere:loss")
    with pytest.raises(ConfigError, match="has no 'lost'"):
        resolve("loss", "own_sound:lost")


def keyword_only(component: Any) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters, including those that a class passes on with `**`."""
    parameters = inspect.signature(component).parameters.values()
    found: dict[str, inspect.Parameter] = {}
    if inspect.isclass(component) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        passed_on = {"TorchLearner": (getattr(inspect.getmodule(component), "Objective", None),)}
        for each in reversed(passed_on.get(component.__name__, component.__bases__)):
            found |= keyword_only(each)
    return found | {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in COMPONENTS.items() for name in names])
def test_every_registered_component_is_there_and_read_rightly(kind: str, name: str) -> None:
    """The knobs read from the source are the keyword-only parameters that Python sees, with the same defaults."""
    seen, read = keyword_only(resolve(kind, name)), knobs(kind, name)
    if kind == "loss":
        assert read.pop("correction") in COMPONENTS["correction"]
    assert list(read) == list(seen)
    for knob, parameter in seen.items():
        assert read[knob] == parameter.default or isinstance(read[knob], str)
    fitting = {"str": "x", "float": 1.0, "int": 1, "Mapping[str, Any]": {"name": "tools"}, "str | Sequence[str]": "a:b"}
    fitting["Mapping[str, str | Mapping[str, object]]"] = {"sums": "arithmetic"}
    required = {knob: fitting[seen[knob].annotation] for knob, default in read.items() if default is REQUIRED}
    check(kind, {"name": name, **required})


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("tools", r"workflow.environment: expected Mapping"),
        ({"name": "toolz"}, r"workflow.environment.name: there is no environment 'toolz'. Did you mean 'tools'"),
        ({"name": "tools", "credits": 1}, r"workflow.environment.credits: 'tools' has no knob 'credits'"),
    ],
)
def test_a_component_within_a_component_is_checked_as_well(environment: Any, told: str) -> None:
    check("workflow", {"name": "multi_turn", "environment": {"name": "tools", "turn_reward": 0.25}})
    with pytest.raises(ConfigError, match=told):
        check("workflow", {"name": "multi_turn", "environment": environment})
