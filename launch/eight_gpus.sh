#!/usr/bin/env bash
# Checks megarl on a machine with eight GPUs, as launch/one_gpu.sh does on one; launch/eight_gpus.toml has the rungs.
#   bash launch/eight_gpus.sh --list
#   bash launch/eight_gpus.sh --minutes 30 --from push --out runs/eight_gpus
set -euo pipefail
. "$(dirname "$0")/environment.sh"

run_ladder launch/eight_gpus.toml "$@"
