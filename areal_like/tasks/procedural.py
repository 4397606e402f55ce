"""Items of reasoning_gym's data sets, and the scores of answers: the side that imports the package.

An item follows from (data set, config, index), so only these travel, and the verifier's process makes the item again.
All 105 data sets were tried, in different orders and with different hash seeds of Python; `UNSTEADY` are exceptions.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from reasoning_gym import utils
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from areal_like.config.registry import nearest
from areal_like.tasks.safe_answers import EVALUATED

SYSTEM_PROMPTS: dict[str, str] = utils.SYSTEM_PROMPTS
SIZE = 1_000_000
SIZES = {"acre": 1000, "word_ladder": 20_000}
"""Of data sets that make all items at once, or refuse more. A config may set another `size`."""
UNSTEADY = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Data sets whose items depend on the order of Python's sets, which each process draws anew."""


def dataset(name: str, config: Mapping[str, object]) -> ProceduralDataset:
    """Raises ValueError for an unknown data set or config key, and for values that the data set refuses."""
    return _dataset(name, json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> ProceduralDataset:
    if name not in DATASETS:
        raise ValueError(f"reasoning_gym has no data set {name!r}.{nearest(name, DATASETS)}")
    if name in UNSTEADY and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ValueError(
            f"the data set {name!r} follows the order of Python's sets, so that processes would disagree about its "
            "items: set PYTHONHASHSEED=0 in the environment of the run"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed"}
    values = {"size": SIZES.get(name, SIZE)} | json.loads(config)
    if unknown := [key for key in values if key not in known]:
        hint = f"{nearest(unknown[0], known)} It has {', '.join(sorted(known))}"
        raise ValueError(f"the data set {name!r} has no key {unknown[0]!r}.{hint}")
    try:
        return create_dataset(name, seed=0, **values)
    except (AssertionError, TypeError, ValueError) as error:  # its own checks are assertions
        raise ValueError(f"the data set {name!r} refuses {json.loads(config)}: {error}") from error


@lru_cache(maxsize=1024)
def item(name: str, config: str, index: int) -> dict[str, object]:
    """`{question, answer, metadata}`; `config` is JSON text."""
    return dict(dataset(name, json.loads(config))[index])


def score(name: str, config: str, index: int, response: str, *, extract: Literal["tags", "text"] = "tags") -> float:
    """The data set's own score of a response's answer, in [0, 1]; 0 where it has none."""
    answer = utils.extract_answer(response) if extract == "tags" else response.strip()
    if not answer or not EVALUATED.get(name, bool)(answer):
        return 0.0
    return float(dataset(name, json.loads(config)).score_answer(answer, item(name, config, index)))
