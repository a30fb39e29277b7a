"""The settings of `parallel` become a plan, or one sentence that says what is wrong with them."""

import dataclasses
import json

import pytest
from layered import layered_step

from launcher.config.errors import ConfigError
from launcher.config.parallel import METHODS
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import PlanError, local_shape
from launcher.plan.methods import Replay

SHAPES = [(8, 8)] * 4
STEP = layered_step(SHAPES, 24)


def planned(step=STEP, hosts=1, method="auto", **settings):
    return plan_of(METHODS[method](**settings), step, local_shape(4, hosts, "cpu"))


OPEN = {"model": None, "pipeline": None}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("settings", "stages", "logical", "micro_batches"),
    [
        ({"method": "data"}, 1, (4, 1), 1),
        ({"method": "parameter_server"}, 1, (4, 1), 1),
        ({"method": "zero2", "num_micro_batches": 2}, 1, (4, 1), 2),
        ({"method": "zero3"}, 1, (4, 1), 1),
        ({"method": "shard"}, 1, (1, 4), 1),
        ({"method": "shard", "data": 2}, 1, (2, 2), 1),
        ({"method": "shard", "model": 1}, 1, (4, 1), 1),
        ({"method": "three_d"}, 2, (1, 2), 4),
        ({"method": "three_d", "pipeline": None}, 1, (2, 2), 4),  # the rest goes to data
        ({"method": "three_d", "data": 2, **OPEN}, 2, (2, 1), 4),  # or else to pipeline
        (
            {"method": "three_d", "data": 1, "model": None, "pipeline": 1},
            1,
            (1, 4),
            4,
        ),  # or else to model
        ({"method": "manual"}, 4, (1, 1), 4),
        ({"method": "manual", "num_stages": 2, "schedule": "gpipe"}, 2, (2, 1), 4),
    ],
)
def test_each_method_by_its_settings(settings, stages, logical, micro_batches):
    plan = planned(**settings)
    assert plan.method == settings["method"]
    assert len(plan.stages) == stages
    assert {stage.logical_mesh for stage in plan.stages} == {logical}
    assert plan.num_micro_batches == micro_batches
    assert plan.schedule == settings.get("schedule", "1f1b")  # what is left open is usual
    assert {stage.remat for stage in plan.stages} == {"none"}


@pytest.mark.parametrize(
    ("method", "others"),
    [
        ("auto", {"num_micro_batches": 2}),
        ("manual", {"num_stages": 2}),
        ("manual", {"num_stages": 2, "cost": "profile"}),
        ("three_d", {"pipeline": 2}),
    ],
)
@pytest.mark.parametrize("marked", [True, False])
def test_num_layers_is_obeyed_with_and_without_marks(method, others, marked, monkeypatch):
    step = layered_step(SHAPES, 24, marked=marked)
    measured = []

    def measure(step, *_):  # no processes: which layers would be measured is what counts
        measured.append(step.loss(1).num_layers)
        raise PlanError("not measured")

    monkeypatch.setattr("launcher.driver.planning.plan_from_config.measure_layers", measure)
    if others.get("cost") == "profile":
        with pytest.raises(PlanError, match="not measured"):
            planned(step, method=method, num_layers=3, **others)
        assert measured == [3]
    else:
        plan = planned(step, method=method, num_layers=3, **others)
        assert [layer for stage in plan.stages for layer in stage.layers] == [0, 1, 2]
        assert plan.layer_ends is not None


def test_a_model_without_marks_is_piped_by_manual():
    plan = planned(layered_step(SHAPES, 24, marked=False), method="manual", num_stages=2)
    assert len(plan.stages) == 2


def test_settings_without_a_plan_are_named():
    with pytest.raises(PlanError, match="data × model × pipeline = 3 × 1 × 1 needs 3 devices"):
        planned(method="three_d", data=3, **OPEN)
    with pytest.raises(
        PlanError, match=r"parallel\.num_stages=9 is more than the model's 4 layers"
    ):
        planned(method="manual", num_stages=9)
    with pytest.raises(ValueError, match="24"):  # rows
        planned(method="data", num_micro_batches=5)


PLAN = planned(method="manual", num_stages=2, num_micro_batches=3)


def replayed(path, text, **others):
    text = json.dumps(text) if isinstance(text, dict) else text
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return planned(method="replay", plan=str(path), **others)


def test_a_plan_is_replayed_as_it_is(tmp_path):
    assert replayed(tmp_path / "plan.json", PLAN.to_dict()) == PLAN


