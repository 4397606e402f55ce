"""What an environment may raise."""


class EpisodeError(RuntimeError):
    """The environment failed, and not the model: the sample is drawn again."""
