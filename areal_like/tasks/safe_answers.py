"""Answers that may be handed to `eval`, or to sympy's parser, which is one: no code, only values and formulas.

Some scorers of packages evaluate the model's text. `__import__("os").system(...)` is such an answer, too.
"""

from __future__ import annotations

import ast

_NAMES = "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs abs"
FUNCTIONS = frozenset(_NAMES.split(" "))
"""That a formula may call."""
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
    "polynomial_multiplication": is_formula,
}
"""Data sets of reasoning_gym whose scorers evaluate the answer as Python → what must hold of it; else it earns 0."""
