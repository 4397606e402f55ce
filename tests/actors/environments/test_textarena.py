"""environment=textarena against the real package."""

import random
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if not find_spec("textarena"):  # its import takes seconds, in each process that collects
    pytest.skip("needs pip install textarena", allow_module_level=True)

from actors.environments import textarena as ours
from actors.environments.textarena import TextArena
from areal_like.errors import UserError
from areal_like.types import Prompt

SEED_OF_1 = 14
"""Whose number is 1."""
GUESS = {"game": "GuessTheNumber-v0", "options": {"max_number": 7, "max_turns": 3}}


def prompt_of(seed: object) -> Prompt:
    return Prompt(np.array([1], np.int32), seed, 8)


def played(actions: Sequence[str], seed: object = 0, **knobs: Any) -> list[Any]:
    """What is shown first, and the outcome of each action until the game ends."""
    world = TextArena(**knobs)
    found: list[Any] = [world.reset(prompt_of(seed))]
    for action in actions:
        found.append(tuple(world.step(action)))
        if found[-1][2]:
            break
    return found


def test_a_number_is_guessed_by_halves():
    first, *outcomes = played(["[4]", "2", "I say [1]"], seed=SEED_OF_1, **GUESS)
    assert (
        first.startswith("You are Player 0. You are playing Guess The Number.") and "between 1 and 7 within 3" in first
    )
    assert outcomes == [
        ("The target number is lower.", 0.0, False), ("The target number is lower.", 0.0, False), ("", 1.0, True),
    ]  # fmt: skip


def test_the_rules_may_be_left_out_and_a_bad_move_is_told():
    first, told, *_ = played(["four"], seed=2, **GUESS, rules=False)
    assert first == "" and told[0].startswith("You attempted an invalid move. Reason: Invalid move format.")


def test_the_seed_decides_the_game():
    wins = {seed: [played([str(n)], seed, **GUESS)[-1][2] for n in range(1, 8)].index(True) for seed in range(30)}
    assert set(wins.values()) == set(range(7))


GAMES = [
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0",
    "FrozenLake-v0-random", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0",
    "PegJump-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sudoku-v0", "ThreeCardMonte-v0", "TowerOfHanoi-v0",
]  # fmt: skip
MOVES = ["[up]", "[red]", "[hit]", "[1 2 3 4]", "[5]", "[reveal 0 0]", "[1]", "[B A]", "[left]", "nothing"]


@pytest.mark.parametrize("game", GAMES)
def test_a_game_follows_from_its_seed_and_moves(game):
    """Among others that are played at the same time, and others who draw from Python's random numbers."""
    alone = played(MOVES, 3, game=game)
    worlds = [TextArena(game=game) for _ in range(3)]
    seen: list[list[Any]] = [[world.reset(prompt_of(seed))] for world, seed in zip(worlds, (3, 4, 3), strict=True)]
    random.seed(1)
    expected = [random.random() for _ in range(2)]
    random.seed(1)
    drawn = [random.random()]
    for move in MOVES[: len(alone) - 1]:
        for world, each in zip(worlds, seen, strict=True):
            if len(each) == 1 or not each[-1][2]:
                each.append(tuple(world.step(move)))
    drawn.append(random.random())
    assert seen[0] == seen[2] == alone
    assert drawn == expected, "others' random numbers are not disturbed"


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data for NLTK; games and corpora are loaded anew."""
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("it went to the network"))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    loader = nltk.corpus.util.LazyCorpusLoader("words", nltk.corpus.reader.WordListCorpusReader, r"(?!README|\.).*")
    monkeypatch.setattr(nltk.corpus, "words", loader)
    for module in ("Wordle.env", "Hangman.env", "utils.word_lists"):
        monkeypatch.delitem(sys.modules, f"textarena.envs.{module}", raising=False)
    ours._made.cache_clear()
    return tmp_path


def test_a_game_of_words_whose_list_all_its_copies_share(nltk_data: Path) -> None:
    corpus = nltk_data / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (corpus / name).write_text("apple\n" * ours.LARGE)
    first, *told = played(["e", "[apple]"], seed=2, game="Hangman-v0")
    assert "Current board" in first and "C00 C01 C02 C03 C04" in told[0][0] and told[1] == ("", 1.0, True)
    one, other = (TextArena(game="Hangman-v0")._game for _ in range(2))
    assert one.word_list is other.word_list and one is not other


def test_missing_words_are_told_and_nothing_is_fetched(nltk_data: Path) -> None:
    with pytest.raises(UserError, match=r"Hangman-v0 needs data of NLTK: python -m nltk\.downloader words"):
        TextArena(game="Hangman-v0")


@pytest.mark.parametrize(
    "knobs, told",
    [
        ({"game": "GuesTheNumber-v0"}, "no game 'GuesTheNumber-v0'. Did you mean 'GuessTheNumber-v0'"),
        ({"game": "TicTacToe-v0"}, "not a game for one player"),
        ({"game": "GuessTheNumber-v0", "options": {"most": 3}}, "can't be made with .*most"),
    ],
)
def test_bad_knobs_are_told_when_it_is_built(knobs, told):
    with pytest.raises(UserError, match=told):
        TextArena(**knobs)


def test_code_from_the_model_is_text(tmp_path: Path):
    code = f"__import__('pathlib').Path({str(tmp_path / 'out')!r}).touch()"
    for game in GAMES:
        played([code, f"[{code}]", f"[5] {code}", "[{0.__class__}]"], game=game)
    assert not list(tmp_path.iterdir())


def test_no_game_evaluates_what_it_is_told():
    """Reads the package: a new version may have one that does."""
    import textarena

    calls = re.compile(r"(?<![\w.])(?:eval|exec|compile|sympify|parse_expr|__import__|os\.system|subprocess\.\w+)\(")
    sources = {file: file.read_text() for file in (Path(textarena.__file__).parent / "envs").rglob("*.py")}
    assert len(sources) > 100 and not [file for file, text in sources.items() if calls.search(text)]
