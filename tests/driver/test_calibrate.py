"""`task=calibrate` says what it measured, and never that what it could not keep will be used."""

import json
from pathlib import Path

import pytest

from launcher.config.machines import Emulated
from launcher.driver.calibrate import calibrate
from launcher.log import lines_to
from launcher.plan.profile import calibration
from launcher.report.console import make_console

FOUND = {
    "product_flops": {"bfloat16": {"128": 1e9}, "float32": {"128": 1e9}},
    "memory_bandwidth": 3e9,
    "effective_parallelism": 2.0,
    "dispatch_overhead": 3e-4,
    "all_reduce_seconds": {"4096": 1e-3, "4194304": 9e-3},
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
        assert calibrate(cluster, make_console()) == 1
    out = capsys.readouterr().out
    assert "cannot be written (Not a directory): the measurement is not kept" in out
    assert "from now on" not in out
    home.unlink()
    with lines_to(print):
        assert calibrate(cluster, make_console()) == 0
    out = capsys.readouterr().out
    assert "plans for this machine use it from now on" in out
    assert "not kept" not in out
