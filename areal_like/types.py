"""The nouns that every room shares: prompts, completions, samples, groups, leases, batches.

Dataclasses over NumPy arrays, without torch, sglang or ray. Shapes are written `[T]`: `P` prompt tokens, `R` response
tokens, `T = P + R`. A *version* is the number of published weight updates that made the weights (0 = the initial
weights). A *run* is `(version, n)`: n consecutive tokens sampled at that version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np

Finish = Literal["stop", "length", "abort", "stop_text", "stop_id"]
"""`stop`: with a token of the task's; `stop_text`, `stop_id`: with one of `sampling.stop`, `sampling.stop_ids`."""
Runs = list[tuple[int, int]]


def merged(runs: Runs) -> Runs:
    """Join neighbouring runs of the same version."""
    return [(version, sum(count for _, count in each)) for version, each in groupby(runs, key=itemgetter(0))]


BORDER = 8
"""Tokens before a stop text that are decoded with it, since a token may hold a part of a character."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, made by a task.

    `tokens` int32 [P]; `answer` is the input of the task's verifier; `max_tokens` is the longest response that makes
    sense. `filler`: with a task's `length_trace`, loss-masked tokens that sample i decodes after its answer, `filler[i
    % len(filler)]`. `codec` (`interfaces.Codec`): None where the task has no text. `messages`: the prompt as chat
    messages `{role, content}`. `task` names the task of a mixture that made it. `columns`: arguments of the reward."""

    tokens: np.ndarray
    answer: Any
    max_tokens: int
    filler: tuple[int, ...] = ()
    codec: Any = None
    messages: tuple[dict[str, str], ...] = ()
    task: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopTexts:
    """`texts` that end an answer with the token that completes one. As a codec it is `whole`, but an answer's text ends
    before its first stop text, or with it (one of `kept`)."""

    whole: Any
    texts: tuple[str, ...]
    kept: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    @property
    def window(self) -> int:
        """Tokens that hold a stop text: each is a byte at least."""
        return BORDER + max(len(text.encode()) for text in self.texts)

    def end(self, tokens: np.ndarray) -> bool:
        """Whether a stop text is in the newest of the tokens."""
        shown = self.whole.decode(tokens[-self.window :])
        return any(text in shown for text in self.texts)

    def first_end(self, tokens: np.ndarray, known: int) -> int | None:
        """The least number of tokens, more than `known`, that have an end."""
        counts = range(known + 1, len(tokens) + 1)
        return next((count for count in counts if self.end(tokens[max(0, count - self.window) : count])), None)

    def found(self, shown: str) -> tuple[int, str] | None:
        """The first stop text in an answer's text, behind its place."""
        return min(((place, text) for text in self.texts if (place := shown.find(text)) >= 0), default=None)

    def decode(self, tokens: np.ndarray) -> str:
        shown = str(self.whole.decode(tokens))
        place, text = self.found(shown) or (len(shown), "")
        return shown[: place + len(text) * (text in self.kept)]


@dataclass(frozen=True, slots=True)
class Limits:
    """How to sample one completion.

    `key` names the random stream of this sample (see `areal_like.sampling`); `offset`: the first sampled token's
    position in that stream, so a sample's second call continues it. `temperature` 0: greedy, with logprobs of
    temperature 1. The output includes the stop token (`stop`, `stop_ids`), or all of a stop text (`stop_texts`), which
    may begin in the last `begun` tokens of the prompt: they are the completion's own. `trained` False: an evaluation.
    `experts_from`: the first position whose experts a completion brings (`areal_like.models.experts`)."""

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    key: int = 0
    offset: int = 0
    trained: bool = True
    experts_from: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: StopTexts | None = None
    begun: int = 0


