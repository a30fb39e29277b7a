"""What is known of devices by their kind alone."""

import pytest

from launcher import log
from launcher.plan import local_shape
from launcher.plan.cluster_shape import is_nominal
from launcher.plan.profile.calibration import calibrated


@pytest.mark.parametrize(
    ("kind", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-PCIE-40GB MIG 1g.5gb", 40),
        ("Tesla V100-SXM2-32GB", 32),
        ("Tesla V100-SXM2-16GB", 16),
        ("NVIDIA H200", 141),
        ("NVIDIA GH200 480GB", 96),  # the processor's memory, not the GPU's
        ("NVIDIA GH200 144G HBM3e", 144),
        ("NVIDIA B200", 180),
    ],
)
def test_the_memory_is_that_of_the_kind(kind, gib):
    shape = local_shape(8, 1, kind)
    assert shape.memory_bytes == gib << 30
    assert not is_nominal(shape)


@pytest.mark.parametrize("kind", ["Tesla T4", "NVIDIA L40S", "GPU"])
def test_an_unknown_gpu_is_no_cpu(kind, caplog):
    shape, cpu = local_shape(8, 1, kind), local_shape(8, 1, "cpu")
    assert (shape.effective_parallelism, shape.memory_bytes, shape.peak_flops) == (None, None, None)
    assert shape.flops > 10 * cpu.flops
    assert shape.dispatch_overhead < cpu.dispatch_overhead
    log.warn_once.cache_clear()
    assert calibrated(shape) == calibrated(shape) == shape
    [line] = caplog.messages  # in a process once
    assert f"the rates and the memory of {kind} are not known" in line


def test_of_emulated_devices_nothing_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibrated(local_shape(2, 1, "cpu"))
    assert caplog.messages == []
