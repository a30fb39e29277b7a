"""What is known of devices by their kind alone."""

from types import SimpleNamespace

import pytest

from launcher.base import warn_once
from launcher.hardware import cluster_shape
from launcher.hardware.cluster_shape import is_nominal
from launcher.hardware.datasheets import find_datasheet
from launcher.plan import local_shape
from launcher.plan.profile.calibration import calibrated


@pytest.mark.parametrize(
    ("kind", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("A100-40G", 40),  # as Ray names it
        ("nvidia_h100_80gb_hbm3", 80),  # as Slurm does
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
    assert shape.memory_bytes == int(0.92 * gib * 2**30)
    assert local_shape(8, 1, kind, memory_share=0.5).memory_bytes == gib << 29
    assert not is_nominal(shape)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB", "GH200-HBM3-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-HBM3e-144GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of one
        ("A100, T4", None),
        ("NVIDIA A10", None),
        ("NVIDIA A100X", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GB200", "GB200-HBM3e-186GB"),
        ("NVIDIA L40S", "L40S-PCIe-48GB"),
        ("nvidia_l40s", "L40S-PCIe-48GB"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("nvidia_geforce_rtx_4090", "RTX-4090-24GB"),
        ("rtx4090", "RTX-4090-24GB"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4080", None),
        ("Tesla T4", "T4-PCIe-16GB"),
        ("T4", "T4-PCIe-16GB"),
        ("NVIDIA T4G", None),
        ("NVIDIA H20", "H20-SXM5-96GB"),
        ("NVIDIA H20-3e", None),
        ("NVIDIA H800", "H800-SXM5-80GB"),
        ("NVIDIA H800 PCIe", None),
        ("nvidia_gh200_144g_hbm3e", "GH200-HBM3e-144GB"),
        ("Tesla V100-PCIE-16GB", None),
        ("Tesla V100S-PCIE-32GB", None),
    ],
)
def test_a_gpu_is_taken_for_no_other(kind, sheet):
    found = find_datasheet(kind)
    assert (found and found.name) == sheet


@pytest.mark.parametrize("kind", ["NVIDIA A10G", "NVIDIA RTX A1000", "GPU"])
def test_an_unknown_gpu_is_no_cpu(kind, caplog):
    shape, cpu = local_shape(8, 1, kind), local_shape(8, 1, "cpu")
    assert (shape.effective_parallelism, shape.memory_bytes, shape.peak_flops) == (None, None, None)
    assert shape.flops > 10 * cpu.flops
    assert shape.dispatch_overhead < cpu.dispatch_overhead
    warn_once.cache_clear()
    assert calibrated(shape) == calibrated(shape) == shape
    [line] = caplog.messages  # in a process once
    assert f"the rates and the memory of {kind} are not known" in line


def test_of_emulated_devices_nothing_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibrated(local_shape(2, 1, "cpu"))
    assert caplog.messages == []


def test_threads_of_others_want_a_core_unless_they_are_niced(tmp_path, monkeypatch):
    load = tmp_path / "loadavg"
    load.write_text("0.10 0.20 0.30 4/321 1234\n")  # four run, of which one reads this
    monkeypatch.setattr(cluster_shape, "_LOAD", load)
    busy = SimpleNamespace(user=40.0, nice=60.0, system=20.0)
    monkeypatch.setattr(cluster_shape.psutil, "cpu_times_percent", lambda: busy)
    for mine, wanted in ((0, 1.5), (10, 3.0)):
        monkeypatch.setattr(cluster_shape.os, "nice", lambda _, mine=mine: mine)
        assert cluster_shape.threads_at_work(0.0) == pytest.approx(wanted)
    load.unlink()
    assert cluster_shape.threads_at_work(0.0) == 0.0
