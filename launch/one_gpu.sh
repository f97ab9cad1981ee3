#!/usr/bin/env bash
# Checks megarl on a machine with one GPU, rung by rung, in the time that there is; launch/one_gpu.toml has the rungs.
#   bash launch/one_gpu.sh --list
#   bash launch/one_gpu.sh --minutes 12 --out runs/one_gpu
# They run with PYTHON if it is set, else with .venv, which is made where it is missing and there is a package index.
# Rungs with SGLang run where MEGARL_SGLANG_PYTHON names its environment (launch/gpu/install.sh makes one).
set -euo pipefail
. "$(dirname "$0")/environment.sh"

run_ladder launch/one_gpu.toml "$@"
