"""The memory that a worker reports is that of its fullest device, whatever the device is."""

from types import SimpleNamespace

import jax
import pytest

from launcher.train.step_result import memory_bytes


def test_an_emulated_device_has_what_is_counted_in_the_programs():
    found = memory_bytes(5 << 20)
    assert found["perf/peak_memory_bytes"] == 5 << 20
    assert "perf/memory_bytes" not in found
    assert found["perf/process_peak_bytes"] > 50 << 20  # JAX alone takes that
    assert memory_bytes(None).keys() == {"perf/process_peak_bytes"}


def test_a_device_with_memory_of_its_own_is_asked(monkeypatch: pytest.MonkeyPatch):
    said = [
        {"bytes_in_use": 3, "peak_bytes_in_use": 9},
        {"bytes_in_use": 4, "peak_bytes_in_use": 7},
    ]
    devices = [SimpleNamespace(memory_stats=lambda one=one: one) for one in said]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    found = memory_bytes(5 << 20)
    assert (found["perf/memory_bytes"], found["perf/peak_memory_bytes"]) == (4, 9)
