#!/usr/bin/env bash
# Makes .venv-ray, an environment with megarl and the stock package ray, whose nodes the machines of a run can be
# (`megarl train --on ray`), for tests marked ray.  Safe to run again and to interrupt.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

pins=launch/ray.txt

install_ray() {
    echo "-- torch" &&
        pip_install "$1" --constraint launch/constraints.txt torch &&
        echo "-- megarl, ray" &&
        pip_install "$1" --constraint launch/constraints.txt --editable . --requirement "$pins"
}

once_in .venv-ray "$(cat setup.py launch/constraints.txt "$pins" | cksum)" "a few minutes" install_ray
say "import check"
.venv-ray/bin/python -c 'import ray, megarl; print("ray", ray.__version__)'
say "done"
