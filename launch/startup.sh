#!/usr/bin/env bash
# What every host of a slice of queued.sh does when it boots, as root: install, and train as a service of systemd.
# A host that is taken away is shut down, and systemd sends SIGTERM: the run saves. Its output: journalctl -u mod-jax
set -euo pipefail

attribute() {
    curl -fsS -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
name=$(attribute name) bucket=$(attribute bucket) code=$(attribute code) commit=$(attribute commit)

systemctl is-active --quiet mod-jax && exit
if [ ! -d /opt/mod_jax/.git ]; then
    git clone --quiet "$code" /opt/mod_jax
fi
cd /opt/mod_jax
git checkout --quiet "$commit"
python3 -m venv .venv
.venv/bin/pip install --quiet -e '.[tpu,gcs,sentencepiece]'

systemd-run --unit=mod-jax --working-directory=/opt/mod_jax \
    --setenv=JAX_COMPILATION_CACHE_DIR="gs://$bucket/compiled" \
    --property=TimeoutStopSec=120 --property=Restart=on-failure --property=RestartSec=30 \
    --property=RestartPreventExitStatus='2 3 5 7' \
    .venv/bin/python -m mod_jax.train --distributed --preempted_exit_code=42 \
    --config=configs/paper.py:size=1b --workdir="gs://$bucket/$name"
