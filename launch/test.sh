#!/usr/bin/env bash
# Makes the same environment, and .venv-te with the Python part of Transformer-Engine; runs the tests that prove each
# capability once.  Words go to pytest.
#
#   bash launch/test.sh --core            those for a change, in a minute
#   bash launch/test.sh tests/algo        those of one folder
#   bash launch/test.sh -m full           those that show the same in other ways, or take longer
#
# Tests marked sglang, agents, browser, slurm or ray run where -m names their mark. They need `bash launch/sglang_cpu.sh`
# and `bash launch/sglang_cpu.sh 0.5.17`; `bash launch/agents.sh` (which wants npm), `bash launch/environments.sh` and
# `bash launch/verifiers.sh`; the program chromium; Slurm and munge (as root: apt-get install slurm-wlm munge); or
# `bash launch/ray.sh`.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

# Where it is set, each of the many processes that tests start would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
make_environment
make_te_python
if [ "${1:-}" = --core ]; then
    set -- tests/algo tests/data tests/roles tests/weights/mapping tests/weights/reshard tests/config/test_config.py \
        tests/config/test_config_layouts.py tests/trainer/test_train_step.py tests/rollout/test_prefetch.py \
        tests/dist/test_parity.py tests/ring/test_ring.py tests/test_floors.py "${@:2}"
fi
mkdir -p runs
say "tests: pytest $* (report: runs/tests.xml)"
# Four files at a time on two cores: most of a test that starts ranks or servers is waiting for their processes.
python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --junit-xml=runs/tests.xml "$@"
say "done; every test with its time: $PWD/runs/tests.xml"
