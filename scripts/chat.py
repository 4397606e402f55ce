"""Talk to a model in the terminal: `python -m scripts.chat MODEL`; MODEL is a run's folder or a Hugging Face folder.

Answers appear as they are written. `/new` begins another conversation, `/quit` (or Ctrl-D) ends; Ctrl-C stops an
answer. Lines may come from a pipe. A run whose task has no tokenizer (copy, arithmetic) is asked in the task's own
characters, and each line is a conversation of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.config.run_config import ConfigError
from areal_like.errors import UserError

from .console.arguments import amount, command, positive, refuse
from .console.output import visible
from .eval import model_folder, run_of

if TYPE_CHECKING:
    import numpy as np

    from areal_like.interfaces import Codec

LOOK_SECONDS = 0.05
"""Seconds between two reads of the engine's output."""
NAME = "answer"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command("chat", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run's folder, or a model's (config.json)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=amount, default=0.7, help="0: greedy (default: 0.7)")
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the answers")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    return parser.parse_args(argv)


@dataclass
class Talk:
    """A conversation: its tokens so far, as messages those that were answered, and whether the last answer ended by
    itself."""

    codec: Codec
    stop: tuple[int, ...]
    system: str | None
    remembers: bool
    tokens: np.ndarray | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    closed: bool = True
    answers: int = field(default=0)

    def hear(self, text: str) -> np.ndarray:
        """The tokens that the model continues. Raises ValueError for text that the model has no tokens for."""
        import numpy as np

        from actors.transcript import rewrites

        if self.tokens is None or not self.remembers:
            self.messages = [{"role": "system", "content": self.system}] if self.system else []
            self.tokens = None
        self.asked = {"role": "user", "content": text}
        if self.tokens is None or rewrites(self.codec, self.messages[-1]["content"], [self.asked]):
            self.tokens = self.codec.opening([*self.messages, self.asked])
        else:
            self.tokens = np.concatenate([self.tokens, self.codec.reply(text, closed=self.closed)])
        return self.tokens

    def say(self, tokens: np.ndarray, closed: bool) -> None:
        import numpy as np

        assert self.tokens is not None
        self.tokens, self.closed = np.concatenate([self.tokens, tokens]), closed
        self.messages += [self.asked, {"role": "assistant", "content": self.codec.decode(tokens)}]
        self.answers += 1


@dataclass(frozen=True)
class Speech:
    """How a model's text becomes tokens. `longest`: of a response, where its task says; `tokenizer`: transformers', if
    the model has one of its own."""

    codec: Codec
    stop: tuple[int, ...]
    longest: int | None = None
    tokenizer: Any = None


def speech_of(given: Path, model: Path) -> Speech:
    """The model's text: its own tokenizer's, or that of the run's task. Raises ConfigError, ValueError, OSError."""
    if (model / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        from areal_like.tasks.chat import TokenizerCodec, stop_tokens

        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        codec = TokenizerCodec(tokenizer, chat=bool(tokenizer.chat_template))
        return Speech(codec, stop_tokens(model, tokenizer), tokenizer=tokenizer)
    from areal_like.config.registry import build

    run = run_of(given)
    task = build("task", run.task, run.run.seed) if run else None
    prompt = task.prompt("heldout", 0) if task else None
    if task is None or prompt is None or prompt.codec is None:
        raise ConfigError(f"{model} has no tokenizer (tokenizer_config.json is missing), and no task that has text")
    print(f"the task's own text, e.g. {prompt.codec.decode(prompt.tokens)!r}", file=sys.stderr)
    return Speech(prompt.codec, tuple(task.stop_tokens), prompt.max_tokens)


def talk_of(args: argparse.Namespace, model: Path) -> Talk:
    """Raises ConfigError, ValueError, OSError."""
    speech = speech_of(args.model, model)
    if speech.tokenizer is not None:
        return Talk(speech.codec, speech.stop, args.system, remembers=True)
    args.max_tokens = min(args.max_tokens, speech.longest or args.max_tokens)
    return Talk(speech.codec, speech.stop, None, remembers=False)


async def answer(engine: Any, talk: Talk, text: str, args: argparse.Namespace) -> None:
    """Print the model's answer as it is written. Raises ValueError."""
    from areal_like.sampling import stream_key
    from areal_like.types import Limits

    before = talk.tokens
    prompt = talk.hear(text)
    limits = Limits(
        args.max_tokens, args.temperature, talk.stop, key=stream_key(args.seed, talk.answers), trained=False
    )
    writing = asyncio.ensure_future(engine.generate(prompt, limits, NAME))
    shown = ""
    try:
        while not writing.done():
            await asyncio.wait([writing], timeout=LOOK_SECONDS)
            if not writing.done():
                shown = _print_more(shown, talk.codec.decode(engine.so_far(NAME)), whole=False)
        said = writing.result()
    except BaseException:
        writing.cancel()
        talk.tokens = before  # as if the line had not been sent
        raise
    talk.say(said.tokens, closed=said.finish == "stop")
    _print_more(shown, talk.codec.decode(said.tokens), whole=True)
    print(" …" if said.finish == "length" and talk.stop else "", flush=True)


def _print_more(shown: str, text: str, *, whole: bool) -> str:
    """Print what is new in `text`; returns all that is printed so far. The last character may be incomplete."""
    text = text if whole else text.rstrip("\ufffd")
    if text.startswith(shown):
        print(visible(text[len(shown) :]), end="", flush=True)
        return text
    return shown


def converse(engine: Any, talk: Talk, args: argparse.Namespace) -> None:
    """Read lines until the end of input."""
    asked = "> " if sys.stdin.isatty() else ""
    with asyncio.Runner() as runner:
        try:
            while True:
                line = input(asked).strip()
                if line == "/quit":
                    break
                if line == "/new":
                    talk.tokens = None
                elif line:
                    _say(runner, engine, talk, line, args)
        except EOFError:
            print(end="\n" if asked else "")
        finally:
            runner.run(engine.close())


def _say(runner: asyncio.Runner, engine: Any, talk: Talk, line: str, args: argparse.Namespace) -> None:
    try:
        runner.run(answer(engine, talk, line, args))
    except KeyboardInterrupt:
        print(" (stopped)")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        folder = model_folder(args.model)
        import torch
        from transformers.utils import logging

        from actors.engines.torch_engine import TorchEngine
        from areal_like.config.registry import build

        logging.disable_progress_bar()
        if args.threads:
            torch.set_num_threads(args.threads)
        talk = talk_of(args, folder)
        model = build("model", {"name": "folder", "path": str(folder)}, args.seed, 1)
    except (UserError, ValueError, OSError) as error:
        refuse(error)
    try:
        converse(TorchEngine(model, slots=1), talk, args)
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
