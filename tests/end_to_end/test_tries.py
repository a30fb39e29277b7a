"""`parallel.try` from the command: the fastest of several plans trains, as if it had been given."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launched import Launcher, losses, summary

WORDS = (
    "model=mlp",
    "dataset=synthetic",
    "cluster=emulated",
    "cluster.gpus=2",
    "wandb.mode=disabled",
    "train.eval_every=0",
)
TRIES = "parallel.try=3"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was tried before; nominal rates, so that the plans to try are known."""
    kept = Path(os.environ["XDG_CACHE_HOME"], "launcher", "calibration")
    cache = tmp_path / "cache" / "launcher"
    cache.mkdir(parents=True)
    (cache / "calibration").symlink_to(kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache


def run(folder: Path, *words: str) -> str:
    code, out, err = Launcher(folder, *WORDS, *words).end()
    assert (code, err) == (0, ""), out
    return out


def test_the_fastest_plan_trains_as_its_replay_and_is_not_tried_again(
    tmp_path: Path, own_cache: Path
) -> None:
    out = run(tmp_path, TRIES, "run.id=one", "train.steps=3", "train.checkpoint.every_steps=3")
    assert "trying 3 plans ... " in out
    one = tmp_path / "outputs" / "one"
    plan = json.loads((one / "plan.json").read_text())
    assert len(plan["tried"]) == 3
    measured = [trial["measured_step_seconds"] for trial in plan["tried"]]
    fastest = plan["tried"][measured.index(min(measured))]
    assert f"the fastest is taken: {fastest['plan']}" in out
    assert summary(one)["predicted_step_seconds"] == plan["predicted_step_seconds"]
    assert plan["predicted_step_seconds"] == fastest["predicted_step_seconds"]
    # It trains as if that plan had been given, and trying has changed nothing.
    run(tmp_path, "parallel=replay", f"parallel.plan={one / 'plan.json'}", "run.id=two")
    assert losses(tmp_path / "outputs" / "two") == losses(one)
    # The next run knows, and so does one that goes on, even if nothing is kept any more.
    out = run(tmp_path, "train.steps=3", "run.id=three")
    assert "trying" not in out
    assert f"{fastest['plan']} was the fastest" in out
    assert losses(tmp_path / "outputs" / "three") == losses(one)
    (own_cache / "trials").rename(tmp_path / "elsewhere")
    out = run(tmp_path, TRIES, "run.id=one", "train.steps=5")
    assert "trying" not in out
    again = json.loads((one / "plan.json").read_text())
    assert (again["tried"], again["stages"]) == (plan["tried"], plan["stages"])
    assert len(losses(one)) == 5


def test_workers_on_several_hosts_try_together(tmp_path: Path) -> None:
    out = run(tmp_path, TRIES, "cluster.hosts=2", "train.steps=2", "run.id=one")
    plan = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())
    assert "trying 3 plans ... " in out
    assert len(plan["tried"]) == 3
    assert not any(trial["failure"] for trial in plan["tried"])
    assert len(losses(tmp_path / "outputs" / "one")) == 2


def test_ctrl_c_while_plans_are_tried_ends_the_run(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as output:
        launcher = Launcher(tmp_path, *WORDS, TRIES, "run.id=one", stdout=output.fileno())
    launcher.wait_for_handlers()
    launcher.wait_for(lambda: "trying 3 plans" in (tmp_path / "output").read_text())
    os.killpg(launcher.process.pid, signal.SIGINT)
    code, _, err = launcher.end(soon=10)
    assert (code, err) == (130, "")
    assert summary(tmp_path / "outputs" / "one")["exit_reason"] == "interrupted"
    assert not losses(tmp_path / "outputs" / "one")
