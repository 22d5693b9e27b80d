# shellcheck shell=bash
# Sourced by the other scripts, from the repository root. It enters the virtual environment, which it
# creates if missing, and defines install_extras.
#
#   VENV         folder of the environment (default .venv)
#   PYTHON       interpreter to create it with (default: the first Python 3.11 or newer on the PATH)
#   CONSTRAINTS  versions to install (default constraints.txt)

VENV="${VENV:-.venv}"
CONSTRAINTS="${CONSTRAINTS:-constraints.txt}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

_is_python311() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Run a command, showing what it says only if it fails.
_quietly() {
    local log rc=0
    log="$(mktemp)"
    "$@" >"$log" 2>&1 || rc=$?
    if ((rc)); then
        cat "$log" >&2
    fi
    rm -f "$log"
    return "$rc"
}

_find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        if ! _is_python311 "$PYTHON"; then
            echo "error: PYTHON=$PYTHON is not a working Python 3.11 or newer" >&2
            return 1
        fi
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python python3.11 python3.12 python3.13 python3.14; do
        if _is_python311 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: mosaickv-hf needs Python 3.11 or newer; found $(python3 --version 2>&1 || echo 'no python3')." >&2
    echo "       Install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

_enter_venv() {
    local python
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(_find_python)" || return 1
        echo "Creating the virtual environment $VENV" >&2
        if ! _quietly "$python" -m venv "$VENV"; then
            echo "error: '$python -m venv $VENV' failed (Debian and Ubuntu: apt install python3-venv)" >&2
            return 1
        fi
    elif ! _is_python311 "$VENV/bin/python"; then
        echo "error: $VENV holds $("$VENV/bin/python" --version); mosaickv-hf needs Python 3.11 or newer." >&2
        echo "       Remove it, or choose another folder: VENV=other-folder bash $0" >&2
        return 1
    fi
    VIRTUAL_ENV="$(cd "$VENV" && pwd)"
    export VIRTUAL_ENV
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    unset PYTHONHOME
    hash -r
}

# install_extras NAME...: the project, editable, with these extras at the versions in $CONSTRAINTS.
# Does nothing if they are there already and neither pyproject.toml nor the constraints have changed.
install_extras() {
    local stamp="$VIRTUAL_ENV/.mosaickv-extras" state extra missing=() list
    # The first line of the stamp is what was installed from, the others are the extras.
    state="$(python - "$PWD" pyproject.toml "$CONSTRAINTS" <<'PY'
import hashlib, pathlib, sys

root, *files = sys.argv[1:]
print(hashlib.sha256(b"\0".join([root.encode(), *(pathlib.Path(f).read_bytes() for f in files)])).hexdigest())
PY
    )"
    if [[ ! -f "$stamp" || "$(head -n 1 "$stamp")" != "$state" ]]; then
        rm -f "$stamp"
        missing=("$@")
    else
        for extra in "$@"; do
            grep -qx -- "$extra" "$stamp" || missing+=("$extra")
        done
    fi
    if ((${#missing[@]} == 0)); then
        return
    fi
    list="$(IFS=,; echo "${missing[*]}")"
    echo "Installing mosaickv-hf[$list] into $VENV (some minutes the first time)" >&2
    if ! _quietly python -m pip install --no-input -c "$CONSTRAINTS" -e ".[$list]"; then
        echo "error: could not install mosaickv-hf[$list]; pip's messages are above" >&2
        return 1
    fi
    [[ -f "$stamp" ]] || printf '%s\n' "$state" >"$stamp"
    printf '%s\n' "${missing[@]}" >>"$stamp"
}

_enter_venv
