"""Make encryption keys: `python -m scripts.keys FOLDER`, then train with `security.key_folder=FOLDER`.

With keys every connection is encrypted and authenticated (CURVE), and each key says what its holder may do. A run on
TCP for which none are named makes its own (`keys/` in the run folder); make a folder for keys that outlive runs, or for
machines that do not see the run folder. Keep it outside of the run folders; what is in it: `areal_like/keys.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_like import keys
from areal_like.wire import MAY_SAY


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.keys",
        description="Make the keys of the buffer (server) and of those who connect to it (learner, actor, operator). "
        "Nothing that exists is overwritten.",
        epilog="examples:  python -m scripts.keys ~/keys   "
        "python -m scripts.train configs/quickstart.yaml security.key_folder=~/keys",
    )
    parser.add_argument("folder", type=Path, help="where to put them; made if it is not there")
    parser.add_argument(
        "--client",
        metavar="NAME",
        help="let one more client in, with keys of its own: FOLDER/NAME is what its machine needs, and removing "
        "FOLDER/clients/NAME.key shuts it out",
    )
    parser.add_argument(
        "--role",
        choices=list(MAY_SAY),
        default="actor",
        help="what that client may do: roll out (actor, the default; it may look in, too), look in and stop the run "
        "(operator), look in (observer), or train (learner)",
    )
    args = parser.parse_args(argv)
    try:
        if args.client:
            place = keys.add_client(args.folder, args.client, args.role)
            print(f"copy {place} to the client's machine, for its security.key_folder")
        else:
            keys.make(args.folder)
            print(f"keys are in {args.folder}: train with security.key_folder={args.folder}")
    except (keys.KeysError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
