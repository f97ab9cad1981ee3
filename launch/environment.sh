# shellcheck shell=bash
# Sourced by the other scripts: makes environments with the tested versions, once; `make_environment` activates .venv.
# An interrupted installation is done again; a finished one is recognised by a mark written last.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; assert (3, 11) <= sys.version_info < (3, 13)' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "launch: no Python 3.11 or 3.12 with venv found; install python3.11 and python3.11-venv, or set PYTHON=/path/to/python" >&2
    return 2
}

# once_in FOLDER WANTED DURATION INSTALL: makes the virtual environment FOLDER and calls INSTALL with it, unless its mark
# says that this was done for the same WANTED.
once_in() {
    local folder=$1 wanted=$2 duration=$3 install=$4 mark=$1/.complete python
    if [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then
        say "environment: $folder is ready"
        return
    fi
    python=$(find_python)
    say "environment: installing into $folder with $("$python" --version) ($duration, once)"
    rm -f "$mark"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --upgrade pip
    "$install" "$folder/bin/python"
    echo "$wanted" >"$mark"
}

install_megarl() {
    # torch first and by its exact version: a later package must not choose another build of it.
    echo "-- torch"
    "$1" -m pip install --quiet --constraint launch/constraints.txt torch
    echo "-- megarl, what it needs, and the tools for its tests"
    "$1" -m pip install --quiet --constraint launch/constraints.txt --editable ".[dev]"
}

make_environment() {
    once_in .venv "$(cat setup.py launch/constraints.txt | cksum)" "a few minutes" install_megarl
    # shellcheck disable=SC1091
    . .venv/bin/activate
    # Megatron-Core warns once per process about each optional GPU package that is not here.
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
}
