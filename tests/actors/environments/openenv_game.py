"""A game for servers of OpenEnv: guess the number that follows from the seed. Some numbers harm the server."""

import os
import time


class Game:
    def __init__(self) -> None:
        self.wanted = self.guesses = 0

    def reset(self, seed: int | None, most: int = 7) -> str:
        self.wanted, self.guesses = (seed or 0) % most + 1, 0
        return f"1 to {most}"

    def step(self, number: int) -> tuple[str, float, bool]:
        """(hint, reward, done)"""
        if number == 97:
            os._exit(3)
        if number == 98:
            time.sleep(60)
        if number == 99:
            raise RuntimeError("the game is broken")
        self.guesses += 1
        hint = "right" if number == self.wanted else "higher" if number < self.wanted else "lower"
        return hint, float(hint == "right"), hint == "right" or self.guesses == 3
