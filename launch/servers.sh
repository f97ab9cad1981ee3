#!/usr/bin/env bash
# The rollout servers that belong on this machine: those of rollout.urls whose host it is.  The words are the run's own:
#
#   words='recipe=NAME rollout.urls=[https://gpu7:30000,https://gpu7:30001,https://gpu8:30000]'
#   bash launch/servers.sh $words        # on gpu7 and on gpu8
#   bash launch/local.sh $words          # the trainer; it starts no servers of its own
#
# They are started again when they die, and end with this script.  They take GPUs from rollout.first_gpu (0) on, each
# rollout.tensor_model_parallel_size of them.  All have MEGARL_TOKEN or MEGARL_TOKEN_FILE, from which the servers' key is
# derived; for servers that were started otherwise, give the trainer their key as MEGARL_SERVER_TOKEN.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launch/activate.sh"

find_environment "$root"
[ -n "${MEGARL_SERVER_TOKEN:-}" ] || need_token
exec python -m megarl serve "$@"
