"""Actors that may have room: the order in which they are asked, and what is remembered of them."""

from buffer.actor import MOST_MOVED, Actor
from buffer.ready import SLACK, Ready


def actor(number: int, version: int = 0) -> Actor:
    return Actor(f"actor-{number}", b"", slots=1 << 30, seen=0.0, version=version, number=number)


def names(ready: Ready, actors: list[Actor]) -> list[str]:
    """In the order in which they are asked; each gets nothing."""
    ready.begin(1, actors, ())
    found = []
    while one := ready.first():
        found.append(one.name)
        ready.skip(one)
    return found


def test_the_fewest_groups_first_and_old_places_are_forgotten() -> None:
    actors, ready = [actor(0), actor(1, version=1), actor(2)], Ready()
    for each in actors:
        ready.touch(each)
    for turn in range(5 * SLACK):  # one actor changes all the time, the others keep their places
        actors[0].lease(turn, 1, 0.0)
        ready.touch(actors[0])
        ready.begin(1, actors, ())
        assert len(ready._queues[0]) <= 2 * 2 + SLACK + 1
    assert names(ready, actors) == ["actor-1", "actor-2", "actor-0"]


def test_an_actor_remembers_when_its_running_groups_moved_and_forgets_the_others() -> None:
    one = actor(0)
    for group_id in range(3 * MOST_MOVED):
        one.lease(group_id, 1, float(group_id))
        if group_id > 1:
            one.running.discard(group_id)
    assert len(one.moved) <= MOST_MOVED + 8
    assert (one.moved[0], one.moved[1]) == (0.0, 1.0)
