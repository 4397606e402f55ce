"""An engine that fails with an error that only a real start can find."""

from actors.engines.timed_engine import TimedEngine


class FailingEngine(TimedEngine):
    def __init__(self, *, base: float = 0.001, median: float = 2.0, broken: bool = False):
        super().__init__(base=base, median=median)
        if broken:
            raise RuntimeError("this engine is broken")