def test_an_edit_by_hand_is_followed(tmp_path):
    tree = json.loads(json.dumps(PLAN.to_dict()))
    tree["stages"][0]["shardings"] = {"0.0": ["data", None]}
    plan = replayed(tmp_path / "plan.json", tree)
    assert plan.stages[0].shardings == {"0.0": ("data", None)}


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere.json"
    with pytest.raises(ConfigError) as caught:
        planned(method="replay", plan=str(path))
    assert str(caught.value) == (
        f"parallel.plan={path} cannot be read as a plan: No such file or directory. "
        "Name a plan.json of an earlier run."
    )
    assert caught.value.keys == ("parallel.plan",)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"stages": [1], "transfers": []}', "\x00", b"\xff\xfe\xfa"]
)
def test_a_file_that_is_no_plan(tmp_path, text):
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read as a plan: .+\. Name a plan"):
        replayed(tmp_path / "plan.json", text)


CUT = dataclasses.replace(PLAN.stages[0], layers=(0,))


@pytest.mark.parametrize(
    ("change", "others", "words"),
    [
        (
            {},
            {"step": layered_step(SHAPES, 24, scale=2.0)},
            r"was made for another program\. Use the model, data",
        ),
        # Newer versions trace a step to other equations: they are named, not the settings.
        (
            {"jax_version": "0.9.1", "fingerprint": "another"},
            {},
            r"was made with JAX 0\.9\.1; here is JAX .+ Plan again",
        ),
        ({}, {"hosts": 2}, "is for 1 hosts × 4 devices; here are 2 × 2"),
        (
            {"stages": (CUT, *PLAN.stages[1:])},
            {},
            r"stages hold layers \[0, 2, 3\]; the model has 0 to 3",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused(tmp_path, change, others, words):
    plan = dataclasses.replace(PLAN, **change)
    with pytest.raises(ConfigError, match=words) as caught:
        replayed(tmp_path / "plan.json", plan.to_dict(), **others)
    assert str(caught.value).startswith("parallel.plan=")


SHARED = planned(
    method="manual",
    num_stages=4,
    stages_per_mesh=2,
    num_micro_batches=2,
    schedule="interleaved_1f1b",
).to_dict()


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["num_micro_batches"], 7, "num_micro_batches=7 on 2 replicas: .*24"),
        (["num_micro_batches"], "4", "num_micro_batches is '4', not a whole number"),
        (["num_micro_batches"], True, "num_micro_batches is True, not a whole number"),
        (["schedule"], ["x"], r"schedule is \['x'\], not text"),
        (["schedule"], None, "schedule is None, not text"),
        (["batch_size"], 8, "batch_size=8, but the step's is 24"),
        (["cluster", "hosts"], "1", "cluster.hosts is '1', not a whole number"),
        (["cluster", "color"], 1, "cluster.color is not known"),
        (["predicted_step_seconds"], "x", "predicted_step_seconds is 'x', not a number"),
        (["layer_ends"], [[1]], r"layer_ends\[0\] is \[1\], not a list of 2"),
        (["stages", 0, "layers"], 0, r"stages\[0\].layers is 0, not a list"),
        (["stages", 1, "logical_mesh"], [1, 2, 1], r"stages\[1\].logical_mesh is .*a list of 2"),
        (
            ["stages", 0, "effective_parallelism"],
            "x",
            r"stages\[0\].effective_parallelism is 'x', not a number or null",
        ),
        (["stages", 0, "hosts"], [], r"stage 0: hosts \[\] are not those of its devices, \[0\]"),
        (["stages", 0, "shardings"], {"0.0": [1]}, r"shardings.0.0\[0\] is 1, not text or a list"),
        (["stages", 2, "logical_mesh"], [1, 2], "stages 0 and 2 are on the same devices with"),
        (["transfers"], [3], r"transfers\[0\] is not a table"),
    ],
)
def test_an_edit_that_cannot_be_is_named(tmp_path, place, value, words):
    tree = json.loads(json.dumps(SHARED))
    part = tree
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    with pytest.raises(ConfigError, match=words) as caught:
        replayed(tmp_path / "plan.json", tree)
    assert str(caught.value).startswith("parallel.plan=")


def test_replay_in_python_is_checked_as_well():
    with pytest.raises(PlanError, match="num_micro_batches=7"):
        Replay(dataclasses.replace(PLAN, num_micro_batches=7)).plan(STEP, local_shape(4, 1, "cpu"))
