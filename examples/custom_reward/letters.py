"""A reward of your own, with parts: `docs/extending.md` has the rules."""

from typing import Annotated


def letters(answer: str, response: str, *, most: Annotated[int, "[1, inf)"] = 4) -> dict[str, float] | None:
    """`right`: the share of characters that are the row's letter. `brief`: 1 for at most `most` characters. An empty
    response is not graded: its sample is left out of the group."""
    if not response:
        return None
    return {"right": response.count(answer) / len(response), "brief": float(len(response) <= most)}
