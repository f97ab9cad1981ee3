#!/usr/bin/env bash
# A run on several machines, started by hand: the same words on every machine, but for NODE_RANK (0, 1, ...).
#
#   bash launch/node.sh NODES NODE_RANK ADDRESS_OF_NODE_0 recipe=NAME trainer.n_gpus_per_node=8 ...
#
# All machines see the same files under the same paths, and have MEGARL_TOKEN or MEGARL_TOKEN_FILE.  The first machine is
# the driver, the others start ranks and servers when it says so.  Ports of node 0: trainer.master_port (29500) for the
# driver, others as ranks and servers need them.  RESTARTS: how often this machine starts again after a failure of its own
# process or of the driver (0); what fails inside of a run is the business of trainer.max_restarts.
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nodes=$1 node_rank=$2 address=$3
shift 3
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launch/activate.sh"

find_environment "$root"
need_token
left=${RESTARTS:-0}
set -- python -m megarl train "$@" \
    trainer.nnodes="$nodes" trainer.node_rank="$node_rank" trainer.master_addr="$address"
if [ "$left" -eq 0 ]; then
    exec "$@"
fi
trap 'kill -TERM "${!-}" || true; wait; exit 143' TERM INT # who ends this script ends the run
trap : USR1                                                # one to all processes is for the run
while true; do
    "$@" &
    while kill -0 $! 2>/dev/null; do
        wait $! || true # a signal ends it before its process has ended
    done
    status=0
    wait $! || status=$?
    case $status in
    0 | 2 | 129 | 130 | 143) exit "$status" ;; # 2: a mistake in the settings; above 128: a signal by which people end things
    esac
    if [ "$left" -eq 0 ]; then
        exit "$status"
    fi
    left=$((left - 1))
    echo "$0: ended with status $status; starting again ($left times more)" >&2
done
