"""Items of reasoning_gym's data sets, and the scores of answers: the side that imports the package.

An item follows from (data set, config, index), so only these travel, and the verifier's process makes the item again.
"""

import ast
import dataclasses
import json
from functools import lru_cache
from typing import Literal

from reasoning_gym import utils
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from areal_like.config.registry import nearest
from areal_like.tasks.maths import behind_thoughts

SIZE = 1_000_000
SIZES = {"acre": 1000, "word_ladder": 20_000}
"""Items of data sets that make all of them at once, or refuse more. A config may set another `size`."""
UNSTEADY = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Data sets whose items depend on the order of Python's sets, which each process draws anew."""


@lru_cache(maxsize=64)
def dataset(name: str, config: str) -> ProceduralDataset:
    """`config` is JSON text. Raises ValueError for an unknown data set or key, and for values that it refuses."""
    if name not in DATASETS:
        raise ValueError(f"reasoning_gym has no data set {name!r}.{nearest(name, DATASETS)}")
    if name in UNSTEADY:
        raise ValueError(f"the data set {name!r} follows the order of Python's sets, which differs between processes")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed"}
    values = {"size": SIZES.get(name, SIZE)} | json.loads(config)
    if unknown := [key for key in values if key not in known]:
        hint = f"{nearest(unknown[0], known)} It has {', '.join(sorted(known))}"
        raise ValueError(f"the data set {name!r} has no key {unknown[0]!r}.{hint}")
    try:
        return create_dataset(name, seed=0, **values)
    except (AssertionError, TypeError, ValueError) as error:  # its own checks are assertions
        raise ValueError(f"the data set {name!r} refuses {json.loads(config)}: {error}") from error


_NAMES = "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs abs"
FUNCTIONS = frozenset(_NAMES.split(" "))
"""Functions that a formula may call."""
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def cannot_call(text: str) -> bool:
    """A literal, as in `[["Q", "_"], ["_", "Q"]]`, or text in which nothing can be called."""
    if "(" not in text:
        return True
    try:
        ast.literal_eval(text.strip())
    except _UNREADABLE:
        return False
    return True


def is_formula(text: str) -> bool:
    """Numbers, names, operators and calls of `FUNCTIONS`. No texts: sympy would evaluate these, too."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except _UNREADABLE:
        return False
    return all(_is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    return isinstance(node, _FORMULA)


EVALUATED = {
    **dict.fromkeys(["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"], cannot_call),
    **dict.fromkeys(["countdown", "intermediate_integration", "puzzle24", "simple_integration"], is_formula),
}
"""Data sets of reasoning_gym whose scorers evaluate the answer as Python → what must hold of it; else it earns 0."""


@lru_cache(maxsize=1024)
def item(name: str, config: str, index: int) -> dict[str, object]:
    """`{question, answer, metadata}`; `config` is JSON text."""
    return dict(dataset(name, config)[index])


def score(name: str, config: str, index: int, response: str, *, extract: Literal["tags", "text"] = "tags") -> float:
    """The data set's own score of a response's answer, in [0, 1]; 0 where it has none."""
    said = behind_thoughts(response)
    answer = utils.extract_answer(said) if extract == "tags" else said.strip()
    if not answer or not EVALUATED.get(name, bool)(answer):
        return 0.0
    return float(dataset(name, config).score_answer(answer, item(name, config, index)))
