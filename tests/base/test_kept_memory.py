"""A buffer that is freed and taken again is not faulted in again."""

import os
import subprocess
import sys

import pytest

from launcher.base import KEPT

FAULTS = """
import resource
import sys
from launcher.base import keep_memory

if sys.argv[1] == "by call":
    assert keep_memory()
elif sys.argv[1].startswith("worker"):
    from launcher.cluster.ray.worker_actor import Worker

    worker = Worker({"JAX_PLATFORMS": sys.argv[1].split()[-1]}, sys.path, ".", None)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    buffers = [bytearray(size << 20) for size in (1, 40, 5)]  # written to from end to end

use()
before = faults()
for _ in range(10):
    use()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_is_faulted_in_once_by_the_call_and_by_the_variables():
    plain = {k: v for k, v in os.environ.items() if k not in KEPT}
    own = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    calls = {
        "as is": plain,
        "by call": plain,
        "by variables": plain | KEPT,
        "the user's": plain | own,
        "worker on cpu": plain,
        "worker on cuda,cpu": plain,
    }
    found = {}
    for name, env in calls.items():
        word = "by call" if name == "the user's" else name
        command = [sys.executable, "-c", FAULTS, word]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        found[name] = int(done.stdout)
    pages = 10 * (46 << 20) // os.sysconf("SC_PAGESIZE")
    assert found["as is"] > pages / 2, found  # those of 40 MiB alone are more
    assert found["the user's"] > pages / 2, found
    assert found["worker on cuda,cpu"] > pages / 2, found
    assert found["worker on cpu"] < pages / 100, found
    assert found["by call"] < pages / 100, found
    assert found["by variables"] < pages / 100, found
