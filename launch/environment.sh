# Sourced by the other scripts: makes the environment .venv with the tested versions, once, and activates it.
# An interrupted installation is done again; a finished one is recognised by a mark written last.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

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

make_environment() {
    local python mark wanted
    wanted=$(cat setup.py launch/constraints.txt | cksum)
    mark=.venv/.complete
    if [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then
        say "environment: .venv is ready"
    else
        python=$(find_python)
        say "environment: installing into .venv with $("$python" --version) (a few minutes, once)"
        rm -f "$mark"
        "$python" -m venv .venv
        .venv/bin/python -m pip install --quiet --upgrade pip
        # torch first and by its exact version: a later package must not choose another build of it.
        echo "-- torch"
        .venv/bin/python -m pip install --quiet --constraint launch/constraints.txt torch
        echo "-- megarl, what it needs, and the tools for its tests"
        .venv/bin/python -m pip install --quiet --constraint launch/constraints.txt --editable ".[dev]"
        echo "$wanted" >"$mark"
    fi
    . .venv/bin/activate
    # Megatron-Core warns once per process about each optional GPU package that is not here.
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
}
