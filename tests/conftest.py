"""What holds for every test: emulated CPU devices, wherever the tests run, and no network."""

import os

# Before any test imports JAX, which reads them once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["WANDB_MODE"] = "offline"