@dataclass(slots=True)
class Completion:
    """What an engine sampled: `tokens` int32 [R], `logprobs` float32 [R] (behaviour), `runs` covering R tokens.
    `experts` [N, layers, k] (`models.experts`): those of positions from `Limits.experts_from` to the last token but
    one; None: not returned."""

    tokens: np.ndarray
    logprobs: np.ndarray
    runs: Runs
    finish: Finish
    experts: np.ndarray | None = None


@dataclass(slots=True)
class Sample:
    """One rollout, rewarded.

    `tokens` int32 [T] (prompt, then response); `logprobs` float32 [R] behaviour logprobs; `loss_mask` bool [R], False
    for tokens that are not trained (filler, tool output); `runs` covers the R response tokens in order. `turn_rewards`,
    ascending: parts of `reward`, as (place of the turn's last token in the response, its reward); the rest belongs to
    the end. `experts` [T - 1, layers, k]: those that the engine's model chose (`models.experts`). `forks`, ascending:
    places in the response at which the model's context began anew, since its chat template rewrites earlier turns. n
    forks make n + 1 sequences; each begins with the loss-masked tokens shown to the model there. `parts` of the reward,
    by name, before their weights."""

    tokens: np.ndarray
    prompt_length: int
    logprobs: np.ndarray
    loss_mask: np.ndarray
    runs: Runs
    reward: float
    finish: Finish
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    experts: np.ndarray | None = None
    forks: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """The sequences that it is made of: (first token, one past the last)."""
        edges = [0, *(self.prompt_length + fork for fork in self.forks), len(self.tokens)]
        return list(pairwise(edges))

    @property
    def reach(self) -> int:
        """Tokens behind the prompt in its longest context; without forks, those of the response."""
        return max(end - begin for begin, end in self.contexts) - self.prompt_length

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.runs)

    @property
    def newest_version(self) -> int:
        return max(version for version, _ in self.runs)

    def mask_tokens_before(self, allowed: int) -> None:
        """Remove the tokens of versions before `allowed` from the loss mask."""
        if self.oldest_version < allowed:
            young = np.repeat([version >= allowed for version, _ in self.runs], [n for _, n in self.runs])
            self.loss_mask = self.loss_mask & young


@dataclass(slots=True)
class Group:
    """All samples of one prompt: the unit that an actor pushes and the buffer keeps, serves and accounts for.

    `id` is the prompt's place in the run's prompt order: unique, stable across retries, and part of the sampling key.
    `digests` maps each version that made a token to the digest of those weights. `seconds`: from lease to push.
    `actor`: who pushed it, where the learner gets it from the buffer ("": a run before the resume). `unscored`: samples
    that it lacks, since their reward is None."""

    id: int
    samples: list[Sample]
    digests: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    actor: str = ""
    unscored: int = 0


class Lease(NamedTuple):
    """The right and the duty of one actor to roll out one prompt.

    `group_id` see `Group.id`; `row` the row of the task's `split`, which is "train", or of a held-out set, by its name;
    `launch` samples are started and the first `need` that finish make the group. `temperature` overrides the run's own
    where it is not None. `sample`: which answer to a held-out prompt this is.
    """

    group_id: int
    row: int
    split: str
    launch: int
    need: int
    temperature: float | None = None
    sample: int = 0


@dataclass(slots=True)
class Batch:
    """The input of one train step: `index` counts batches from 0, `version` is the train version it is served for.

    Tokens of versions before `oldest_allowed` are not trained; the samples' loss masks exclude them already. With
    several ranks of the learner this is one's share, and `places` are its groups' in the batch. `redo` counts batches
    set aside before it (`learners.untrainable`).
    """

    index: int
    version: int
    groups: list[Group]
    oldest_allowed: int = 0
    places: list[int] | None = None
    redo: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def staleness(self) -> list[int]:
        """Per sample with a trainable token: train version − version of its oldest trainable token."""
        made = ([version for version, _ in sample.runs if version >= self.oldest_allowed] for sample in self.samples)
        return [self.version - min(versions) for versions in made if versions]
