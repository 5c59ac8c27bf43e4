#!/usr/bin/env bash
# Prints the path of a Python that really works, of the first version that is there.
#
#   scripts/find_python.sh 3.12             that version
#   scripts/find_python.sh 3.11 3.12 3.13   the first of these
#
# A name on PATH proves nothing: it may be the shim of a version manager that fails when it is run, or a Python without
# the modules that make a virtual environment. So every candidate is run.
set -uo pipefail

[ $# -gt 0 ] || { echo "usage: $0 VERSION..." >&2; exit 2; }

works() { # works CANDIDATE VERSION: prints the interpreter's own path
    "$1" - "$2" 2>/dev/null <<'PY'
import sys

if "{}.{}".format(*sys.version_info) != sys.argv[1]:
    sys.exit(1)
import ensurepip, ssl, venv  # Debian splits these off

print(sys.executable)
PY
}

candidates() { # candidates VERSION: one a line, some of them may not exist
    type -ap "python$1" python3 python
    printf '%s\n' \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python \
        "$HOME"/.pyenv/versions/"$1"*/bin/python \
        /usr/bin/python"$1" /usr/local/bin/python"$1" /opt/homebrew/bin/python"$1" \
        /opt/*/bin/python"$1" /opt/python/"$1"*/bin/python3 \
        "$HOME"/miniconda3/envs/*/bin/python"$1" "$HOME"/.local/bin/python"$1"
    if command -v uv >/dev/null; then
        uv python find --no-python-downloads "$1" 2>/dev/null
    fi
}

for version in "$@"; do
    while IFS= read -r candidate; do
        [ -x "$candidate" ] || continue
        if path=$(works "$candidate" "$version") && [ -n "$path" ]; then
            echo "$path"
            exit 0
        fi
    done < <(candidates "$version")
done

{
    echo "No working Python of version $(printf '%s ' "$@" | sed 's/ $//; s/ / or /g') was found."
    echo "Looked on PATH, in pyenv's versions, /usr, /opt, conda environments and uv. It needs the venv, ensurepip and ssl"
    echo "modules (Debian: apt-get install python3-venv). Name one yourself with: make PYTHON=/path/to/python ..."
} >&2
exit 1
