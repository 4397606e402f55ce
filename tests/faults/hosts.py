"""Network namespaces as hosts, each with its own address, and a switch between them that delays and drops packets.

The switch is a thread of the test that carries packets between TUN devices, one per host, so what it does to them is
mended, or not, by the kernel's own TCP. (tc's netem does that too, where the kernel has it.) Needs root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_like.launch.children import Children
from areal_like.launch.forks import Forked
from areal_like.launch.group import ProcessGroup
from areal_like.launch.local import spawn_role
from areal_like.launch.outcome import nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import RestartLimits
from tests.faults.on_host import enter

HERE = "here"
"""The host on which the test itself is."""
MTU = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def missing() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"areal-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"there can be no network namespaces here: {error}"
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Hosts `names`, and `HERE`. A packet takes `delay` seconds and is lost with probability `loss`."""

    def __init__(self, names: Sequence[str], delay: float, loss: float):
        self.delay, self.loss = delay, loss
        self.carried = self.lost = 0
        dice = random.Random()
        self._net = f"10.{dice.randrange(64, 250)}.{dice.randrange(1, 250)}"
        self._device = f"areal{dice.randrange(10**6)}"
        self.namespaces = {name: f"{self._device}-{name}" for name in names}
        self._islands: list[set[str]] = []
        self._port_of: dict[bytes, tuple[str, int]] = {}
        self._stopped = threading.Event()
        for number, name in enumerate([HERE, *names], 1):
            self._add(name, f"{self._net}.{number}")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _add(self, name: str, address: str) -> None:
        where = [] if name == HERE else ["-n", self.namespaces[name]]
        if where:
            ip("netns", "add", self.namespaces[name])
        opened = threading.Thread(target=self._open, args=(name, address))  # setns is of one thread
        opened.start()
        opened.join()
        ip(*where, "link", "set", self._device, "mtu", str(MTU), "up")
        ip(*where, "addr", "add", f"{address}/24", "dev", self._device)
        if where:
            ip(*where, "link", "set", "lo", "up")
            ip(*where, "route", "add", "default", "dev", self._device)

    def _open(self, name: str, address: str) -> None:
        if name != HERE:
            enter(self.namespaces[name])
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH", self._device.encode(), _IFF_TUN | _IFF_NO_PI))
        self._port_of[bytes(map(int, address.split(".")))] = (name, port)

    def part(self, *island: str) -> None:
        """Stop all traffic between these hosts and the others."""
        self._islands = [set(island)]

    def heal(self) -> None:
        self._islands = []

    def _carry(self) -> None:
        ports = {port: name for name, port in self._port_of.values()}
        on_the_way: list[tuple[float, int, int, bytes]] = []
        dice, number = random.Random(0), 0
        while not self._stopped.is_set():
            wait = min(0.1, on_the_way[0][0] - time.monotonic()) if on_the_way else 0.1
            for port in select.select(list(ports), [], [], max(0.0, wait))[0]:
                packet = os.read(port, MTU + 100)
                name, to = self._port_of.get(packet[16:20], ("", -1)) if packet[0] >> 4 == 4 else ("", -1)
                if to < 0:
                    continue
                number += 1
                cut = any((name in island) != (ports[port] in island) for island in self._islands)
                if cut or dice.random() < self.loss:
                    self.lost += 1
                else:
                    heapq.heappush(on_the_way, (time.monotonic() + self.delay, number, to, packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(on_the_way)
                self.carried += 1
                with contextlib.suppress(OSError):  # its queue is full: so is a real one at times
                    os.write(to, packet)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for _, port in self._port_of.values():
            os.close(port)
        for space in self.namespaces.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


class HostsLauncher:
    """`namespaces` of the roles, by name: `launcher.name=tests.faults.hosts:HostsLauncher`."""

    ACROSS_HOSTS = True
    ONE_PROCESS = False

    def __init__(self, run: Path, limits: RestartLimits, *, namespaces: dict[str, str], ready_timeout: float = 120.0):
        self.ready_timeout, self.namespaces = ready_timeout, namespaces
        self.running = Children(run, limits, self._spawn)

    def submission(self, roles: list[RoleSpec]) -> None:
        """The command that starts all processes."""

    def placement(self, roles: list[RoleSpec]) -> str:
        return ""

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        self.running.start(roles, check)

    def stop(self) -> None:
        self.running.end()

    def _spawn(self, role: RoleSpec, name: str) -> ProcessGroup | Forked:
        there = dataclasses.replace(role, module="tests.faults.on_host")
        return spawn_role(self.running.run, there, name, first=(role.module, self.namespaces[name]))
