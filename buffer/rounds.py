"""The scheduler of synchronous training: one round of groups per batch, on the weights of the batch before."""

import math
from collections.abc import Sequence
from typing import Annotated

from buffer.schedulers import GroupPlan, Round, Scheduler, View
from buffer.sizing import GroupLengths, Sizing


class SyncScheduler(Scheduler):
    """Rounds: the groups of batch k start once batch k−1 is trained, on its weights. With over-provisioning this is
    tail batching of RollPacker (arXiv 2509.21009, section 4.1).

    A *short* round starts `oversample_prompts` · P groups for P places. The first P that are done, reward included, are
    kept; the others are cut at once and go to the queue. When the queue holds P or more, the next round is *long*: it
    takes P groups of the queue, first in, first out, and nothing else. So each prompt is trained once, and at the end
    of the data rounds empty the queue. We differ from the paper: `oversample_responses` is 1 by default,
    since closing a group at its first responses favours short answers *within* a prompt; it applies in short rounds.

    A group that was cut starts again on the weights of its new round: training is strictly on-policy.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        oversample_prompts: Annotated[float, "[1, inf)"] = 1.0,
        oversample_responses: Annotated[float, "[1, inf)"] = 1.0,
        max_staleness: Annotated[float, "[0, inf)"] = 0,
    ):
        super().__init__(sizing, oversample_responses)
        self.oversample_prompts = oversample_prompts
        if max_staleness:
            raise ValueError(f"scheduler.max_staleness: got {max_staleness:g}, expected 0; set mode=async for more")
        self.groups, self.long = 0, False
        if oversample_prompts > 1:
            self.remembered = (*self.remembered, "groups", "long")

    def ready_to_open(self, batch: int, trained_batches: int) -> bool:
        return batch <= trained_batches

    def open_batch(self, samples: int, deferred: int, seen: Sequence[GroupLengths], least: int = 0) -> int:
        self.groups = super().open_batch(samples, deferred, seen, least)
        self.long = deferred >= self.groups
        if self.long:
            self.launch = self.group_size
        return self.groups

    def admit(self, view: View) -> GroupPlan | None:
        now = view.round()
        if not now.current or (now.fresh < 1 and not view.deferred):
            return None
        if self.long and now.redundant and not view.deferred:
            return None  # actors have yet to hand back the rest of the queue
        if view.room >= 1 and now.left > 0:
            from_queue = view.deferred > 0 and (self.long or now.fresh < 1)
            return GroupPlan(self.launch, self.group_size, from_queue)
        return GroupPlan(self.launch, self.group_size, redundant=True) if self._redundant_wanted(now) else None

    def wants_redundant(self, view: View) -> int:
        now = view.round()
        to_start = max(now.left, 0)  # these start first, the redundant ones right after
        after = now._replace(left=0, unfinished=now.unfinished + to_start, fresh=now.fresh - to_start)
        return self._redundant_wanted(after)

    def _redundant_wanted(self, now: Round) -> int:
        if self.long or not now.unfinished or now.left > 0:
            return 0
        redundant = math.ceil(self.oversample_prompts * self.groups) - self.groups
        return max(0, int(min(redundant - now.redundant, now.fresh)))

    def metrics(self) -> dict[str, float]:
        found = {"rounds/long": float(self.long)} if self.oversample_prompts > 1 else {}
        return super().metrics() | found
