"""Plans keep on GPUs what they promise of memory and collectives, as the GPUs' compiler sees them.

`sweep` plans and compiles. The compiler's wheels are needed, no GPU: `pip install '.[plan-cuda]'`.
"""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sweep
from cells import cells

from launcher.__main__ import main

CELLS = {sweep.name_of(cell): cell for cell in cells()}
# Of the tier `slow`, in three minutes: convolutions of many channels take a minute a cell.
_QUICK = [name for name in sorted(CELLS) if "unet" not in name and "wide_resnet" not in name]
DRAWN = random.Random(37).sample(_QUICK, 20)
BOUNDS, OF_ALL = (0.93, 1.22), (0.86, 1.22)  # predicted over compiled memory: in CI, by hand
REDUCING = "all-reduce", "reduce-scatter"


def _cells():
    for name in CELLS:
        tier = pytest.mark.slow if name in DRAWN else pytest.mark.gpu_compile
        yield pytest.param(CELLS[name], id=name, marks=tier)


def summed(report, stage):
    """The most bytes that one of a stage's programs sums over the replicas, but for updates."""
    return max(
        sum(
            one.bytes
            for one in program.collectives
            if one.kind in REDUCING and one.axis.startswith("data")
        )
        for program in report.programs
        if any(name.startswith(f"stage.{stage}.") for name in program.names)
    )


@pytest.mark.parametrize("cell", list(_cells()))
def test_memory_and_gradient_sums_are_as_planned(cell):
    plan, report = compiled = sweep.compile_cell(cell)
    assert report.errors == ()
    least, most = BOUNDS if sweep.name_of(cell) in DRAWN else OF_ALL
    assert all(least < ratio < most for ratio in compiled.ratios), compiled.ratios
    for number, stage in enumerate(plan.stages):
        planned = sum(bucket.bytes for bucket in stage.buckets)
        assert summed(report, number) == pytest.approx(planned, rel=0.01, abs=4096)


def test_the_command_line_tells_what_the_compiler_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("model=gpt", "model.size=nano", "cluster=h100_8", "parallel=zero2")
    assert main([*sweep.FIXED, *words, "plan.compile=true", "run.id=one"]) == 0
    told = capsys.readouterr().out
    assert "compiled for H100-SXM5-80GB" in told
    assert "reduce-scatter  data (8)" in told
    assert "As compiled" in (tmp_path / "outputs/one/report.html").read_text()
