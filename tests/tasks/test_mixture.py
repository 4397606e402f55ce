"""Tasks that are mixed: whose turn it is, what each keeps, and what cannot be mixed."""

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest

from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from actors.workflows import for_tasks
from areal_like.config.registry import ConfigError, build
from areal_like.config.run_config import load
from areal_like.tasks.mixture import whole_ratios
from areal_like.types import Group, Sample
from areal_like.wire.groups import encode_group
from buffer import segment_file
from buffer.events import Admit, decode, encode
from buffer.gauges import by_task
from buffer.journal import Record
from buffer.payloads import cannot_read
from buffer.policies import in_order
from buffer.prompts import PromptCursor, Share, shares_of
from buffer.replay import Replay
from buffer.staleness import Bound
from scripts.ledger import Books
from tests.buffer.paper import Paper

TWO = {
    "short": {"name": "copy", "digits": 2, "train_size": 6, "heldout_size": 3},
    "long": {"name": "copy", "digits": 4, "train_size": 10, "heldout_size": 5},
}


def mixture(**knobs):
    return build("task", {"name": "mixture", "tasks": TWO, **knobs}, 7)


def test_each_task_keeps_its_prompts_rewards_and_held_out_rows():
    task, alone = mixture(), build("task", TWO["long"], 7)
    assert (task.size("train"), task.size("heldout")) == (16, 8)
    for split, first in (("train", 6), ("heldout", 3)):
        prompt, own = task.prompt(split, first + 2), alone.prompt(split, 2)
        assert prompt.task == "long" and prompt.tokens.tolist() == own.tokens.tolist()
        assert asyncio.run(task.reward(prompt, own.answer)) == 1.0
    assert task.member("train", 5) == ("short", 5) and task.place("heldout", 3) == "long: row 0 of heldout"
    assert sorted(task.rows_beyond("heldout", 1)) == list(range(8))
    with pytest.raises(IndexError):
        task.prompt("heldout", 8)


def test_ratios_hold_after_every_block_and_each_task_has_epochs_of_its_own():
    cursor = PromptCursor(shares_of(mixture(ratios={"short": 0.5, "long": 1.5})), seed=3)
    places = [cursor.next() for _ in range(120)]
    for block in range(30):
        assert Counter(place.task for place in places[4 * block : 4 * block + 4]) == {"short": 1, "long": 3}
    for task, rows in (("short", range(6)), ("long", range(6, 16))):
        drawn = [place.row for place in places if place.task == task]
        epochs = [drawn[at : at + len(rows)] for at in range(0, len(drawn), len(rows))]
        assert all(sorted(epoch) == list(rows) for epoch in epochs) and epochs[0] != epochs[1]


def test_a_prompt_depends_on_the_seed_and_its_place_alone():
    shares = shares_of(mixture())
    forwards = [PromptCursor(shares, seed=3).at(place) for place in range(50)]
    cursor = PromptCursor(shares, seed=3, position=50)
    assert [cursor.at(place) for place in reversed(range(50))] == forwards[::-1], "a resume begins anywhere"
    assert forwards != [PromptCursor(shares, seed=4).at(place) for place in range(50)]


def test_a_single_task_is_one_share_of_all_its_rows():
    task = build("task", {"name": "copy"}, 0)
    assert shares_of(task) == [Share("", 0, task.size("train"), 1)]


def test_a_single_task_has_the_order_that_it_always_had():
    order = [row for epoch in (0, 1) for row in np.random.default_rng([5, epoch]).permutation(9).tolist()]
    cursor = PromptCursor(9, seed=5)
    assert [cursor.next().row for _ in range(18)] == order
    with pytest.raises(ValueError, match="no training prompts"):
        PromptCursor([Share("empty", 0, 0, 1)], seed=0)


