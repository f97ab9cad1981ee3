#!/usr/bin/env bash
# Prints a new secret for the run RUN: its token, for the pods of the trainer, and the key of its servers.
#
#   RUN=mine bash launch/k8s/secret.sh | kubectl create -f -
set -euo pipefail
if [ -z "${RUN:-}" ]; then
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: megarl-$RUN
  labels:
    run: "$RUN"
type: Opaque
stringData:
  token: "$(openssl rand -hex 32)"
  server-token: "$(openssl rand -hex 32)"
END
