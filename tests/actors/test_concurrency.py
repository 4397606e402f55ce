"""The number of concurrent sequences follows the engine's reports about memory."""

import asyncio
import random

from actors.engines.concurrency import INTERVAL, AdaptiveSemaphore, Concurrency


def test_half_of_what_ran_at_once_and_one_more_after_each_stretch_of_peace() -> None:
    planner = Concurrency(16)
    planner.pressed(12)
    assert planner.limit == 6
    for _ in range(INTERVAL - 1):
        planner.step()
    assert planner.limit == 6
    planner.step()
    assert planner.limit == 7
    planner.pressed(7)
    for _ in range(INTERVAL - 1):
        planner.step()
    assert planner.limit == 3, "peace begins anew"
    planner.pressed(1)
    assert planner.limit == 1
    for _ in range(100 * INTERVAL):
        planner.step()
    assert planner.limit == 16


def test_it_settles_near_what_there_is_room_for() -> None:
    """With room for about 20 of 64, the limit moves up and down between half of that and all of it."""
    planner, dice, seen = Concurrency(64), random.Random(0), []
    for _ in range(20_000):
        room = dice.choice((19, 20, 21))
        if planner.limit > room:
            planner.pressed(planner.limit)
        planner.step()
        seen.append(planner.limit)
    late = seen[5000:]
    assert 12 < sum(late) / len(late) < 19 and max(late) <= 21 and min(late) >= 9


def test_places_are_given_in_order_and_as_many_as_the_rule_allows() -> None:
    async def stay(number: int) -> None:
        async with places:
            inside.append(number)
            await leave.get()

    async def settled() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def check() -> None:
        stays = [asyncio.create_task(stay(number)) for number in range(8)]
        await settled()
        assert inside == [0, 1, 2, 3]
        places.note(2)
        assert places.limit == 2
        leave.put_nowait(None)
        leave.put_nowait(None)
        await settled()
        assert inside == [0, 1, 2, 3], "those that were inside keep their places, and nobody comes in their stead"
        leave.put_nowait(None)
        await settled()
        assert inside == [0, 1, 2, 3, 4]
        places.note(0)
        await settled()
        assert places.limit == 3 and inside == [0, 1, 2, 3, 4, 5]
        for _ in range(20):
            places.note(0)
            leave.put_nowait(None)
        await asyncio.gather(*stays)
        assert places.limit == 4 and inside == list(range(8))

    places, inside = AdaptiveSemaphore(4), list[int]()
    leave = asyncio.Queue[None]()
    asyncio.run(check())


def test_what_ran_at_most_since_the_last_look_was_too_much_though_it_has_ended() -> None:
    async def stay() -> None:
        async with places:
            await leave.wait()

    async def check() -> None:
        stays = [asyncio.create_task(stay()) for _ in range(10)]
        await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(*stays)
        places.note(1)
        assert places.limit == 4
        places.note(0)
        assert places.limit == 5

    places, leave = AdaptiveSemaphore(8), asyncio.Event()
    asyncio.run(check())


def test_no_place_is_lost_whoever_is_cancelled_when() -> None:
    async def stay(places: AdaptiveSemaphore, turns: int) -> None:
        async with places:
            for _ in range(turns):
                await asyncio.sleep(0)

    async def check(dice: random.Random) -> None:
        places = AdaptiveSemaphore(3)
        stays = [asyncio.create_task(stay(places, dice.randrange(4))) for _ in range(30)]
        for _ in range(40):
            dice.choice(stays).cancel()
            if dice.random() < 0.3:
                places.note(dice.randrange(2))
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*stays, return_exceptions=True), 10)
        for _ in range(3):
            places.note(0)
        assert (places.limit, places._taken, len(places._waiting)) == (3, 0, 0)

    for seed in range(200):
        asyncio.run(check(random.Random(seed)))
