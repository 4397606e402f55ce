"""Serve a model as an OpenAI-compatible endpoint: `areal-like serve MODEL`; MODEL is a run's or a Hugging Face folder.

For evaluation harnesses (lm-eval), judges (examples/judge), agents, the openai package. It answers
/v1/chat/completions, on this machine only, until Ctrl-C. From elsewhere: `ssh -L 8000:127.0.0.1:8000 HOST`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.config.registry import build
from areal_like.config.run_config import ConfigError

from .console.arguments import command, port, positive, refusing
from .eval import model_folder, run_of

if TYPE_CHECKING:
    from areal_like.interfaces import Codec


def codec_of(given: Path, model: Path) -> tuple[Codec, tuple[int, ...]]:
    """The codec and the tokens that end answers: of the model's tokenizer, or its run's task. Raises ValueError."""
    from areal_like.tasks.chat import TokenizerCodec, stop_tokens

    if (model / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        stops = stop_tokens(model, tokenizer)
        return TokenizerCodec(tokenizer, bool(tokenizer.chat_template), stops), stops
    run = run_of(given)
    task = build("task", run.task, run.run.seed) if run else None
    codec = task.prompt("heldout", 0).codec if task else None
    if task is None or codec is None:
        raise ConfigError(f"{model} has no tokenizer (tokenizer_config.json is missing), and no task that has text")
    return codec, tuple(task.stop_tokens)


async def serve(args: argparse.Namespace, model: Any, codec: Codec, stop: tuple[int, ...]) -> None:
    """Until a signal ends it. Raises OSError if the port is taken."""
    from actors.agents.checkpoint import CheckpointServer
    from actors.engines.torch_engine import TorchEngine
    from areal_like.models.model_folder import bounds

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    engine = TorchEngine(model, slots=args.slots)
    positions, name = min(bounds(model.config, embedded=True).values()), args.model.resolve().name
    checkpoint = CheckpointServer(engine, codec, stop, positions, name, seed=args.seed, longest=args.max_tokens)
    try:
        async with checkpoint.served(args.port) as url:
            print(f"serving {args.model} at {url} (Ctrl-C ends)", flush=True)
            await ended.wait()
    finally:
        await engine.close()


def main(argv: list[str] | None = None) -> int:
    parser = command("serve", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run's folder, or a model's (config.json)")
    parser.add_argument("--port", type=port, default=8000, help="port; 0: any free one (default: 8000)")
    parser.add_argument("--slots", type=positive, default=64, help="sequences at once (default: 64)")
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the answers (default: 0)")
    args = parser.parse_args(argv)
    with refusing():
        if find_spec("aiohttp") is None:
            raise ConfigError("serve needs aiohttp: pip install 'areal_like[openai]'")
        folder = model_folder(args.model)
        model = build("model", {"name": "folder", "path": str(folder)}, args.seed, 1)
        asyncio.run(serve(args, model, *codec_of(args.model, folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
