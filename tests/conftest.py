"""What holds for every test: emulated CPU devices, wherever the tests run, and no network."""

import os
import signal
import tempfile

# Before any test imports JAX, which reads them once.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: XLA:CPU's own optimizations and its newer code generator
# would take two thirds of their time. What the programs hold and in which order is decided before.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_force_host_platform_device_count=8"
)
os.environ["WANDB_MODE"] = "offline"
# What was measured on this machine before must not decide what tests see.
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/launcher-tests-{os.getpid()}"
# Its list of this machine's fonts takes seconds: made once, not once a process of tests.
os.environ["MPLCONFIGDIR"] = f"{tempfile.gettempdir()}/launcher-tests-matplotlib-{os.getuid()}"
# A script's background ignores it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


_MOST_AT_ONCE = 5  # each compiles on all cores; more wait for one another


def pytest_xdist_auto_num_workers(config):
    """How many processes run tests: one more than there are cores, since tests of processes wait
    more than they compute; but none beside this one for a file or two."""
    named = [argument for argument in config.args if ".py" in argument]
    return 0 if 0 < len(named) <= 2 else min(len(os.sched_getaffinity(0)) + 1, _MOST_AT_ONCE)
