"""The game behind a server of the package openenv-core, as its users write one: `uvicorn THIS:app`."""

from openenv.core.env_server import Action, Environment, Observation, State, create_app

from tests.actors.environments.openenv_game import Game


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""
    guesses: int = 0


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.game = Game()

    def reset(self, seed: int | None = None, most: int = 7) -> Hint:
        return Hint(hint=self.game.reset(seed, most))

    def step(self, action: Guess) -> Hint:
        hint, reward, done = self.game.step(action.number)
        return Hint(hint=hint, guesses=self.game.guesses, reward=reward, done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.game.guesses)


app = create_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=2)
