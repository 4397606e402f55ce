"""A launcher whose processes find the buffer through a proxy: `launcher.name=tests.faults.proxied:ProxiedLauncher`."""

import json
import time

from areal_like.launch.forks import Forked
from areal_like.launch.group import ProcessGroup
from areal_like.launch.local import LocalLauncher
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import RestartLimits
from areal_like.run.run_folder import RENDEZVOUS


class ProxiedLauncher(LocalLauncher):
    """`proxy` is the endpoint to use instead of the buffer's own. The plan starts the buffer first."""

    def __init__(self, run, limits: RestartLimits, *, proxy: str):
        super().__init__(run, limits)
        self.proxy = proxy

    def spawn(self, role: RoleSpec, name: str) -> ProcessGroup | Forked:
        if role.name != "buffer":
            self._put_proxy_between()
        return super().spawn(role, name)

    def _put_proxy_between(self) -> None:
        offer = self.running.run / RENDEZVOUS / "buffer.json"
        deadline = time.monotonic() + 60
        while not offer.exists():
            assert time.monotonic() < deadline, "the buffer did not come up"
            time.sleep(0.01)
        beside = offer.with_suffix(".proxied")
        beside.write_text(json.dumps(json.loads(offer.read_text()) | {"endpoint": self.proxy}))
        beside.replace(offer)
