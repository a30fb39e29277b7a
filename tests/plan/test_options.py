"""Options and plans: the plans they make, and refusals that name what to change."""

import dataclasses

import pytest
from layered import layered_step

from launcher.plan import Plan, PlanError, local_shape
from launcher.plan.methods import (
    DataParallel,
    ManualStageOption,
    ParameterServer,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)

LAYERS, WIDTH = 4, 8


TRACED = layered_step([(WIDTH, WIDTH)] * LAYERS, 24)


def planned(method, devices=4):
    return method.plan(TRACED, local_shape(devices, 1, "cpu"))


def manual(layers=((0, 1), (2, 3)), shapes=((1, 2), (1, 2)), logical=None, options=None):
    option = ManualStageOption(layers, shapes, logical, options)
    return PipeshardParallel(stage_option=option)


def uniform(**options):
    return PipeshardParallel(stage_option=UniformStageOption(**options))


REFUSED = {
    "a layer is missing": (
        manual(layers=[[0, 1], [3]]),
        r"forward_stage_layer_ids=\[\[0, 1\], \[3\]\] does not cover the model's 4 layers in "
        "order, each once: its layers are 0 to 3",
    ),
    "layers out of order": (manual(layers=[[2, 3], [0, 1]]), "does not cover the model's 4 layers"),
    "a stage without layers": (manual(layers=[[0, 1, 2, 3], []]), "does not cover the model's 4"),
    "too few submeshes": (
        manual(shapes=[(1, 4)]),
        "submesh_shapes has 1 entries and forward_stage_layer_ids 2; give one for each stage",
    ),
    "a submesh of no device": (
        manual(shapes=[(1, 0), (1, 4)]),
        r"stage 0: its submesh_shapes=\(1, 0\) must be two whole numbers, at least 1",
    ),
    "a submesh that is a number": (manual(shapes=[2, 2]), "stage 0: its submesh_shapes=2 must be"),
    "devices are left": (
        manual(shapes=[(1, 1), (1, 2)]),
        "submesh_shapes take 3 devices and there are 4; they must cover the cluster",
    ),
    "a logical mesh of another size": (
        manual(logical=[(2, 1), (2, 2)]),
        "stage 1: a logical mesh of 2 × 2 does not fit a submesh of 2 devices",
    ),
    "a negative logical mesh": (
        manual(logical=[(2, 1), (-1, -2)]),
        r"stage 1: its logical_mesh_shapes=\(-1, -2\) must be two whole numbers, at least 1",
    ),
    "an unknown word for sharding": (
        manual(options=["zero1", None]),
        "sharding_options: 'zero1' is not None, \"zero2\", \"zero3\" or a mapping",
    ),
    "specs of an unknown argument": (
        manual(options=[{"0.9": ("data", None)}, None]),
        "stage 0, shardings of 0.9: the step has no such argument",
    ),
    "specs along an unknown axis": (
        manual(options=[None, {"0.2": ("rows", None)}]),
        "stage 1, shardings of 0.2: 'rows' is not an axis; they are data and model",
    ),
    "specs that are too long": (
        manual(options=[{"0.0": ("data", None, None)}, None]),
        r"stage 0, shardings of 0.0: 3 entries for an array of shape \(8, 8\)",
    ),
    "an axis twice": (
        manual(options=[{"0.0": ("data", "data")}, None]),
        "stage 0, shardings of 0.0: an axis can cut one dimension",
    ),
    "specs that do not divide": (
        manual(shapes=[(1, 3), (1, 1)], options=[{"0.0": ("data", None)}, None]),
        "stage 0, shardings of 0.0: 8 cannot be cut along data of {'data': 3, 'model': 1}",
    ),
    "too many stages": (
        uniform(num_stages=5),
        "parallel.num_stages=5 is more than the model's 4 layers .one more than its "
        "mark_pipeline_boundary.. calls",
    ),
    "no stage": (uniform(num_stages=0), "parallel.num_stages=0 must be at least 1"),
    "devices that do not divide": (
        uniform(num_stages=3),
        "4 devices .cluster.gpus. do not divide into equal submeshes for parallel.num_stages=3; "
        "possible here: 1, 2, 4",
    ),
    "a uniform mesh of another size": (
        uniform(num_stages=2, logical_mesh_shape=(2, 2)),
        "a logical mesh of 2 × 2 does not fit the 2 devices of each of 2 submeshes",
    ),
    "an unknown stage option": (
        PipeshardParallel(stage_option="even"), 'stage_option=\'even\' is not "uniform", "auto"'
    ),
    "an unknown layer option": (
        PipeshardParallel(layer_option="hand"), 'layer_option=\'hand\' is not "manual"'
    ),
    "an unknown policy": (PipeshardParallel(remat="some"), "parallel.remat=some is not one of"),
    "3d on other devices": (
        ThreeDParallel(2, 2, 2),
        "data × model × pipeline = 2 × 2 × 2 needs 8 devices and there are 4 .cluster.gpus.; make "
        "the product the number of devices",
    ),
    "3d of less than one": (ThreeDParallel(-2, -2, 1), "data × model × pipeline = -2 × -2 × 1"),
    "shard on other devices": (
        ShardParallel(logical_mesh_shape=(2, 3)), "logical_mesh_shape = 2 × 3 needs 6 devices"
    ),
    "half a microbatch": (DataParallel(1.5), "num_micro_batches=1.5 must be a whole number"),
    **{
        f"{method.__name__} of no microbatch": (
            method(0), "num_micro_batches=0 must be a whole number, at least 1"
        )
        for method in (
            DataParallel, ParameterServer, Zero2Parallel, Zero3Parallel, ShardParallel,
            PipeshardParallel,
        )
    },
    "no server": (
        ParameterServer(servers=0), "servers=0 must be at least 1, or null for one a host"
    ),
}  # fmt: skip


