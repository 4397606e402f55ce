"""A server of openenv-core: guess the number that follows from the seed. `uvicorn tests.actors.openenv_server:app`."""

import os
import time

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""
    guesses: int = 0


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, most: int = 7) -> Hint:
        self.wanted, self.guesses = (seed or 0) % most + 1, 0
        return Hint(hint=f"1 to {most}")

    def step(self, action: Guess) -> Hint:
        """Some numbers harm the server: 97, 98, 99."""
        if action.number == 97:
            os._exit(3)
        if action.number == 98:
            time.sleep(60)
        if action.number == 99:
            raise RuntimeError("the game is broken")
        self.guesses += 1
        hint = "right" if action.number == self.wanted else "higher" if action.number < self.wanted else "lower"
        done = hint == "right" or self.guesses == 3
        return Hint(hint=hint, guesses=self.guesses, reward=float(hint == "right"), done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


app = create_app(Guessing, Guess, Hint, max_concurrent_envs=2)
