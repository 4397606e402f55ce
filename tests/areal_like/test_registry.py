"""The registry against Python itself: the knobs read from source are those of `inspect`, and of a call."""

import inspect
import sys
from pathlib import Path
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

OWN_SOURCE = """
raise_on_import = 1 / 0
from typing import Literal

def loss(batch, denominator, *, clip: float = 0.2, cap: "float | None" = None, kind: Literal["mask", "clamp"] = "mask"):
    pass

class Base:
    def __init__(self, seed, *, digits: int = 4, path: str, sizes: list[int] = [1, 2], size: int = 2 * 3): pass
class Inherits(Base): pass
class Passes(Base):
    def __init__(self, *args, digits: int = 5, **knobs): super().__init__(*args, **knobs)
class Holds:
    def __init__(self, *, digits: int = 5, **knobs): self.part = Inherits(0, **knobs)
"""
OWN_MODULE = """
import functools
try:
    import own_fast_version
except ImportError:
    class Fallback:
        marked = True
        def __init__(self, first, *, second: int = 2): self.values = (first, second)

class Unmarked(Fallback):
    marked = False
    other = True
class Pair:
    def __init__(self, first, *, second: int, third: str = "c"): self.values = (first, second, third)
    async def method(self): ...

def add(a, b=1, *, c=0): return a + b + c
def refuse(*_, error): raise error("the component's own words")
async def fetch(url): ...

more = functools.partial(add, c=5)
later = functools.partial(Fallback, second=7)
plus = add
"""
ELSEWHERE = "from own_source import Base as Renamed\n\nclass Far(Renamed):\n    pass\n"
BROKEN = "import own_not_installed\ndef loss(): pass\n"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"own_source": OWN_SOURCE, "own_elsewhere": ELSEWHERE, "own_module": OWN_MODULE, "own_broken": BROKEN}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


OF_BASE = {"digits": 4, "path": REQUIRED, "sizes": [1, 2], "size": "2 * 3"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_source:Inherits", OF_BASE),
        ("own_elsewhere:Far", OF_BASE),
        ("own_source:Passes", OF_BASE | {"digits": 5}),
        ("own_source:Holds", OF_BASE | {"digits": 5}),
        ("own_source:loss", {"clip": 0.2, "cap": None, "kind": "mask"}),
        ("own_module:Fallback", {"second": 2}),
        ("own_module:more", {"c": 5}),
        ("own_module:plus", {"c": 0}),
        ("own_module:later", {"second": 7}),
    ],
)
def test_knobs_are_read_from_the_source(name: str, expected: dict[str, object]) -> None:
    assert knobs("task", name) == expected
    assert "own_source" not in sys.modules, "importing it divides by zero"


def keyword_only(component: Any) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters, including those that a class passes on with `**`."""
    parameters = inspect.signature(component).parameters.values()
    found: dict[str, inspect.Parameter] = {}
    if inspect.isclass(component) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        passed_on = {"TorchLearner": (getattr(inspect.getmodule(component), "Objective", None),)}
        for each in reversed(passed_on.get(component.__name__, component.__bases__)):
            found |= keyword_only(each)
    return found | {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", COMPONENTS)
def test_every_registered_component_has_the_knobs_that_python_sees(kind: str) -> None:
    for name in COMPONENTS[kind]:
        seen, read = keyword_only(resolve(kind, name)), knobs(kind, name)
        if kind == "loss":
            assert read.pop("correction") in COMPONENTS["correction"]
        assert list(read) == list(seen), name
        assert all(read[knob] == p.default or isinstance(read[knob], str) for knob, p in seen.items()), name


REFUSED: list[tuple[str, str, dict[str, object]]] = [
    *[("loss.clip", "own_source:loss", {"clip": value}) for value in ("0.2", None, True, float("nan"))],
    ("loss.cap", "own_source:loss", {"cap": "none"}),
    ("loss.kind", "own_source:loss", {"kind": "clamped"}),
    ("loss.clipp", "own_source:loss", {"clipp": 0.1}),
    ("loss.b", "own_module:add", {"b": 1}),
    ("loss.path", "own_source:Base", {}),
    *[("loss.digits", "own_source:Base", {"path": "x", "digits": value}) for value in (2.0, True)],
    ("loss.sizes", "own_source:Base", {"path": "x", "sizes": 3}),
    ("loss.dogits", "own_source:Passes", {"path": "x", "dogits": 3}),
    *[("loss.name", name, {}) for name in ("decopled_ppo", "own_nowhere:loss", "own_source:lost")],
]


@pytest.mark.parametrize(("key", "name", "values"), REFUSED)
def test_a_knob_or_name_that_does_not_fit_is_refused_with_its_key(key: str, name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        check("loss", {"name": name, **values})
    assert error.value.key == key and str(error.value).startswith(f"{key}: ")
    for fitting in ({"clip": 1}, {"clip": float("inf")}, {"cap": None}, {"cap": 2.5}, {"kind": "clamp"}):
        check("loss", {"name": "own_source:loss", **fitting})


FUNCTIONS = {"own_source:loss": False, "own_module:fetch": True, "own_module:Pair.method": True, "math:sqrt": False}


def test_a_function_that_a_knob_names_is_found() -> None:
    assert {path: check_function("policy.key", path) for path in FUNCTIONS} == FUNCTIONS
    for path in ("nomod:f", "own_module:fetsch", "own_module"):
        with pytest.raises(ConfigError, match=rf"^policy\.key={path}: "):
            check_function("policy.key", path)


def test_building_and_binding() -> None:
    spec = OmegaConf.create({"name": "own_module:Pair", "second": 2})
    assert build("task", spec, 1).values == (1, 2, "c")
    assert "name" in spec, "the caller's spec must stay as it was"
    assert build("task", {"name": "own_module:later"}, 1).values == (1, 7)
    assert bind("loss", {"name": "own_module:more"})(1, 2) == 8
    assert bind("loss", {"name": "own_module:more", "c": 3})(1, 2) == 6
    assert marks("engine", "own_module:Unmarked") == {"other"}, "marks are inherited, unless a class unsets them"
    assert resolve("task", "own_module:later").marked and marks("task", "own_module:later") == {"marked"}


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError, UserError), (TimeoutError, TimeoutError), (TypeError, TypeError)]
)
def test_a_value_that_the_component_refuses_is_the_users_error(error: type, raised: type) -> None:
    """Processes that end with a UserError are not restarted. A TypeError of the component's body is its own."""
    with pytest.raises(raised, match="own words"):
        build("engine", {"name": "own_module:refuse", "error": error})
    with pytest.raises(ConfigError, match="engine=own_module:fetch"):
        build("engine", {"name": "own_module:fetch"})


def test_resolving_separates_a_wrong_name_from_a_broken_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="own_not_installed"):
        resolve("loss", "own_broken:loss")
    for name in ("own_nowhere:loss", "own_module:lost"):
        with pytest.raises(ConfigError):
            resolve("loss", name)
