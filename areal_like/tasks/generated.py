"""Prompts made from (seed, split, row), for tasks whose prompts are drawn at random instead of read from a file.

A hash of the prompt's *content* chooses the split that it may appear in, and rows are drawn again until theirs allows
them: the two splits share no prompt, by construction. Within a split a prompt may recur."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import xxhash

from areal_like.interfaces import Codec
from areal_like.sampling import stream_key
from areal_like.types import Prompt

SPLITS = ("train", "heldout")
_HELDOUT_ONE_IN = 10
_MAX_DRAWS = 2000
"""Draws before a split counts as empty: a held-out share of 1/10 misses this often once in 10^91."""


SAMPLES = 32
"""Lengths of filler drawn per prompt; sample i takes number `i % SAMPLES`."""


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """Lengths of filler: how a small model gets the long-tailed responses of a reasoning model. Each sample decodes so
    many more tokens after its answer: they cost time and cache, are masked out of the loss and unseen by the verifier.

    A length is `median · exp(sigma · z_prompt) · exp(noise · z_sample)`, z standard normal, rounded and clipped to
    1..`max`. `sigma` spreads the prompts (hard ones need more tokens), `noise` the samples of one prompt. Raises
    ValueError where a knob is out of range.
    """

    median: float
    sigma: float = 1.0
    noise: float = 0.3
    max: int = 1000

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and self.noise >= 0 and self.max >= 1):
            raise ValueError(f"length_trace: want median > 0, sigma >= 0, noise >= 0, max >= 1, got {self}")

    def lengths(self, key: int) -> tuple[int, ...]:
        """The lengths [SAMPLES] of the prompt whose 64-bit key this is; the same ones every time."""
        z = np.random.Generator(np.random.Philox(key=key)).standard_normal(1 + SAMPLES)
        exponents = np.minimum(self.sigma * z[0] + self.noise * z[1:], 600.0)  # float64 ends at exp(709)
        tokens = np.rint(self.median * np.exp(exponents))
        return tuple(int(n) for n in np.clip(tokens, 1, self.max))


class GeneratedPrompts(ABC):
    """The base of tasks with generated prompts; a subclass draws one (`_draft`).

    Raises ValueError where the task has so few different prompts that none falls into a split; IndexError for a row
    outside its split. `trace`: knobs of a `LengthTrace`.
    """

    def __init__(self, seed: int, train_size: int, heldout_size: int, trace: Mapping[str, Any] | None = None):
        self._seed = seed
        self._sizes = {"train": train_size, "heldout": heldout_size}
        try:
            self._trace = None if trace is None else LengthTrace(**trace)
        except TypeError as error:
            raise ValueError(f"task.length_trace: got {dict(trace or {})}: {error}") from None
        self._heldout: dict[int, Prompt] = {}

    def size(self, split: str) -> int:
        return self._sizes[split]

    def prompt(self, split: str, row: int) -> Prompt:
        if not 0 <= row < self.size(split):
            raise IndexError(f"row {row} of split {split!r}, which has {self.size(split)}")
        if split != "heldout":
            return self._made(split, row)
        if row not in self._heldout:  # asked for in every evaluation, and drawn about ten times
            self._heldout[row] = self._made(split, row)
        return self._heldout[row]

    def _made(self, split: str, row: int) -> Prompt:
        for attempt in range(_MAX_DRAWS):
            key = stream_key(self._seed, SPLITS.index(split), row, attempt)
            drawn, make = self._draft(np.random.Generator(np.random.Philox(key=key)))
            content = xxhash.xxh3_64_intdigest(drawn, seed=stream_key(self._seed))
            if (content % _HELDOUT_ONE_IN == 0) == (split == "heldout"):
                return replace(make(), filler=self._trace.lengths(content)) if self._trace else make()
        raise ValueError(f"the task has too few different prompts: none falls into the split {split!r}")

    @abstractmethod
    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        """The content of a random prompt, and how to make it, without filler: only one in ten may be held out."""


class GeneratedTask(GeneratedPrompts):
    """The base of those whose tokens are made, not encoded; a subclass draws and scores a prompt.

    train_size, heldout_size: rows of the splits. length_trace: see `LengthTrace`."""

    codec: Codec | None = None
    """Where the tokens are text."""

    stop_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        seed: int,
        *,
        train_size: Annotated[int, "[1, inf)"] = 1_000_000,
        heldout_size: Annotated[int, "[1, inf)"] = 1024,
        length_trace: Mapping[str, float] | None = None,
    ):
        """A subclass calls this last: it draws a prompt of each split, so that an empty one shows at once."""
        super().__init__(seed, train_size, heldout_size, length_trace)
        for split in SPLITS:
            self.prompt(split, 0)

    def _draft(self, rng: np.random.Generator) -> tuple[bytes, Callable[[], Prompt]]:
        tokens, answer = self._draw(rng)
        return tokens.tobytes(), lambda: self._prompt(tokens, answer)

    def _prompt(self, tokens: np.ndarray, answer: object) -> Prompt:
        messages = ({"role": "user", "content": self.codec.decode(tokens)},) if self.codec else ()
        return Prompt(tokens, answer, self._max_tokens(), (), self.codec, messages)

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, object]:
        """One random prompt: its tokens (int32 [P]) and its answer."""

    @abstractmethod
    def _max_tokens(self) -> int:
        """The longest response that makes sense; the same for all rows, so that it gives no answer away."""


def share_in_place(given: np.ndarray, wanted: np.ndarray) -> float:
    """The share of places with equal tokens, out of the longer of both."""
    both = min(len(given), len(wanted))
    return float(np.count_nonzero(given[:both] == wanted[:both]) / max(len(given), len(wanted)))


class CharacterCodec:
    """Text whose tokens are characters (`areal_like.interfaces.Codec`): token i is character i. Ids beyond are no text:
    they end a turn, or fill a batch. There are no roles: a conversation is the contents of its messages."""

    def __init__(self, characters: str):
        self._characters = characters
        self._places = {character: token for token, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError for a character that the task does not have."""
        unknown = [character for character in text if character not in self._places]
        if unknown:
            raise ValueError(f"there is no token for {unknown[0]!r}; there are {self._characters}")
        return np.array([self._places[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self._characters[token] for token in tokens.tolist() if token < len(self._characters))

    def reply(self, text: str, *, closed: bool | int = True) -> np.ndarray:
        return self.encode(text)

    def opening(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> np.ndarray:
        """Raises ValueError for `tools`: there is no place for them."""
        if tools:
            raise ValueError("this task's text has no place for tools")
        return self.encode("".join(str(message["content"]) for message in messages))

    def continuation(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = (), *, closed: bool | int = True
    ) -> np.ndarray:
        return self.opening(messages, tools)

    def rewrites(self, said: str, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> bool:
        return False
