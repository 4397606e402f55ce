#!/usr/bin/env bash
# Makes a virtual environment and installs this project into it. Called by quickstart.sh and test.sh; safe to run again.
#   setup.sh VENV [EXTRA]     EXTRA: e.g. dev
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extra=${2:-}
stamp="$venv/.installed-${extra:-base}"
wanted=$(cat pyproject.toml constraints.txt | cksum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "== $venv is up to date"
    exit 0
fi
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
"$python" - <<'CHECK' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
CHECK
if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
    echo "== making the virtual environment $venv"
    "$python" -m venv "$venv"
fi
echo "== installing (a few minutes the first time)"
bash scripts/install.sh "$venv" -c constraints.txt -e ".${extra:+[$extra]}"
echo "$wanted" > "$stamp"
