#!/usr/bin/env bash
# A run on several machines, started by hand: the same words on every machine, but for NODE_RANK (0, 1, ...).
#
#   bash launch/torchrun.sh NODES NODE_RANK ADDRESS_OF_NODE_0 recipe=NAME trainer.n_gpus_per_node=8 ...
#
# All machines see the same files under the same paths, and have MEGARL_TOKEN or MEGARL_TOKEN_FILE.  torchrun starts one
# megarl on each; the first is the driver, the others start ranks and servers when it says so.  Ports of node 0:
# trainer.master_port (29500) for the driver, MEETING_PORT (29400) for torchrun, others as ranks and servers need them.
# RESTARTS: how often torchrun starts all of them again when a machine or the driver fails (0); what fails inside is the
# business of trainer.max_restarts.
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
exec python -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node=1 \
    --rdzv-backend=static --master-addr="$address" --master-port="${MEETING_PORT:-29400}" \
    --max-restarts="${RESTARTS:-0}" \
    -m megarl train "$@" trainer.nnodes="$nodes" trainer.node_rank="$node_rank" trainer.master_addr="$address"
