"""Serve a model as an OpenAI-compatible endpoint: `python -m scripts.serve MODEL`; MODEL is a run's or a Hugging Face
folder.

For evaluation harnesses (lm-eval), judges (`group_reward=judge`), agents, the openai package. It answers
/v1/chat/completions, on this machine only, until Ctrl-C. From
elsewhere forward the port: `ssh -L 8000:127.0.0.1:8000 HOST`. The embedded engine computes.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from areal_like.errors import UserError

from .chat import Speech, speech_of
from .console.arguments import command, positive, refuse
from .eval import model_folder


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("serve", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run's folder, or a model's (config.json)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--slots", type=positive, default=64, help="sequences at once (default: 64)")
    parser.add_argument("--max-tokens", type=positive, default=512, help="of a chat answer, if a request does not say")
    parser.add_argument("--seed", type=int, default=0, help="seed of the answers")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    return parser.parse_args(argv)


async def serve(args: argparse.Namespace, model: Any, speech: Speech) -> None:
    """Until a signal ends it. Raises OSError if the port is taken."""
    from actors.agents.checkpoint import CheckpointServer
    from actors.engines.torch_engine import TorchEngine

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    engine = TorchEngine(model, slots=args.slots)
    positions, name = model.config.max_position_embeddings, args.model.resolve().name
    knobs = {"seed": args.seed, "longest": args.max_tokens}
    checkpoint = CheckpointServer(engine, speech.codec, speech.stop, positions, name, **knobs)
    try:
        async with checkpoint.served(args.port) as url:
            print(f"serving {args.model} at {url} (Ctrl-C ends)", flush=True)
            await ended.wait()
    finally:
        await engine.close()


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        folder = model_folder(args.model)
        import torch
        from transformers.utils import logging

        from areal_like.config.registry import build

        logging.disable_progress_bar()
        if args.threads:
            torch.set_num_threads(args.threads)
        model = build("model", {"name": "folder", "path": str(folder)}, args.seed, 1)
        asyncio.run(serve(args, model, speech_of(args.model, folder)))
    except (UserError, ValueError, OSError) as error:
        refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
