"""Rules that `scripts.check` holds components against."""


def demand(holds: object, otherwise: str) -> None:
    """Raise AssertionError for a claim that does not hold, with the finding and the remedy."""
    if not holds:
        raise AssertionError(otherwise)
