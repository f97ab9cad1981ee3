# shellcheck shell=bash
# Makes environments with the tested versions, once.  The other scripts source it; run alone, it makes megarl's own:
#   bash launch/environment.sh                          .venv, with Python 3.11 where there is one
#   PYTHON=python3.12 bash launch/environment.sh        .venv-3.12, with the Megatron-Core that has the models of 2026
# An interrupted installation is done again; a finished one is recognised by a mark written last.

PIP="pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13" # installs all else
GPU_MARK="for GPUs:" # begins the mark of environments that launch/gpu/install.sh makes

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '\n== %s\n' "$*"; }

usable() {
    "$1" -c 'import sys, venv; assert (3, 11) <= sys.version_info < (3, 13)' 2>/dev/null
}

# The Python that PYTHON names, else the first that can be used.
find_python() {
    local candidate version found
    local -a candidates=(python3.11 python3.12 python3)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
        # pyenv's commands refuse a version that is not the chosen one, which its own folder still has.
        version=$(pyenv latest "${candidate#python}" 2>/dev/null) || continue
        found=$(pyenv prefix "$version")/bin/python
        if usable "$found"; then
            echo "$found"
            return
        fi
    done
    echo "launch: ${candidates[*]}: expected Python 3.11 or 3.12 with venv; install python3.11 and python3.11-venv, or set PYTHON=/path/to/python" >&2
    return 2
}

# once_in FOLDER WANTED DURATION INSTALL: makes the virtual environment FOLDER and calls INSTALL with its Python, unless
# its mark says that this was done for the same WANTED.
once_in() {
    local folder=$1 wanted=$2 duration=$3 install=$4 mark=$1/.complete python
    if [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then
        say "environment: $folder is ready"
        return
    fi
    python=$(find_python) || return
    say "environment: installing into $folder with $("$python" --version) ($duration, once)"
    rm -f "$mark" "$folder/install.log"
    "$python" -m venv "$folder" || return
    pip_install "$folder/bin/python" --require-hashes --requirement <(echo "$PIP") || return
    "$install" "$folder/bin/python" || return
    echo "$wanted" >"$mark"
}

# once_for_all FOLDER NAME WANTED DURATION INSTALL: as once_in, but the environment is in the user's cache, as NAME with a
# hash of WANTED and the Python, and FOLDER is a link to it: every clone finds it there.  Of two at once one waits.
once_for_all() {
    local folder=$1 name=$2 wanted=$3 duration=$4 install=$5 python hash kept
    python=$(find_python) || return
    hash=$({ echo "$wanted" && "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; } | sha256sum)
    kept=${XDG_CACHE_HOME:-$HOME/.cache}/megarl/environments/$name-${hash:0:16}
    mkdir -p "${kept%/*}" || return
    (
        flock 9
        once_in "$kept" "$wanted" "$duration" "$install"
    ) 9>"$kept.lock" || return
    if [ ! -L "$folder" ]; then rm -rf "$folder"; fi # one that an earlier version of these scripts made
    ln -sfn "$kept" "$folder"
    say "environment: $folder is a link to $kept"
}

# pip_install PYTHON WORDS: what pip and the packages say goes to install.log of PYTHON's environment, with the versions
# that were chosen; the screen gets the log's end if pip fails.
pip_install() {
    local python=$1 log=${1%/bin/python}/install.log
    shift
    echo "== pip install $*" >>"$log"
    "$python" -m pip install --no-input --progress-bar off "$@" >>"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    echo "launch: pip install $* failed; all that it said is in $(realpath "$log")" >&2
    return 1
}

install_megarl() {
    # torch first and by its exact version: a later package must not choose another build of it.
    echo "-- torch" &&
        pip_install "$1" --constraint launch/constraints.txt torch &&
        echo "-- megarl, what it needs, and the tools for its tests" &&
        pip_install "$1" --constraint launch/constraints.txt --editable ".[dev]"
}

# The environment of megarl: .venv, or .venv-3.12 where PYTHON asks for Python 3.12.
environment_folder() {
    local python
    if [ -z "${PYTHON:-}" ]; then
        echo .venv
        return
    fi
    python=$(find_python) || return
    case $("$python" -c 'import sys; print(sys.version_info.minor)') in
        12) echo .venv-3.12 ;;
        *) echo .venv ;;
    esac
}

make_environment() {
    local folder
    folder=$(environment_folder) || return
    if ! grep -qs "^$GPU_MARK" "$folder/.complete"; then
        once_in "$folder" "$(cat setup.py launch/constraints.txt | cksum)" "a few minutes" install_megarl || return
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
    # Megatron-Core warns once per process about each optional GPU package that is not here.
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
}

install_te_python() {
    echo "-- transformer-engine, without what is compiled" &&
        pip_install "$1" --no-deps --require-hashes --requirement <(grep -A 1 '^transformer-engine==' launch/gpu/trainer.txt)
}

# Of Transformer-Engine the part in Python, for tests/te alone.  Not in .venv: Megatron-Core would find it there.
make_te_python() {
    once_in .venv-te "$(grep '^transformer-engine==' launch/gpu/trainer.txt)" "seconds" install_te_python
}

# run_ladder RUNGS WORDS: launch/ladder.py with the rungs of a file, in place of this shell, so that a signal reaches it.
run_ladder() {
    local python word
    for word in "$@"; do
        if [ "$word" = --list ]; then exec "$(find_python)" launch/ladder.py "$@"; fi
    done
    python=$(command -v "${PYTHON:-$PWD/.venv/bin/python}" || true)
    if ! "$python" -c 'import torch, megatron.core' 2>/dev/null; then
        make_environment || return
        python=$VIRTUAL_ENV/bin/python
    fi
    if [ -z "${MEGARL_SGLANG_PYTHON:-}" ] && "$python" -c 'import sglang' 2>/dev/null; then
        export MEGARL_SGLANG_PYTHON=$python
    fi
    exec "$python" launch/ladder.py "$@"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    make_environment
fi
