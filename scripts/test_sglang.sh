#!/usr/bin/env bash
# Installs SGLang for the CPU into an environment of its own and runs the tests against the real server: seven minutes,
# and some two for the installation. Arguments go to pytest. VENV names another environment than .venv-sglang. Exits with
# 69 if SGLang can't be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-sglang}
bash scripts/setup_sglang_cpu.sh "$venv" || exit 69
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
exec "$venv/bin/python" -m pytest --durations 8 tests/sglang "$@"
