#!/usr/bin/env bash
# Makes rows and a tiny model, shows the model the form of the answers, and trains it with the reward.  Words such as
# trainer.total_training_steps=20 go to that last step; the others are left out until task.py or cold_start.yaml changes.
set -euo pipefail
cd "$(dirname "$0")"
command -v megarl >/dev/null || { echo "run.sh: there is no command megarl; activate its environment first" >&2; exit 2; }
made=runs/own_task_sft/summary.json
if ! [ "$made" -nt task.py ] || ! [ "$made" -nt cold_start.yaml ]; then
    python task.py
    megarl sft --config cold_start.yaml
fi
megarl train --config train.yaml "$@"
