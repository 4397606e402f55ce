"""Actors that may have room: the order in which they are asked, and what is remembered of them."""

from buffer.actor import Actor
from buffer.fleet import Fleet
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


def test_an_actor_is_silent_after_its_time_and_not_at_it() -> None:
    fleet, one = Fleet(), actor(0)
    one.seen = 10.0
    fleet.by_name[one.name] = one
    assert fleet.silent(13.0, timeout=3.0) == [] and fleet.silent(13.5, timeout=3.0) == [one]


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
