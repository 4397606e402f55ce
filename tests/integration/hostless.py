"""A Ray launcher whose hosts can't start, as on nodes without the project."""

from __future__ import annotations

from areal_like.launch.ray import RayLauncher
from areal_like.launch.ray_host import Host


class BrokenHost(Host):
    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'areal_like'")


class HostlessLauncher(RayLauncher):
    HOST = BrokenHost
