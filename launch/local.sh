#!/usr/bin/env bash
# A run on this machine; every word is a setting:  bash launch/local.sh recipe=NAME actor.optim.lr=1e-6
# Interrupted or killed, the same command goes on from the last checkpoint (trainer.save_freq).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launch/activate.sh"

find_environment "$root"
exec python -m megarl train "$@"
