"""Advantages: how much better than expected each sample, or each token, was. Pure NumPy functions of rewards.

There are two forms; the learner calls one of them per batch:

- `(rewards [n], groups [n], *, knobs) -> [n]`: one advantage per sample, used for all of its tokens;
- marked with `per_token`: `(episodes, *, knobs) -> [N]`: one advantage per trained token.

A penalty on tokens (KL to a reference in the reward) reaches the first form as its sum over the sample's tokens, and
the second form token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np

Advantage = Callable[..., np.ndarray]
"""An advantage function whose knobs are bound, in one of the two forms."""


def mark_as(name: str, value: object = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of advantages or losses, which sets an attribute."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, name, value)
        return function

    return mark


compares_samples = mark_as("compares_samples")  # the samples of a prompt with one another: a single one gets 0
per_token = mark_as("per_token")  # the second form
needs_teacher = mark_as("needs_teacher")  # it reads `Episodes.teacher`


def marked(advantage: Callable[..., Any], mark: str) -> bool:
    """Does an advantage function, bare or bound with `functools.partial`, carry this mark?"""
    return getattr(getattr(advantage, "func", advantage), mark, False)


def needs_current(advantage: Callable[..., Any]) -> bool:
    """Is `Episodes.student` the learner's policy at the start of the train step, instead of the behaviour policy?"""
    knobs = getattr(advantage, "keywords", {})
    return marked(advantage, "needs_teacher") and bool(knobs.get("sampled", 1.0)) and knobs.get("of") != "behaviour"


@compares_samples
def group(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    std: bool | Literal["population", "sample"] = False,
    eps: Annotated[float, "[0, inf)"] = 1e-6,
) -> np.ndarray:
    """Group-relative advantages of GRPO (arXiv 2402.03300): reward − mean of its group, float64 [n].

    `rewards` float [n]; `groups` int [n] names the group of each sample (any integers). With `std` the difference is
    divided by (standard deviation of the group + `eps`), as in the paper; without, as in Dr. GRPO (arXiv 2503.20783).
    "population" (or true) divides the sum of squares by n; "sample" by n − 1, as `torch.std` does in TRL and verl: in a
    group of 8 its advantages are 6.5 % smaller. Groups whose rewards are all equal, single samples among them, get
    exactly 0.
    """
    rewards = np.asarray(rewards, np.float64)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(member)
    advantages = rewards - (np.bincount(member, rewards) / counts)[member]
    if std:
        deviation = np.sqrt(np.bincount(member, advantages**2) / np.maximum(counts - (std == "sample"), 1))
        advantages = advantages / (deviation[member] + eps)
    advantages[~varied(rewards, member)[member]] = 0.0
    return advantages


@compares_samples
def rloo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """REINFORCE leave-one-out (arXiv 2402.14740): reward − mean of the OTHERS in its group, float64 [n].

    Equals n/(n − 1) times `group`. Single samples have no others and get 0. Normalised over the batch, as by
    TRL's `normalize_advantages`, it is `batch` with `baseline: group` and `std: sample`.
    """
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(member)[member]
    return group(rewards, groups) * counts / np.maximum(counts - 1, 1)


@compares_samples
def maxrl(rewards: np.ndarray, groups: np.ndarray, *, eps: Annotated[float, "[0, inf)"] = 1e-6) -> np.ndarray:
    """Maximum likelihood RL (arXiv 2602.02710): (reward − mean of its group) / (that mean + `eps`), float64 [n].
    Rewards must not be negative (ValueError). The formula is second-hand."""
    if (rewards < 0).any():
        raise ValueError("maxrl needs rewards that are not negative")
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    means = np.bincount(member, rewards) / np.bincount(member)
    return group(rewards, groups) / (means[member] + eps)


