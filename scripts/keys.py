"""Make encryption keys for buffer, learner, actors and operators: `areal-like keys FOLDER`. None is overwritten.

A run on TCP without named keys makes its own (`keys/` in the run folder). Make a folder for keys that outlive runs, or
for machines that do not see the run folder; keep it outside of the run folders. `wire/keys.py` describes its files.
"""

import sys
from pathlib import Path

from areal_like.config.run_config import ConfigError
from areal_like.wire import keys
from areal_like.wire.messages import SENDS

from .console.arguments import command, refusing


def main(argv: list[str] | None = None) -> int:
    parser = command("keys", __doc__, "example:  areal-like train quickstart security.key_folder=~/keys")
    parser.add_argument("folder", type=Path, help="folder for the keys; created if missing")
    parser.add_argument("--client", metavar="NAME", help="client to add, whose machine needs FOLDER/NAME")
    what = "rights of the client: actor (default), operator (status and stop), observer (status), learner"
    parser.add_argument("--role", choices=list(SENDS), default="actor", help=what)
    args = parser.parse_args(argv)
    with refusing():
        if args.folder.is_file():
            raise ConfigError(f"{args.folder}: got a file, expected a folder for the keys; name a new one")
        if args.client:
            place = keys.add_client(args.folder, args.client, args.role)
            print(f"copy {place} to the client's machine, for its security.key_folder")
        else:
            keys.make(args.folder)
            print(f"keys are in {args.folder}: train with security.key_folder={args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
