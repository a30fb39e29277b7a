"""What holds for every test: emulated CPU devices, wherever the tests run, and no network."""

import os
import tempfile

# Before any test imports JAX, which reads them once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["WANDB_MODE"] = "offline"
# What was measured on this machine before must not decide what tests see.
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/launcher-tests-{os.getpid()}"


_MOST_AT_ONCE = 4  # each compiles on all cores; more wait for one another


def pytest_xdist_auto_num_workers(config):
    """How many processes run tests: one a core, but none beside this one for a file or two."""
    named = [argument for argument in config.args if ".py" in argument]
    return 0 if 0 < len(named) <= 2 else min(len(os.sched_getaffinity(0)), _MOST_AT_ONCE)
