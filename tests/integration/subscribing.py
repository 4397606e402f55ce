"""A process that follows weights, and hands them on: announcements come as lines of JSON, and so go the answers.

python -m tests.integration.subscribing NAME ENDPOINT
"""

import asyncio
import json
import sys

import msgspec

from actors.relay import Relay
from actors.subscriber import Subscriber
from areal_like.weights.update import Update
from areal_like.wire.messages import Manifest


class Engine:
    version, digest = -1, ""

    async def load(self, update: Update) -> None:
        assert update.state.digest() == update.digest
        self.version, self.digest = update.version, update.digest


async def main(name: str, endpoint: str) -> None:
    engine = Engine()

    def tell(*_: object) -> None:
        said = {"version": engine.version, "digest": engine.digest, **subscriber.stats()}
        print(json.dumps(said), flush=True)

    subscriber = Subscriber(engine, name, tell)
    subscriber.relay = Relay(endpoint, lambda: subscriber.sources.received, keep=8, snapshot_every=50)
    print(json.dumps(msgspec.structs.asdict(subscriber.relay.offer)), flush=True)
    task = asyncio.create_task(subscriber.run())
    while line := await asyncio.to_thread(sys.stdin.readline):
        subscriber.announce(msgspec.json.decode(line, type=Manifest))
    task.cancel()
    subscriber.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
