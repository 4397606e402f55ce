#!/usr/bin/env bash
# Installs SGLang for the CPU into an environment of its own and runs the tests against the real server: four to five
# minutes, and some two for the installation. Arguments go to pytest. VENV names another environment than .venv-sglang,
# WORKERS the number of processes that run tests (2). Exits with 69 if SGLang can't be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-sglang}
bash scripts/setup_sglang_cpu.sh "$venv" || exit 69
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 SGLANG_CPU_FORK=1
exec "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --durations 8 tests/sglang "$@"
