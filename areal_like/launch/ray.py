"""Runs placed by Ray: one placement group for the learner and the buffer, one for the actors, one host in each place.

A host is a Ray actor that starts one role as a separate process. When a node fails, Ray restarts the host on another
one; the launcher counts the death and starts the role there again. No data of the run goes through Ray's object store.
A node needs this project at the same path with its Python, and the run folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from areal_like.launch.children import GRACE_SECONDS, Children, Launcher, RestartLimits
from areal_like.launch.outcome import RunFailed, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.ray_host import Host
from areal_like.places import REPOSITORY, python_path
from areal_like.run.process import EXIT_NODE_FAILED
from areal_like.wire.bus import own_address

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

LOCAL = "local"
"""The address that always means a new cluster for the run."""
ANSWER_SECONDS = 45.0
"""Seconds that a cluster has to answer, including the start of Python."""
POLL_SECONDS = 0.1
_NONE = 3
_PROBE = f"""
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
except ConnectionError as error:
    print(error, file=sys.stderr)
    sys.exit({_NONE})
print(ray.get_runtime_context().gcs_address)
"""
SECONDS_BETWEEN_ASKING = 1.0
"""Seconds between checks whether a host that Ray moves has arrived."""
SECONDS_OF_WAITING = 1
"""Seconds to wait for places between checks for signals. Ray takes only whole ones: with 0.2 it does not wait."""
CALLS_AT_ONCE = 4
"""Threads of a host: one waits for the end of its role, while others send signals."""
Place = dict[str, float]
"""Resources of a place."""


class RayLauncher(Launcher):
    """`address`: of a cluster. "auto": the cluster of this machine, or else a new one that ends with the run; "local":
    always a new one. `learner_place`, `buffer_place`, `actor_place`: resources of a place, as in Ray's placement
    groups, e.g. {CPU: 8, GPU: 1, high_memory: 1}; without CPU, one per thread; without GPU, those that the
    process computes on. The learner and the buffer share a node if one is large enough; actors are spread.
    `ready_timeout`: seconds to wait for the places."""

    ACROSS_HOSTS = True

    def __init__(
        self,
        run: Path,
        limits: RestartLimits,
        *,
        ready_timeout: Annotated[float, "(0, 1e7]"] = 300.0,  # a node that was busy when it should join tries again
        address: str = "auto",
        learner_place: dict[str, Annotated[float, "[0, inf)"]] | None = None,
        buffer_place: dict[str, Annotated[float, "[0, inf)"]] | None = None,
        actor_place: dict[str, Annotated[float, "[0, inf)"]] | None = None,
    ):
        self.run, self.ready_timeout, self.address = run, ready_timeout, address
        self.running = Children(run, limits, self._spawn, on_nodes=True)
        self._wanted = {"learner": learner_place, "buffer": buffer_place, "actor": actor_place}
        self._groups: list[PlacementGroup] = []
        self._hosts: dict[str, ActorHandle] = {}
        self._held: socket.socket | None = None

    def groups(self, roles: list[RoleSpec]) -> list[tuple[str, list[tuple[str, Place]]]]:
        """(strategy, [(role, resources of its place)]) of each placement group."""
        parts = [("PACK", True), ("SPREAD", False)]
        found = [(how, [(r.name, self._place(r)) for r in roles if r.essential is core]) for how, core in parts]
        return [(how, places) for how, places in found if places]

    def _place(self, role: RoleSpec) -> Place:
        kind = "actor" if not role.essential else "buffer" if role.name == "buffer" else "learner"
        gpus = {"GPU": float(role.gpus)} if role.gpus else {}  # Ray sets CUDA_VISIBLE_DEVICES in the host
        return {"CPU": float(role.threads)} | gpus | dict(self._wanted[kind] or {})

    def placement(self, roles: list[RoleSpec]) -> str:
        lines = [f"Ray cluster: {self.address}"]
        for strategy, places in self.groups(roles):
            lines.append(f"placement group, {strategy}")
            lines += [f"  {name:<12}{_in_words(place)}" for name, place in places]
        return "\n".join(lines) + "\n"

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        if find_spec("ray") is None:
            raise RunFailed("launcher=ray needs Ray: pip install -e '.[ray]'")
        self._connect(roles, check)
        self._reserve(roles, check)
        self._start_hosts(roles)
        # The starter never accepts the hosts' connections: the kernel keeps them, and breaks them however this process
        # ends.
        self._held = socket.create_server((own_address(), 0), backlog=socket.SOMAXCONN)
        self.running.start(roles)

    def _connect(self, roles: list[RoleSpec], check: Callable[[], None]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster started here
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else it starts a process per CPU, for nothing
        address = None if self.address == LOCAL else answering(self.address, check)
        where: dict[str, object] = {"address": address}
        if address is None:
            # Ray binds to all addresses of a host, so without a token any client could have it run any code.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            needed = _sum([place for _, places in self.groups(roles) for _, place in places])
            needed.pop("memory", None)  # it has what this machine has
            where = {"address": LOCAL, "num_cpus": needed.pop("CPU"), "num_gpus": needed.pop("GPU", 0.0)}
            where |= {"resources": needed, "include_dashboard": False}
        import ray

        own = {"PYTHONPATH": python_path()}
        with _handlers_kept():
            try:
                ray.init(**where, log_to_driver=False, logging_level="error", runtime_env={"env_vars": own})
            except Exception as error:  # Ray raises many kinds; a slow start has no kind of its own
                raise RunFailed(f"launcher.address={self.address}: Ray does not start: {error}") from error

    def _reserve(self, roles: list[RoleSpec], check: Callable[[], None]) -> None:
        import ray
        from ray.util.placement_group import placement_group

        deadline = time.monotonic() + self.ready_timeout
        for strategy, places in self.groups(roles):
            group = placement_group([place for _, place in places], strategy=strategy)
            self._groups.append(group)
            while not group.wait(SECONDS_OF_WAITING):
                check()
                if time.monotonic() >= deadline:
                    raise RunFailed(
                        f"Ray has had no place for {', '.join(name for name, _ in places)} for "
                        f"{self.ready_timeout:.0f} s (launcher.ready_timeout). Asked for: "
                        f"{_in_words(_sum([place for _, place in places]))}; the cluster has "
                        f"{_in_words(ray.cluster_resources())}, free: {_in_words(ray.available_resources())}"
                    )

    def _start_hosts(self, roles: list[RoleSpec]) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for group, (_, places) in zip(self._groups, self.groups(roles), strict=True):
            for number, (name, place) in enumerate(places):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
                options: dict[str, object] = {"num_cpus": place["CPU"], "num_gpus": place.get("GPU", 0.0)}
                options |= {"max_restarts": -1, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": where}
                self._hosts[name] = ray.remote(Host).options(**options).remote()

    def _spawn(self, role: RoleSpec, name: str) -> RayProcess:
        assert self._held
        command = ["-m", role.module, *role.arguments(self.run, name), "--grace", str(GRACE_SECONDS)]
        log = str(self.run.resolve() / "logs" / name)
        return RayProcess(self._hosts[role.name], name, (command, role.threads, log, self._held.getsockname()))

    def stop(self) -> None:
        self.running.end()
        if "ray" in sys.modules and (ray := sys.modules["ray"]).is_initialized():
            for group in self._groups:
                ray.util.remove_placement_group(group)  # this ends its hosts, too
            with _handlers_kept():
                ray.shutdown()
        if self._held:
            self._held.close()


class RayProcess:
    pid = 0

    def __init__(self, host: ActorHandle, name: str, what: tuple[list[str], int, str, tuple[str, int]]):
        self._host, self._name, self._what = host, name, what
        self._ended: ObjectRef | None = None
        self._begin()

    def _begin(self) -> None:
        self._begun, self._asked_at = self._host.begin.remote(*self._what), time.monotonic()

    def poll(self) -> int | None:
        """Its exit code; None while it runs, or while Ray moves its host to another node."""
        import ray

        if not ray.wait([self._ended or self._begun], timeout=0)[0]:
            return None
        try:
            if self._ended:
                code: int = ray.get(self._ended)
                return code
            ray.get(self._begun)
            self._ended = self._host.wait.remote()
        except ray.exceptions.RayActorError as error:
            if self._ended:
                return EXIT_NODE_FAILED
            if error.actor_init_failed:
                reason = str(error).strip().splitlines()[-1].strip()
                raise RunFailed(
                    f"{self._name} has a place on a node where its host can't start ({reason}): does the node have "
                    f"this project at {REPOSITORY}, with its Python and packages?"
                ) from None
            if time.monotonic() - self._asked_at > SECONDS_BETWEEN_ASKING:
                self._begin()
        return None

    def end(self, number: signal.Signals) -> None:
        self._host.signal.remote(int(number), True)

    def send_signal(self, number: signal.Signals) -> None:
        self._host.signal.remote(int(number), False)

    def wait(self, timeout: float = 5.0) -> None:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self._ended and self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["a role's process"], timeout)
            time.sleep(0.02)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the starter's signal handlers, which Ray replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def answering(address: str, check: Callable[[], None], seconds: float = ANSWER_SECONDS) -> str | None:
    """The address of the cluster that `address` means; None: "auto" found none. Calls `check` while it waits. Raises
    RunFailed. Another process asks: Ray waits without limit and ignores signals."""
    command = [sys.executable, "-c", _PROBE, address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asking = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + seconds
    try:
        while (code := asking.poll()) is None and time.monotonic() < deadline:
            check()
            time.sleep(POLL_SECONDS)
    finally:
        asking.kill()
        out, errors = asking.communicate()
    if code == 0:
        return str(out.split()[-1])
    if code == _NONE and address == "auto":
        return None
    which = "the Ray cluster that this machine belongs to" if address == "auto" else f"launcher.address={address}"
    last = " ".join(errors.strip().rpartition("\n")[2].split()) or "it printed nothing"
    how = f"no answer within {seconds:.0f} s" if code is None else f"no Ray cluster answers there ({last})"
    token = "Unauthenticated" in errors or "AuthToken" in errors
    more = "; it wants a token (RAY_AUTH_MODE, RAY_AUTH_TOKEN): is it another user's?" if token else ""
    raise RunFailed(f"{which}: {how}{more}; launcher.address={LOCAL} starts one of the run's own")


def _sum(places: list[Place]) -> Place:
    total = Counter[str]()
    for place in places:
        total.update(place)  # it adds floats as well
    return dict(total)


def _in_words(place: Mapping[str, float]) -> str:
    """The resources in words, without those that Ray adds (node:…, resources of placement groups)."""
    theirs = (":", "_group_", "object_store_memory")
    shown = {name: amount for name, amount in place.items() if not any(each in name for each in theirs)}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
