#!/usr/bin/env bash
# Builds the images megarl-trainer:VERSION and megarl-server:VERSION, labelled with their version and commit.
# Words are options of docker build:
#
#   bash launch/docker/build.sh
#   bash launch/docker/build.sh --build-arg APEX_COMMIT=HASH     # with Apex of a commit of NVIDIA's, which nothing requires
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megarl/__init__.py)
revision=$(git rev-parse HEAD)
git diff --quiet HEAD || revision+=-changed
docker build --file launch/docker/trainer.Dockerfile --tag "megarl-trainer:$version" \
    --build-arg VERSION="$version" --build-arg REVISION="$revision" "$@" .
docker build --file launch/docker/server.Dockerfile --tag "megarl-server:$version" \
    --build-arg TRAINER="megarl-trainer:$version" "$@" .
