#!/usr/bin/env bash
# Makes a virtual environment in which the real SGLang server runs without a GPU, for tests (tests/sglang) and trials.
#   setup_sglang_cpu.sh VENV
# A plain `pip install -e .[sglang]` is for machines with a GPU: it brings gigabytes of CUDA. Here SGLang comes without
# its dependencies. Those that a CPU can use are installed next; inert stand-ins (tests/sglang/stand_ins.py) replace the
# rest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install="bash scripts/install.sh $venv -c constraints-sglang.txt"
needs="aiohttp compressed-tensors dill einops fastapi gguf ipython jsonschema msgspec openai orjson partial_json_parser
    pillow psutil pybase64 python-multipart requests sentencepiece soundfile uvicorn uvloop"
echo "== installing SGLang for the CPU into $venv"
# The project's own torch: SGLang's pin is the release that it is built for, and nothing is built here.
$install "$(grep '^torch==' constraints.txt)" $needs -e ".[dev]"
$install --no-deps sglang xgrammar apache-tvm-ffi
packages=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp tests/sglang/stand_ins.py "$packages/sglang_cpu_stand_ins.py"
echo "import sglang_cpu_stand_ins" > "$packages/sglang_cpu_stand_ins.pth"
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c "import sglang.srt.managers.scheduler" 2> "$venv/import.log" ||
    { tail -5 "$venv/import.log" >&2; exit 1; }