@pytest.mark.sampled(5, rest="slow")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_named(case):
    method, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        planned(method)


def test_manual_stages_take_the_devices_in_order():
    plan = planned(manual([[0], [1, 2, 3]], [(1, 1), (1, 3)], [(1, 1), (3, 1)]))
    assert [stage.layers for stage in plan.stages] == [(0,), (1, 2, 3)]
    assert [stage.devices for stage in plan.stages] == [(0,), (1, 2, 3)]
    assert [stage.logical_mesh for stage in plan.stages] == [(1, 1), (3, 1)]
    assert plan.num_replicas == 1


def test_shardings_are_those_that_were_given():
    given = {"0.0": ("model", "data")}
    option = manual([[0, 1], [2, 3]], [(1, 4), (1, 4)], [(2, 2), (4, 1)], [given, "zero3"])
    first, second = planned(option, 8).stages
    assert first.shardings == given
    assert second.shardings["0.2"] == ("data", None)


def test_uniform_stages_share_the_devices_equally():
    plan = planned(uniform(num_stages=2, logical_mesh_shape=(1, 2)))
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]
    assert {stage.logical_mesh for stage in plan.stages} == {(1, 2)}
    assert [stage.layers for stage in plan.stages] == [(0, 1), (2, 3)]


# -- plans that are replayed -----------------------------------------------------------------------

PLAN = planned(uniform(num_stages=2))


def edited(stage=None, **whole):
    """The plan with fields of its own, or `stage=(index, fields)` of a stage, replaced."""
    stages = list(PLAN.stages)
    if stage is not None:
        stages[stage[0]] = dataclasses.replace(stages[stage[0]], **stage[1])
    return dataclasses.replace(PLAN, **{"stages": tuple(stages), **whole})


INVALID = {
    "a layer is missing": (
        edited((0, {"layers": (0,)})), r"stages hold layers \[0, 2, 3\]; the model has 0 to 3"
    ),
    "a stage without layers": (
        edited(stages=(
            dataclasses.replace(PLAN.stages[0], layers=(0, 1, 2, 3)),
            dataclasses.replace(PLAN.stages[1], layers=()),
        )),
        "stage 1 has no layers",
    ),
    "a device twice": (
        edited((1, {"devices": (1, 2)})), r"a device is in two submeshes: \[0, 1, 1, 2\]"
    ),
    "an unknown device": (
        edited((1, {"devices": (2, 9)})), "device 9 is not one of the cluster's, 0 to 3"
    ),
    "a logical mesh of another size": (
        edited((1, {"logical_mesh": (1, 4)})),
        r"stage 1: a logical mesh of \(1, 4\) does not fit 2 devices",
    ),
    "an unknown policy": (
        edited((0, {"remat": "some"})), "stage 0: remat some is not one of none, full"
    ),
    "an unknown schedule": (edited(schedule="2f2b"), "schedule '2f2b' is not one of gpipe, 1f1b"),
    "no microbatch": (edited(num_micro_batches=0), "num_micro_batches=0 must be at least 1"),
    "two stages on a submesh": (
        edited((1, {"devices": (0, 1)})), "1f1b cannot run 2 stages on 1 submeshes"
    ),
    "an unknown argument": (
        edited((0, {"shardings": {"7": ()}})),
        "stage 0, shardings of 7: the step has no such argument",
    ),
    "a dimension that does not divide": (
        edited((0, {"logical_mesh": (1, 2), "devices": (0, 1),
                    "shardings": {"0.0": (("data", "model"), "model")}})),
        "an axis can cut one dimension, and",
    ),
}  # fmt: skip


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("case", INVALID)
def test_a_plan_that_was_edited_is_proved(case):
    plan, words = INVALID[case]
    with pytest.raises(PlanError, match=words):
        plan.validate(TRACED)


def test_a_plan_passes_its_own_proof_and_json():
    PLAN.validate(TRACED)
    assert Plan.from_dict(PLAN.to_dict()) == PLAN


@pytest.mark.parametrize(
    "change",
    [
        {"stages": None},
        {"stages": [1, 2]},
        {"stages": [{"layers": [0]}]},
        {"color": "red"},
        {"cluster": {}},
        {"cluster": None},
    ],
)
def test_data_that_is_no_plan_is_named(change):
    with pytest.raises(PlanError, match="this is not a plan of this version"):
        Plan.from_dict({**PLAN.to_dict(), **change})
