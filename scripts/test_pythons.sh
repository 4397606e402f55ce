#!/usr/bin/env bash
# Runs the tests of wire, buffer and actors that need no torch with other Pythons: `test_pythons.sh 3.12 3.13`. A version
# that is not on this machine is named and left out. (With torch for a Python, `PYTHON=... VENV=... scripts/test.sh` runs
# all tests.)
set -euo pipefail
cd "$(dirname "$0")/.."
needs="numpy scipy numba pyzmq msgspec msgpack omegaconf xxhash zstandard safetensors rich setproctitle"
needs+=" pytest pytest-timeout pytest-xdist hypothesis psutil"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
for version; do
    python=
    for found in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$found" --version > /dev/null 2>&1; then python=$found; fi
    done
    [ -n "$python" ] || { echo "== no Python $version here"; continue; }
    "$python" -m venv "$fresh/$version"
    # shellcheck disable=SC2086 # a list of words
    TORCH='' bash scripts/install.sh "$fresh/$version" -c constraints.txt $needs
    echo "== $("$fresh/$version/bin/python" --version)"
    "$fresh/$version/bin/python" -m pytest -q -n "${WORKERS:-2}" --dist loadfile -p no:cacheprovider \
        tests/areal_like/test_{bus,client,groups}.py tests/buffer/test_{server,journal,recovery}.py \
        tests/actors/test_{fetcher,worker,reward_pool,progress,workflows,tools}.py
done
