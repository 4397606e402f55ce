#!/usr/bin/env bash
# Runs the tests whose numbers depend on the CPU's kernels, with kernels of other machines and other random numbers: no
# equality may hold on one kind of machine only. Takes half a minute. Arguments go to pytest.
# KERNELS names torch's kernels (default | avx2 | avx512), AREAL_TEST_SEED shifts the seeds, VENV is another environment
# than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
export ATEN_CPU_CAPABILITY=${KERNELS:-default} ONEDNN_MAX_CPU_ISA=AVX2 AREAL_TEST_SEED=${AREAL_TEST_SEED:-1}
exec "${VENV:-.venv}/bin/python" -m pytest -n "${WORKERS:-2}" tests/learners/test_sharding.py \
    tests/learners/test_attention.py tests/learners/test_learner.py tests/learners/test_learner_losses.py \
    tests/learners/test_diagnostics.py \
    tests/actors/test_torch_engine.py -k "not compiled" "$@"
