"""Which silence of a lease is legitimate, and which leases a heartbeat reports."""

from types import SimpleNamespace

import pytest

from actors.progress import MOST_REPORTED, Progress
from actors.recorder import Recorder


class Engine:
    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.made = 0.0

    def step(self, *names: str) -> None:
        for name in names:
            self.running[name] = self.running.get(name, 0) + 1
        self.made += len(names)

    def progress(self) -> dict[str, int]:
        return self.running

    def stats(self) -> dict[str, float]:
        return {"tokens": self.made}


def begun(engine=None) -> tuple[Engine, dict[int, list], Progress]:
    """Leases 1 and 2 of one sample each, which wait for the engine."""
    engine = engine or Engine()
    recorders = [Recorder(engine, None), Recorder(engine, None)]  # type: ignore[arg-type]
    for recorder in recorders:
        recorder._open = 1
    leases = {number: [(f"{number}/0", recorder)] for number, recorder in enumerate(recorders, 1)}
    progress = Progress(engine)
    assert progress.moved(leases) == {1: 0, 2: 0}, "new ones"
    return engine, leases, progress


def test_tokens_move_their_own_lease_and_a_request_that_waits_for_a_place_moves_as_long_as_the_engine_does() -> None:
    engine, leases, progress = begun()
    engine.step("1/0")
    assert progress.moved(leases) == {1: 1, 2: 0}
    assert progress.moved(leases) == {}, "the engine hangs"
    engine.step("1/0", "2/0")
    assert progress.moved(leases) == {1: 2, 2: 1}
    engine.step("2/0")
    assert progress.moved(leases) == {2: 2}, "one request hangs"


@pytest.mark.parametrize("has_limit", [True, False])
def test_code_with_a_limit_of_its_own_and_answers_are_progress(has_limit: bool) -> None:
    engine, leases, progress = begun()
    engine.step("1/0", "2/0")
    progress.moved(leases)
    ((_, recorder),) = leases[1]
    recorder._open, recorder.tokens, recorder.answers = 0, 1, 1
    assert progress.moved(leases) == {1: 1}, "an answer"
    recorder._limited = int(has_limit)
    assert progress.moved(leases) == ({1: 1} if has_limit else {}) == progress.moved(leases)


def test_an_engine_without_the_report_is_trusted_while_a_call_is_open() -> None:
    _, leases, progress = begun(SimpleNamespace(stats=lambda: {}))
    assert progress.moved(leases) == {1: 0, 2: 0} == progress.moved(leases)


def test_a_heartbeat_reports_some_and_the_next_one_the_others() -> None:
    _, leases, progress = begun(SimpleNamespace(stats=lambda: {}))
    many = {number: leases[1] for number in range(MOST_REPORTED + 9)}
    first, second = progress.moved(many), progress.moved(many)
    assert len(first) == MOST_REPORTED and first.keys() | second.keys() == many.keys()