def batch(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    baseline: Literal["batch", "group"] = "batch",
    std: bool | Literal["population", "sample"] = True,
    eps: Annotated[float, "[0, inf)"] = 1e-6,
) -> np.ndarray:
    """Batch-normalised advantages: reward − mean of batch or group, over the BATCH's deviation of this difference
    (+ `eps`), float64 [n].

    `std` as in `group`, false leaves the deviation out. With `baseline: group` this is "lite PPO" (arXiv 2508.08221):
    easy and hard prompts get the same scale.
    """
    centred = group(rewards, groups if baseline == "group" else np.zeros(len(rewards), np.int64))
    if not std or not len(centred):
        return centred
    squares = ((centred - centred.mean()) ** 2).sum()
    return centred / (np.sqrt(squares / max(len(centred) - (std == "sample"), 1)) + eps)


# Per token


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """For N trained tokens: `number` int64 [N] is the turn of each token, counted from 0 in each sample; `earned`
    float64 [N] is the reward of a turn, placed at its last trained token."""

    number: np.ndarray
    earned: np.ndarray


def turns_of(pairs: Sequence[Sequence[tuple[int, float]]], sample: np.ndarray, place: np.ndarray) -> TurnRewards | None:
    """`pairs` are each sample's `turn_rewards`; `sample`, `place` int64 [N] are each trained token's sample and place
    in the response. If a turn has no trained token, its reward goes to the trained token before it, or else to the
    first. None without any turns.
    """
    if not any(pairs):
        return None
    turns = TurnRewards(np.zeros(len(sample), np.int64), np.zeros(len(sample)))
    ends = np.searchsorted(sample, np.arange(len(pairs) + 1))
    for (begin, end), earned in zip(pairwise(ends), pairs, strict=True):
        if earned and end > begin:
            places, rewards = np.array([p for p, _ in earned]), [reward for _, reward in earned]
            turns.number[begin:end] = np.minimum(np.searchsorted(places, place[begin:end]), len(places) - 1)
            last = np.maximum(np.searchsorted(place[begin:end], places, side="right") - 1, 0)
            np.add.at(turns.earned, begin + last, rewards)
    return turns


