# shellcheck shell=bash
# Sourced by the scripts that start runs: finds the environment and the run's token; changes no folder.
# The environment is .venv or .venv-3.12 of this repository (launch/quickstart.sh makes it), the active one if it is one
# of them, or, where there is none, the active one.

find_environment() {
    local root=$1
    local own=$root/.venv
    if [ "${VIRTUAL_ENV:-}" = "$root/.venv-3.12" ] || [ ! -d "$own" ]; then own=$root/.venv-3.12; fi
    if [ -f "$own/bin/activate" ]; then
        # shellcheck disable=SC1091
        . "$own/bin/activate"
    elif ! python -c 'import megarl' 2>/dev/null; then
        echo "$0: no $root/.venv and no Python with megarl; make one with launch/quickstart.sh, or activate yours" >&2
        return 2
    fi
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
}

# The machines of a run know each other by MEGARL_TOKEN, or by the file that MEGARL_TOKEN_FILE names.
need_token() {
    if [ -z "${MEGARL_TOKEN:-}" ] && [ -z "${MEGARL_TOKEN_FILE:-}" ]; then
        echo "$0: set MEGARL_TOKEN_FILE to a file with the run's token that only you can read, the same on every machine:" >&2
        echo "    (umask 077; openssl rand -hex 32 > ~/.megarl_token); export MEGARL_TOKEN_FILE=~/.megarl_token" >&2
        return 2
    fi
}
