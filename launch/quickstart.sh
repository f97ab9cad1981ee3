#!/usr/bin/env bash
# The whole ring on two CPU cores: makes the environment, then trains a tiny model with PPO until it can add.
# Safe to run again and to interrupt: a run that was interrupted goes on from its last checkpoint.
# Further words are settings:  bash launch/quickstart.sh trainer.experiment_name=mine actor.optim.lr=5e-4
set -euo pipefail
. "$(dirname "$0")/environment.sh"

make_environment
say "training: megarl quickstart $*"
megarl quickstart "$@"
say "done; start with README.md in the folder above"
