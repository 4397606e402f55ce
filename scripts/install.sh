#!/usr/bin/env bash
# Installs packages into a virtual environment, as pip does: `install.sh VENV ARGUMENTS-OF-PIP-INSTALL`. TORCH= leaves
# torch out.
# uv does it with a fifth of the processor time, and what one environment has got the next one links to. It is told what
# pip's configuration says of indexes. Where uv can't be had or fails, pip installs.
set -euo pipefail
python="$1/bin/python" uv="$1/bin/uv"
shift
pip=("$python" -m pip --disable-pip-version-check)
settings=$("${pip[@]}" config list)
setting() {  # NAME: what the environment says of it, or a file
    sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<< "$settings" | head -n 1
}
say() {  # VARIABLE VALUE: unless the user's environment or pip's configuration does not
    [ -z "$2" ] || [ -n "${!1:-}" ] || export "$1=$2"
}
say UV_DEFAULT_INDEX "$(setting index-url)"
say UV_INDEX "$(setting extra-index-url)"
say UV_FIND_LINKS "$(setting find-links | tr ' ' ',')"
say UV_HTTP_TIMEOUT "$(setting default-timeout)"
say SSL_CERT_FILE "$(setting cert)"
export UV_INDEX_STRATEGY=unsafe-best-match  # as pip: the newest version of all indexes
# torch is pip's: that takes a wheel for the CPU where one lies ready (find-links), and uv's choice might bring CUDA.
torch=${TORCH-$(grep '^torch==' "$(dirname "$0")/../constraints.txt")}
[ -z "$torch" ] || "${pip[@]}" install --quiet "$torch"
if [ -x "$uv" ] || "${pip[@]}" install --quiet uv 2> /dev/null; then
    "$uv" pip install --quiet --python "$python" "$@" && exit
    echo "== uv could not install that: pip tries" >&2
fi
exec "${pip[@]}" install --quiet "$@"
