"""environment=gymnasium against the real package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install gymnasium")

from actors.environments.gymnasium import ACTIONS, Gymnasium, parsed  # noqa: E402
from actors.environments.toy_text import plain  # noqa: E402
from areal_like.errors import UserError  # noqa: E402
from areal_like.types import Prompt  # noqa: E402

DRY = {"is_slippery": False}


def prompt_of(seed: object) -> Prompt:
    return Prompt(np.array([1], np.int32), seed, 8)


def played(actions: Sequence[str], seed: object = 0, **knobs: Any) -> list[Any]:
    """What is shown first, and the outcome of each action."""
    world = Gymnasium(**knobs)
    found: list[Any] = [world.reset(prompt_of(seed)), *(tuple(world.step(action)) for action in actions)]
    world.close()
    return found


def test_a_lake_is_crossed():
    first, *outcomes = played(
        ["right", "Right.", "I go down, down", "DOWN", "down", "right"], env="FrozenLake-v1", options=DRY
    )
    assert first == "PFFF\nFHFH\nFFFH\nHFFG"
    assert [outcome[0].index("P") for outcome in outcomes[:-1]] == [1, 2, 7, 12, 17]
    assert outcomes[-1] == ("", 1.0, True) and all(outcome[1:] == (0.0, False) for outcome in outcomes[:-1])


def test_a_turn_without_an_action_is_lost():
    _, told, moved = played(["north-west", "down"], env="FrozenLake-v1", options=DRY)
    assert told == ("Say one of: left, down, right, up", 0.0, False) and moved[0] == "SFFF\nPHFH\nFFFH\nHFFG"
    assert played(["?"], env="FrozenLake-v1", options=DRY, unclear="")[1] == ("", 0.0, False)


@pytest.mark.parametrize(
    "env, shown, action, then",
    [
        ("Taxi-v4", "+---------+\n|R: | : :G|", "south", "The taxi is at"),
        ("Taxi-v4", "Destination: ", "dropoff", "the passenger at"),
        ("CliffWalking-v1", "x  C  C", "up", "T"),
        ("Blackjack-v1", "The dealer shows ", "hit", ""),
    ],
)
def test_toy_text_is_text(env, shown, action, then):
    first, (after, _, done) = played([action], env=env, seed=3)
    assert shown in first and "\x1b" not in first
    assert done or then in after


def test_a_taxi_says_what_its_colours_would():
    first = played([], env="Taxi-v4", seed=3)[0]
    world = gymnasium.make("Taxi-v4")
    state, _ = world.reset(seed=3)
    row, column, passenger, destination = world.unwrapped.decode(state)
    places = ("red", "green", "yellow", "blue", "in the taxi")
    assert f"The taxi is at {(int(row), int(column))}, the passenger at {places[passenger]}." in first
    assert first.endswith(f"Destination: {places[destination]}.") and "red (0, 0), green (0, 4)" in first


@pytest.mark.parametrize("env", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_an_episode_follows_from_its_seed_and_actions(env):
    """Slippery, shuffled or rainy as they are; other episodes between do not matter."""
    names = ACTIONS[env.partition("-")[0]]
    options = {"is_slippery": True} if env in ("FrozenLake-v1", "CliffWalking-v1") else {}
    actions = [names[n % len(names)] for n in (1, 2, 1, 0, 2, 3)]
    episodes = [played(actions[: 1 if env[0] == "B" else 6], seed, env=env, options=options) for seed in (7, 8, 9, 7)]
    assert episodes[0] == episodes[3] and len({str(each) for each in episodes[:3]}) > 1


class Echo(gymnasium.Env):
    """Actions and observations of other kinds."""

    action_space = gymnasium.spaces.Text(8, charset="abc")
    observation_space = gymnasium.spaces.Dict({"said": gymnasium.spaces.Text(8), "turn": gymnasium.spaces.Discrete(9)})
    render_mode = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return {"said": "-", "turn": np.int64(0)}, {}

    def step(self, action):
        self.turn += 1
        return {"said": action, "turn": np.int64(self.turn)}, len(action) / 4, False, self.turn == 2, {}


def echo(seed: int, **options: object) -> gymnasium.Env:
    if options:
        raise TypeError(f"no {options}")
    return Echo()


def upper(world: Any, observation: Any) -> str:
    return str(observation["said"]).upper()


def test_an_environment_of_ones_own_with_text_for_actions():
    own = {"env": f"{__name__}:echo"}
    assert played(["abc", "abz", "cc"], **own) == [
        "said: -\nturn: 0", ("said: abc\nturn: 1", 0.75, False), ("Say one of: ", 0.0, False), ("", 0.5, True),
    ]  # fmt: skip
    assert played(["abc"], **own, shows=f"{__name__}:upper")[1] == ("ABC", 0.75, False)


@pytest.mark.parametrize(
    "said, action",
    [
        ("right", 2), ("go LEFT, then Up!", 3), ("upright", None), ("<answer>down</answer>", 1), ("", None),
        ("right\nleft", 0), ("__import__('left')", 0),
    ],
)  # fmt: skip
def test_an_action_is_a_name_in_the_text(said, action):
    assert parsed(said, ACTIONS["FrozenLake"]) == action


def test_numbers_are_names_where_there_are_no_others():
    assert parsed("I take 10", [str(n) for n in range(11)]) == 10 and parsed("11", ["1", "10"]) is None


@pytest.mark.parametrize(
    "knobs, told",
    [
        ({"env": "FrozenLaek-v1"}, "can't be made"),
        ({"env": "FrozenLake-v1", "options": {"slippery": True}}, "can't be made.*slippery"),
        ({"env": "Pendulum-v1"}, "Discrete from 0 on, or Text"),
        ({"env": "FrozenLake-v1", "actions": ["a", "b"]}, "has 4 actions, and these are a, b"),
        ({"env": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, "has 4 actions"),
        ({"env": "nomod:lake"}, "environment.env=nomod:lake"),
        ({"env": "FrozenLake-v1", "shows": "nomod:f"}, "environment.shows=nomod:f"),
        ({"env": f"{__name__}:echo", "options": {"size": 3}}, "no {'size': 3}"),
    ],
)
def test_bad_knobs_are_told_when_it_is_built(knobs, told):
    with pytest.raises(UserError, match=told):
        Gymnasium(**knobs)


def test_a_picture_is_refused():
    with pytest.raises(UserError, match=r"environment\.shows"):
        plain(np.zeros((2, 2)))


CODE = [
    "__import__('pathlib').Path({file!r}).touch()",
    "eval(\"open({file!r}, 'w')\")",
    "$(touch {file})",
    "{{0.__class__}}",
]


@pytest.mark.parametrize("env", ["FrozenLake-v1", f"{__name__}:echo"])
def test_code_from_the_model_is_text(env, tmp_path: Path):
    actions = [code.format(file=str(tmp_path / "out")) for code in CODE]
    assert all(outcome[1] == 0.0 for outcome in played(actions, env=env)[1:]) and not list(tmp_path.iterdir())
