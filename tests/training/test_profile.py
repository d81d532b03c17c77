"""--profile, in a process of its own: where the TPU compiler's library is loaded, JAX's profiler crashes."""

import pathlib
import subprocess
import sys

CASES = pathlib.Path(__file__).with_name("profile_cases.py")


def test_every_case_passes_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
