#!/usr/bin/env bash
# One slice of v5e-16 on a cluster that xpk made, restarted until the run is done:
#
#   NAME=mod-1b IMAGE=... BUCKET=... CLUSTER=... ZONE=... PROJECT=... launch/xpk.sh
#
# xpk restarts on 42 and 127 to 255 by itself; what is not named fails the workload at once. More flags are passed on.
set -euo pipefail

xpk workload create \
    --cluster="$CLUSTER" --zone="$ZONE" --project="$PROJECT" \
    --workload="$NAME" --docker-image="$IMAGE" \
    --tpu-type=v5litepod-16 --num-slices=1 \
    --max-restarts=100 --restart-on-exit-codes=1,4,6 --termination-grace-period-seconds=120 \
    --env=JAX_COMPILATION_CACHE_DIR="gs://$BUCKET/compiled" \
    --command="python -m mod_jax.train --distributed --preempted_exit_code=42 --config=configs/paper.py:size=1b --workdir=gs://$BUCKET/$NAME" \
    "$@"
