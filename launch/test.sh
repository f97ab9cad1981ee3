#!/usr/bin/env bash
# Makes the same environment and runs the tests: everything but the slow ones and those for GPUs.
# Further words go to pytest:  bash launch/test.sh -m slow      bash launch/test.sh tests/algo -x
set -euo pipefail
. "$(dirname "$0")/environment.sh"

make_environment
if [ $# -eq 0 ]; then
    set -- -m "not slow and not gpu"
fi
mkdir -p runs
say "tests: pytest $* (report: runs/tests.xml)"
python -m pytest --junit-xml=runs/tests.xml "$@"
say "done; every test with its time: $PWD/runs/tests.xml"
