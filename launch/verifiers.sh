#!/usr/bin/env bash
# Makes .venv-verifiers, an environment with the stock packages verifiers, whose tasks `agent.fn=verifiers:TASKSET` runs
# there, and reasoning-gym, for the tests of an example, which needs a C compiler.  Safe to run again and to interrupt.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

pins=launch/verifiers.txt

install_verifiers() {
    echo "-- verifiers, reasoning-gym" &&
        pip_install "$1" --requirement "$pins"
}

once_in .venv-verifiers "$(cksum <"$pins")" "a few minutes" install_verifiers
say "import check"
.venv-verifiers/bin/python -c '
from importlib.metadata import version
import reasoning_gym, verifiers.v1
print("verifiers", version("verifiers"), "and reasoning-gym", version("reasoning-gym"))'
say "done"
