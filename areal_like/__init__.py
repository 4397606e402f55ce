"""Reinforcement learning of language models, actor-learner style, with a tested staleness bound.

    import areal_like as al

    run = al.train("quickstart", {"loss": "dg", "run.steps": 100})
    run.metrics[-1]["reward/mean"], run.summary["reward_after"], next(run.samples("heldout"))

    al.check("my_module:my_loss")  # in a test: raises AssertionError where it breaks its contract

`__init__.pyi` has the types.
"""

from importlib import import_module

__all__ = ["Run", "check", "train"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name == "check":
        from areal_like.places import COMMANDS

        return import_module(f"{COMMANDS}.check").require
    if name in __all__:  # only when asked for: every process of a run imports this package
        return getattr(import_module("areal_like.run.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
