"""The buffer process on loopback TCP without keys, for a fair comparison with queues that have none. No run uses it;
only `scripts.bench.buffer_paths` starts it."""

from __future__ import annotations

import dataclasses

from areal_like.run.process import Role, run_role
from buffer.main import main


class OpenRole(Role):
    """One that binds to loopback TCP, open to this machine."""

    def endpoint(self, service: str) -> str:
        tcp = self.config.buffer.transport == "tcp" and not self.keys
        return "tcp://127.0.0.1:0" if tcp else super().endpoint(service)


def open_main(role: Role) -> None:
    main(OpenRole(**{field.name: getattr(role, field.name) for field in dataclasses.fields(role)}))


if __name__ == "__main__":
    run_role(open_main)
