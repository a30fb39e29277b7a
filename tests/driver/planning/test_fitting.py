"""A plan that needs more memory than there is: an error, with what would fit, unless allowed."""

import dataclasses
import json
from pathlib import Path

import pytest
from layered import layered_step

from launcher.__main__ import main
from launcher.config.compose import load
from launcher.config.parallel import METHODS, Zero3
from launcher.driver.planning import prepare
from launcher.driver.planning.plan_from_config import plan_of, too_large, what_fits
from launcher.plan import PlanError, local_shape
from launcher.report.console import make_console

WIDTH, ROWS = 256, 512
WORD = "To run it anyway, set parallel.allow_over_memory=true"
MLP = ("recipe=mlp_synthetic", "parallel=data", "cluster=h100_8", "model.hidden_size=512")


STEP = layered_step([(WIDTH, WIDTH)] * 4, ROWS, updated=range(4))


def shape(memory: int):
    return dataclasses.replace(local_shape(4, 1, "cpu"), memory_bytes=memory)


def planned(memory: int, method: str, **settings):
    return plan_of(METHODS[method](**settings), STEP, shape(memory))


def most(plan) -> int:
    return max(stage.memory_bytes for stage in plan.stages)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["data", "zero2", "zero3", "shard", "three_d", "manual"])
def test_what_is_named_fits(method):
    """Of a device with a little less than the plan needs; and each way was really tried."""
    memory = most(planned(1 << 40, method=method)) - 1
    plan = planned(memory, method=method)
    assert too_large(plan).startswith("the plan does not fit: stage ")
    text = what_fits(METHODS[method](), STEP, shape(memory), plan)
    assert text.startswith("This would fit: ")
    assert text.endswith(WORD)
    first = text.removeprefix("This would fit: ").split("; or ")[0]
    assert "parallel" in first
    if not first.startswith("parallel=auto"):
        pairs = [word.removeprefix("parallel").split("=") for word in first.split(" ")]
        settings = {(key or ".method")[1:]: value for key, value in pairs}
        if "num_micro_batches" in settings:
            settings["num_micro_batches"] = int(settings["num_micro_batches"])
        assert not too_large(planned(memory, **{"method": method} | settings))


def test_what_fits_is_not_said_to_lack_anything():
    plan = planned(1 << 40, method="data")
    assert too_large(plan) == ""
    assert too_large(dataclasses.replace(plan, cluster=plan.cluster | {"memory_bytes": None})) == ""


@pytest.mark.stress  # every way is searched for
def test_where_nothing_fits_larger_devices_are_named():
    plan = planned(1000, method="zero3")
    text = what_fits(Zero3(), STEP, shape(1000), plan)
    assert text.endswith(WORD)
    assert text.startswith(("This would fit: parallel=auto with ", "Take a smaller"))


@pytest.mark.slow
def test_auto_plans_what_lacks_least_where_that_is_allowed():
    with pytest.raises(PlanError, match="does not fit"):
        planned(100_000, method="auto")
    plan = planned(100_000, method="auto", allow_over_memory=True)
    assert too_large(plan)
    assert most(plan) < most(planned(1 << 40, method="data"))


def test_task_plan_shows_the_plan_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = (
        "task=plan",
        f"run.dir={tmp_path}",
        "run.id=one",
        *MLP,
        "cluster.device.memory_gib=0.008",
    )
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "plan: data" in out
    assert "\nthis plan needs more memory than the devices have\n" in out
    assert "looking for what would fit" in out
    assert err.startswith("launcher: the plan does not fit: stage 0 needs ")
    assert err.count("\n") == 1
    assert json.loads((tmp_path / "one" / "plan.json").read_text())["method"] == "data"
    assert main([*words, "parallel.allow_over_memory=true"]) == 0
    out, err = capsys.readouterr()
    assert (err, "; parallel.allow_over_memory=true" in out) == ("", True)


@pytest.mark.slow
def test_auto_shows_the_nearest_plan_and_advises_what_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [f"run.dir={tmp_path}", "run.id=one", *MLP, "parallel=auto"]
    assert main([*words, "cluster.device.memory_gib=0.00525", "task=plan"]) == 1
    out, err = capsys.readouterr()
    assert out.index("plan: auto") < out.index(
        "\nthis plan needs more memory than the devices have\n"
    )
    assert err.startswith("launcher: the model does not fit: in the leanest plan found ")
    assert err.count("\n") == 1
    assert json.loads((tmp_path / "one" / "plan.json").read_text())["method"] == "auto"
    for advice in err.split("This would fit: ")[1].split("; or "):
        settings = [word for word in advice.split() if "=" in word]
        assert settings
        assert main([*words, *settings, "run.id=two", "task=check"]) == 0
    assert "cluster.hosts=" in err


def test_a_run_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "shape_of", lambda *_: shape(100_000))
    words = ["recipe=mlp_synthetic", "parallel=data", "train.eval_every=0"]
    with pytest.raises(PlanError, match=WORD):
        prepare.prepare(load(words), make_console())
    allowed = prepare.prepare(load([*words, "parallel.allow_over_memory=true"]), make_console())
    assert allowed.problem == ""
