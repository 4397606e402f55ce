#!/usr/bin/env bash
# Sets up a virtual environment, then checks style and types and runs all tests. Arguments go to pytest.
#   test.sh --fast    style and unit tests only: about a minute. It leaves out types, the tests that start real processes
#                     (integration, faults, sglang, slurm), those of commands (scripts), and the files that
#                     tests/conftest.py lists as slow.
# VENV names another environment than .venv (.ci/run uses a fresh one), WORKERS the number of processes that run tests
# (4, as many tests wait; --fast: 2; `WORKERS=0`: only this process, for a debugger). Without Slurm's daemons tests/slurm
# is skipped; .ci/run installs them.
# AREAL_TEST_SEED=7 gives the numerical tests other random numbers (tests/seeds.py); scripts/test_kernels.sh runs them
# with other kernels of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_NO_COMPILE=1  # most of what is installed is never imported: Python compiles the rest when it is
unset PYTHONDONTWRITEBYTECODE  # ... once, not in each process
venv=${VENV:-.venv}
fast=
if [ "${1:-}" = --fast ]; then
    fast=1
    shift
fi
bash scripts/setup.sh "$venv" dev
if [ -n "$fast" ]; then
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
    begin=$SECONDS
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile -m "not slow and not integration" \
        tests/test_floors.py tests/actors tests/areal_like tests/buffer tests/learners tests/tasks "$@"
    echo "== $((SECONDS - begin)) s: style and unit tests pass. Left out: types, commands, real processes, slow files"
    exit
fi
command -v slurmctld > /dev/null || echo "== no Slurm here (apt-get install slurm-wlm munge): tests/slurm is skipped"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
echo "== ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
echo "== pytest, and mypy beside it, where tests wait"
types=$(mktemp)
trap 'kill "$typing" 2> /dev/null || true; rm -f "$types"' EXIT
nice -n 5 "$venv/bin/mypy" > "$types" 2>&1 &
typing=$!
"$venv/bin/python" -m pytest --collect-only -q > /dev/null || true  # compiles once what all workers will import
# Each file is one worker's, so that what its tests share is made once. Many tests wait: four workers for two processors.
failed=0
"$venv/bin/python" -m pytest -n "${WORKERS:-4}" --dist loadfile --no-loadscope-reorder "$@" || failed=$?
echo "== mypy"
wait "$typing" || failed=1
cat "$types"
exit "$failed"
