#!/usr/bin/env bash
# One slice of v5e-16, spot, by the Cloud TPU API. Run it again, from cron for example: it asks for a new slice when the
# old one was taken away, and else says how it is.
#
#   NAME=mod-1b BUCKET=... ZONE=... PROJECT=... CODE=https://... COMMIT=... launch/queued.sh
#
# Every host of the slice runs startup.sh when it boots. More flags are passed on to gcloud.
set -euo pipefail
cd "$(dirname "$0")"
where=(--zone="$ZONE" --project="$PROJECT")

state=$(gcloud compute tpus queued-resources describe "$NAME" "${where[@]}" --format='value(state.state)' || true)
case "$state" in
    SUSPENDED | FAILED) # it does not come back by itself
        gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
        ;;
    "") ;;
    *)
        echo "$NAME is $state"
        exit
        ;;
esac
gcloud compute tpus queued-resources create "$NAME" "${where[@]}" \
    --node-id="$NAME" --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot \
    --metadata="name=$NAME,bucket=$BUCKET,code=$CODE,commit=$COMMIT" --metadata-from-file=startup-script=startup.sh \
    "$@"
