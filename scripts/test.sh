#!/usr/bin/env bash
# Sets up a virtual environment and passes all tests: style, types, then pytest. Arguments go to pytest.
# VENV names another environment than .venv (.ci/run uses a fresh one).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
bash scripts/setup.sh "$venv" dev
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
echo "== ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
echo "== mypy"
"$venv/bin/mypy"
echo "== pytest"
exec "$venv/bin/python" -m pytest "$@"
