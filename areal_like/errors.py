"""Errors that a person must fix. A process that ends with a UserError is not restarted, and nobody is advised to
resume: the same would happen again. Any other error of an actor counts as an accident."""


class UserError(ValueError):
    """An error of the user: its text names the fault, its place and the remedy."""


class EpisodeError(RuntimeError):
    """An environment failed, and not the model: the sample is drawn again."""