def test_ratios_become_the_smallest_whole_numbers():
    assert whole_ratios({"a": 0.2, "b": 0.3, "c": 0.5}) == {"a": 2, "b": 3, "c": 5}
    assert whole_ratios({"a": 4, "b": 6}) == {"a": 2, "b": 3}
    for wrong in ({"a": 0}, {"a": -1.0}, {"a": True}, {"a": float("inf")}, {"a": 1, "b": 0.00001}):
        with pytest.raises(ConfigError, match=r"task\.ratios"):
            whole_ratios(wrong)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("{tasks: {}}", "want name → task"),
        ("{tasks: {mean: copy}}", "'mean' can't name a task"),
        ("{tasks: {a: {name: copy, digts: 3}}}", "no knob 'digts'"),
        ("{tasks: {a: {name: mixture, tasks: {b: copy}}}}", "within a mixture"),
        ("{tasks: {a: copy}, ratios: {b: 1}}", "there is no task 'b'"),
        ("{tasks: {a: copy}, workflows: {a: {name: multi_turns}}}", "there is no workflow 'multi_turns'"),
        ("{tasks: {a: copy}, ratios: {a: 0}}", "must be a number above 0"),
    ],
    ids=["none", "name", "knob", "nested", "ratio", "workflow", "zero"],
)
def test_a_wrong_mixture_is_refused_when_the_config_is_read(knobs: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load(["configs/quickstart.yaml", f"task={{name: mixture, {knobs[1:]}"])


def test_tasks_of_other_tokens_cannot_be_mixed():
    with pytest.raises(ConfigError, match="can't be mixed: vocab_size is 13 and 16"):
        mixture(tasks={"a": "copy", "b": "arithmetic"})


def test_actors_score_by_the_own_verifier_and_roll_out_in_the_own_workflow():
    task, pool = mixture(workflows={"long": {"name": "best_of_n", "n": 2}}), RewardPool(workers=1)
    reward, (short, long) = reward_function(task, pool), (task.prompt("train", 0), task.prompt("train", 6))
    assert [asyncio.run(reward(each, each.answer)) for each in (short, long)] == [1.0, 1.0]
    assert asyncio.run(reward(long, short.answer)) < 1.0

    async def usual(engine, reward, prompt, *rest):
        return "usual"

    class Aborting:
        asked = 0

        async def generate(self, *rest):
            self.asked += 1
            return type("Aborted", (), {"finish": "abort"})

    engine, chosen = Aborting(), for_tasks(usual, task)
    limits = type("L", (), {})
    assert asyncio.run(chosen(engine, reward, short, limits, "s", 0)) == "usual" and not engine.asked
    assert for_tasks(usual, mixture()) is usual


def _group(group_id: int, length: int, reward: float):
    arrays = np.zeros(length + 1, np.int32), np.zeros(length, np.float32), np.ones(length, bool)
    return encode_group(Group(group_id, [Sample(arrays[0], 1, *arrays[1:], [(0, length)], reward, "stop")], {0: "d"}))


def _played() -> tuple[Replay, Paper]:
    """Groups 0, 2, 4 are of one task, 1, 3, 5 of the other; every fate has one."""
    replay, paper = Replay(Bound(3, 2), partial(in_order)), Paper()
    replay.record = paper.append
    for group_id in range(6):
        replay.admit(group_id, group_id, 1, 1, "a", 0, 0.0, task=("sums", "copy")[group_id % 2])
    for group_id, length in [(0, 10), (1, 20), (2, 30)]:
        replay.push(*_group(group_id, length, 0.5 + group_id), 0, 0.0)
    batch = replay.serve(0)
    assert by_task(batch) == {
        **{"groups/copy": 1, "reward/copy": 1.5, "response_length/copy": 20.0},
        **{"groups/sums": 1, "reward/sums": 0.5, "response_length/sums": 10.0},
    }
    replay.finish(0)
    replay.drop(2, "stale")
    replay.drop(3, "rejected")
    return replay, paper


def test_the_ledger_is_conserved_for_each_task_also_across_a_snapshot():
    replay, paper = _played()
    sums = {"admitted": 3, "trained": 1, "filtered": {}, "dropped": {"stale": 1}, "active": 1}
    copy = {"admitted": 3, "trained": 1, "filtered": {}, "dropped": {"rejected": 1}, "active": 1}
    assert replay.store.ledger()["tasks"] == {"sums": sums, "copy": copy}
    snapshot = decode(encode(replay.store.snapshot()))
    again = Replay(Bound(3, 2), partial(in_order))
    again.store.apply(snapshot)
    assert again.store.ledger() == replay.store.ledger()
    again.drop(4, "stale")
    assert again.store.ledger()["tasks"]["sums"] == sums | {"dropped": {"stale": 2}, "active": 0}
    for records in (paper.records, [Record(snapshot)]):
        books = Books()
        books.read(records)
        fates = {task: {fate: each.count for fate, each in found.items()} for task, found in books.tasks.items()}
        assert fates["sums"] == {"trained": 1, "dropped: stale": 1, "active": 1}
        assert sum(fates["copy"].values()) == 3


def test_journals_from_before_mixtures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = [Admit(1, 2, 8, 8, "a", 0), Replay(Bound(3, 2), partial(in_order)).store.snapshot()]
    packed = [msgpack.packb(msgpack.unpackb(encode(each), strict_map_key=False)[:-1]) for each in written]
    monkeypatch.setattr(segment_file, "encode", lambda event: packed[written.index(event)])
    monkeypatch.setattr(segment_file, "MAGIC", b"areal-journal-6\n")
    path = segment_file.path_of(tmp_path, 1)
    file = segment_file.SegmentFile(path, 1, sync=False, new=True)
    file.append([segment_file.pack(event) for event in written])
    assert [record.event for record in segment_file.read(path, cannot_read)] == written
