"""Rules that `scripts.check` holds components against."""


def demand(holds: object, otherwise: str) -> None:
    """Raise AssertionError for a claim that does not hold: what was found, and what to do."""
    if not holds:
        raise AssertionError(otherwise)