@dataclass(frozen=True, slots=True)
class Episodes:
    """A batch of n samples with N trained tokens, in the order of the samples. `rewards` float64 [n]; `groups` int [n];
    `sample` int64 [N] the sample of each token; `penalties` float64 [N] are subtracted from the reward at each token;
    `turns` has the rewards of single turns (None: all come at the end); `teacher`, `student` float64 [N] are their
    logprobs of each token (None without a teacher)."""

    rewards: np.ndarray
    groups: np.ndarray
    sample: np.ndarray
    penalties: np.ndarray
    turns: TurnRewards | None = None
    teacher: np.ndarray | None = None
    student: np.ndarray | None = None

    def per_sample(self) -> np.ndarray:
        """Rewards [n] minus the penalties of their tokens."""
        return self.rewards - np.bincount(self.sample, self.penalties, minlength=len(self.rewards))

    def last(self) -> np.ndarray:
        """Whether a token is the last trained one of its sample: bool [N]."""
        return np.append(self.sample[1:] != self.sample[:-1], True)[: len(self.sample)]

    def per_token(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards of tokens [N]: −penalty, turns' rewards at their last tokens, the rest of `rewards` [n] at samples'
        last trained tokens."""
        earned = self.turns.earned if self.turns else np.zeros(len(self.sample))
        rest = rewards - np.bincount(self.sample, earned, minlength=len(rewards))
        return np.where(self.last(), rest[self.sample], 0.0) + earned - self.penalties


@per_token
def reinforce_pp(
    episodes: Episodes,
    *,
    baseline: bool = False,
    gamma: Annotated[float, "[0, 1]"] = 1.0,
    std: Literal["population", "sample"] = "population",
    eps: Annotated[float, "[0, inf)"] = 1e-6,
) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262): the discounted return from each token on, normalised over the batch's tokens by
    their mean and standard deviation + `eps` ("sample": of n − 1, as verl has it). With `baseline` the group's mean
    reward is subtracted first (REINFORCE++-baseline), for several samples per prompt. Float64 [N]."""
    rewards = group(episodes.rewards, episodes.groups) if baseline else episodes.rewards
    returns = discounted_sums(episodes.per_token(rewards), episodes.last(), gamma)
    free = int(std == "sample" and len(returns) > 1)
    return (returns - returns.mean()) / (returns.std(ddof=free) + eps) if len(returns) else returns


@per_token
def turn(
    episodes: Episodes,
    *,
    gamma: Annotated[float, "[0, 1]"] = 1.0,
    std: bool | Literal["population", "sample"] = False,
) -> np.ndarray:
    """Credit by turns: return from a turn on − its group's mean at the same turn, float64 [N]. `gamma` discounts per
    turn; `std` as in `group`. A turn that no other sample of the group reached has the advantage of the turn before it:
    the baseline there, less the reward earned since, is all that the group shows about it. Without rewards of turns it
    equals `group`. Turn-level credit in group-relative training is MT-GRPO's idea (arXiv 2505.11821); ours has a return
    from each turn on in place of its mix of normalised turn and outcome advantages."""
    number = episodes.turns.number if episodes.turns else np.zeros(len(episodes.sample), np.int64)
    keys, cell = np.unique(np.stack([episodes.sample, number]), axis=1, return_inverse=True)  # a cell: a sample's turn
    owner, turn_of_cell = keys
    earned = np.bincount(cell, episodes.per_token(episodes.rewards), minlength=len(owner))
    begins = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    returns = discounted_sums(earned, np.roll(begins, -1), gamma)
    _, peers = np.unique(np.stack([episodes.groups[owner], turn_of_cell]), axis=1, return_inverse=True)
    compared = begins | (np.bincount(peers)[peers] > 1)
    newest = np.maximum.accumulate(np.where(compared, np.arange(len(owner)), 0))
    return group(returns, peers, std=std)[newest][cell]


@per_token
@needs_teacher
def distill(
    episodes: Episodes,
    *,
    of: Literal["current", "behaviour"] = "current",
    reward: Annotated[float, "[0, inf)"] = 0.0,
    cut: Annotated[float, "(0, inf)"] | None = None,
) -> np.ndarray:
    """On-policy distillation: log π_teacher − log π of each sampled token + `reward` · (reward − mean of its group),
    float64 [N].

    The first term is minus the KL(student ‖ teacher) of a token, estimated from that token, without the KL of later
    tokens (Thinking Machines, "On-Policy Distillation", 2025). π is the policy at the start of the train step, or the
    behaviour policy ("behaviour", as there): for stale tokens only the former gives the gradient of the current KL,
    once the loss weighs them. `cut` bounds the difference at ±.
    """
    earned = reward * group(episodes.rewards, episodes.groups)[episodes.sample] if reward else 0.0
    if episodes.teacher is None or episodes.student is None:
        raise ValueError("distill needs a teacher: set learner.teacher")
    closer = episodes.teacher - episodes.student
    return (closer if cut is None else np.clip(closer, -cut, cut)) + earned


def discounted_sums(values: np.ndarray, last: np.ndarray, discount: float) -> np.ndarray:
    """`s_t = values_t + discount · s_{t+1}`, starting again after every token that is `last`: float64 [N]."""
    ends = np.flatnonzero(last)
    lengths = np.diff(ends, prepend=-1)
    sums = np.array(values, np.float64)
    for back in range(1, lengths.max(initial=0)):  # every sample at once, from its end
        here = ends[lengths > back] - back
        sums[here] += discount * sums[here + 1]
    return sums


def varied(rewards: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Do the rewards of each group differ? bool [max(member) + 1] from rewards [n] and group numbers [n]."""
    first = np.unique(member, return_index=True)[1]
    return np.bincount(member, rewards != rewards[first][member]) > 0
