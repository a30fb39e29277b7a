"""These tests need XLA's compiler for NVIDIA GPUs, but no GPU."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiler():
    names = "jax_plugins", "jax_plugins.xla_cuda12"
    if not all(importlib.util.find_spec(name) for name in names):
        pytest.skip("XLA's compiler for GPUs is not installed: pip install '.[plan-cuda]'")
