"""`task=calibrate` says what it measured, and never that what it could not keep will be used."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.output import lines_to
from launcher.cluster.devices import DevicePool
from launcher.cluster.kinds import pool_shape
from launcher.config.cluster import Emulated
from launcher.config.compose import load
from launcher.driver.tasks.calibrate import Calibrate
from launcher.hardware.cluster_shape import memory_share
from launcher.plan.profile import calibration
from launcher.report.console import make_console

FOUND = {
    "product_flops": {"bfloat16": {"128": 1e9}, "float32": {"128": 1e9}},
    "memory_bandwidth": 3e9,
    "effective_parallelism": 2.0,
    "product_parallelism": 1.5,
    "dispatch_overhead": 3e-4,
    "collectives": [["all-reduce", 4, 1, 4096, 1e-3], ["all-reduce", 4, 1, 4194304, 9e-3]],
    "memory_bytes": None,
}


def test_what_could_not_be_kept_is_not_said_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "measure_devices.py"
    script.write_text(f"print({json.dumps(FOUND)!r})")
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    home, cluster = tmp_path / "home", Emulated(gpus=4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    home.touch()  # which is no folder
    with lines_to(print):
        assert Calibrate().run(replace(load([]), cluster=cluster), make_console()) == 1
    out = capsys.readouterr().out
    assert "cannot be written (Not a directory): the measurement is not kept" in out
    assert "from now on" not in out
    home.unlink()
    with lines_to(print):
        assert Calibrate().run(replace(load([]), cluster=cluster), make_console()) == 0
    out = capsys.readouterr().out
    assert "plans for this machine use it from now on" in out
    assert "not kept" not in out


@pytest.mark.parametrize("environ", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}])
def test_a_gpus_memory_is_measured_as_workers_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    """In a process that allocates the share of it that a plan may fill."""
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = (
        "import json, os",
        "share = float(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])",
        f"print(json.dumps({FOUND!r} | {{'memory_bytes': int(share * 141 * 2**30)}}))",
    )
    script = tmp_path / "measure_devices.py"
    script.write_text("\n".join(lines))
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    nominal = pool_shape(DevicePool("gpu", 1, 2, "NVIDIA H200", ""))
    found, _ = calibration.measure(nominal)
    assert found.memory_bytes == nominal.memory_bytes == int(memory_share(os.environ) * (141 << 30))
