#!/usr/bin/env bash
# Collects, as wheels, what a machine without a package index lacks to run megarl:
#   bash launch/offline_kit.sh FOLDER --python 3.12 --have torch,transformers,...
# There: bash launch/install_offline.sh FOLDER. All words: bash launch/offline_kit.sh --help
set -euo pipefail
. "$(dirname "$0")/environment.sh"

make_environment
python launch/offline_kit.py "$@"
