"""What holds for every test: emulated CPU devices, wherever the tests run, and no network."""

import os
import tempfile

# Before any test imports JAX, which reads them once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["WANDB_MODE"] = "offline"
# What was measured on this machine before must not decide what tests see.
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/launcher-tests-{os.getpid()}"
