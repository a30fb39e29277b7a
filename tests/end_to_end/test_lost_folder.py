"""The run folder deleted or renamed while the run trains, by the user's own commands."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launched import Launcher, lines, summary

WORDS = (
    "model=mlp", "dataset=synthetic", "train.steps=100000", "train.eval_every=0",
    "cluster=emulated", "cluster.gpus=1", "parallel=data", "wandb.mode=disabled", "run.id=mine",
)  # fmt: skip


@pytest.mark.parametrize(
    "renamed",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.stress)],
)
def test_the_run_ends_and_says_so_with_its_metrics_kept(renamed: bool, tmp_path: Path) -> None:
    run, moved = tmp_path / "outputs" / "mine", tmp_path / "outputs" / "moved"
    launcher = Launcher(tmp_path, *WORDS)
    launcher.wait_for(lambda: len(lines(run)) > 3)
    if renamed:
        run.rename(moved)
    else:
        shutil.rmtree(run)
    code, out, err = launcher.end()
    assert code == 1
    assert "done" not in out
    what = f"was renamed to {moved}" if renamed else "was deleted"
    assert f"launcher: the run folder {run} {what} while the run trained" in err
    assert "Traceback" not in err
    kept = moved if renamed else run
    assert [line["step"] for line in lines(kept)][:3] == [1, 2, 3]
    told = summary(kept)
    assert (told["steps"] > 3, what in told["exit_reason"]) == (True, True)
    assert (kept / "config.yaml").is_file()
    assert (kept / "plan.json").is_file()
    assert renamed == (not run.exists())
