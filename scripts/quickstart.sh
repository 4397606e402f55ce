#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up .venv and runs configs/quickstart.yaml (asynchronous, about ten seconds).
# Arguments are overrides, e.g.  bash scripts/quickstart.sh mode=sync run.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh .venv
echo "== training: a tiny Qwen2 model learns to copy 8 digits by reinforcement learning, from random weights"
exec .venv/bin/python -m scripts.train configs/quickstart.yaml "$@"
