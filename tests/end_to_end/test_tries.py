"""`parallel.try` from the command: the fastest of several plans trains, as if it had been given."""

import json
import os
import signal
from pathlib import Path

import pytest
from launched import Launcher, losses, summary, train, typed

WORDS = typed(
    "model=mlp dataset=synthetic cluster=emulated cluster.gpus=2 wandb.mode=disabled "
    "train.eval_every=0"
)
TRIES = "parallel.try=3"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was tried before; nominal rates, so that the plans to try are known."""
    kept = Path(os.environ["XDG_CACHE_HOME"], "launcher", "calibration")
    cache = tmp_path / "cache" / "launcher"
    cache.mkdir(parents=True)
    (cache / "calibration").symlink_to(kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache


@pytest.mark.slow
def test_the_fastest_plan_trains_as_its_replay_and_is_not_tried_again(
    tmp_path: Path, own_cache: Path
) -> None:
    """On two hosts, whose workers try together."""
    own = (*WORDS, "cluster.hosts=2")
    out = train(tmp_path, *own, TRIES, "run.id=one", "train.steps=3")
    assert "trying 3 plans ... " in out
    one = tmp_path / "outputs" / "one"
    plan = json.loads((one / "plan.json").read_text())
    assert len(plan["tried"]) == 3
    assert not any(trial["failure"] for trial in plan["tried"])
    measured = [trial["measured_step_seconds"] for trial in plan["tried"]]
    fastest = plan["tried"][measured.index(min(measured))]
    assert f"the fastest is taken: {fastest['plan']}" in out
    assert summary(one)["predicted_step_seconds"] == plan["predicted_step_seconds"]
    assert plan["predicted_step_seconds"] == fastest["predicted_step_seconds"]
    # It trains as if that plan had been given, and trying has changed nothing.
    replay = "parallel=replay", f"parallel.plan={one / 'plan.json'}"
    train(tmp_path, *own, *replay, "run.id=two", "train.steps=3")
    assert losses(tmp_path / "outputs" / "two") == losses(one)
    # The next run knows the fastest without trying.
    out = train(tmp_path, *own, "run.id=three", "train.steps=3")
    assert "trying" not in out
    assert f"{fastest['plan']} was the fastest" in out
    assert losses(tmp_path / "outputs" / "three") == losses(one)
    # A run that is resumed knows, even if nothing is kept any more.
    (own_cache / "trials").rename(tmp_path / "elsewhere")
    out = train(tmp_path, *own, TRIES, "run.id=one", "train.steps=5")
    assert "trying" not in out
    again = json.loads((one / "plan.json").read_text())
    assert (again["tried"], again["stages"]) == (plan["tried"], plan["stages"])
    assert len(losses(one)) == 5


@pytest.mark.stress
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
