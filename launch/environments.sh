#!/usr/bin/env bash
# Makes .venv-environments, an environment with the stock packages openenv-core, textarena, gymnasium and openai, for
# examples/environments/ and their tests.  Safe to run again and to interrupt.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

pins=launch/environments.txt

install_environments() {
    echo "-- openenv-core, textarena, gymnasium, openai" &&
        pip_install "$1" --requirement "$pins"
}

once_in .venv-environments "$(cksum <"$pins")" "a minute" install_environments
say "import check"
.venv-environments/bin/python -c '
from importlib.metadata import version
import gymnasium, openenv, textarena
print(", ".join(f"{name} {version(name)}" for name in ("openenv-core", "textarena", "gymnasium")))'
say "done"
