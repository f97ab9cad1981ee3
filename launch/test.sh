#!/usr/bin/env bash
# Makes the same environment and runs the tests: all but the slow and long ones, those for GPUs, those that want SGLang
# (they need `bash launch/sglang_cpu.sh` and `bash launch/sglang_cpu.sh 0.5.17`) and those that want agents' packages (they
# need `bash launch/agents.sh` and `bash launch/verifiers.sh`) or a browser (`apt-get install chromium`).
# Further words go to pytest:  bash launch/test.sh -m slow   bash launch/test.sh -m sglang   bash launch/test.sh tests/algo
set -euo pipefail
. "$(dirname "$0")/environment.sh"

make_environment
if [ $# -eq 0 ]; then
    set -- -m "not slow and not long and not gpu and not sglang and not agents and not browser"
fi
mkdir -p runs
say "tests: pytest $* (report: runs/tests.xml)"
# Two files at a time: most of a test that starts ranks or servers is waiting for processes that import torch.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --junit-xml=runs/tests.xml "$@"
say "done; every test with its time: $PWD/runs/tests.xml"
