"""A step is cut once, and says of every stage what planning and running need."""

import dataclasses

import pytest
from layered import layered_step

from launcher.partition.assignment import Assignment, PlanError, Submesh
from launcher.partition.partitioned import partition
from launcher.plan import local_shape
from launcher.plan.build import build_plan
from launcher.plan.methods import PipeshardParallel, UniformStageOption
from launcher.runtime.emit.emit import emit
from launcher.schedule import Kind
from launcher.trace import BatchError

LAYERS, WIDTH, BATCH = 4, 8, 16


SHAPES = [(WIDTH, WIDTH)] * LAYERS
STEP = layered_step(SHAPES, BATCH, updated=range(LAYERS))


def assignment(**changed):
    given = Assignment(
        method="manual",
        layers=tuple((i,) for i in range(LAYERS)),
        submeshes=tuple(Submesh((i,), (1, 1)) for i in range(LAYERS)),
        mesh_of=tuple(range(LAYERS)),
        num_micro_batches=4,
        schedule="1f1b",
        remat=("none",) * LAYERS,
    )
    return dataclasses.replace(given, **changed)


def test_equal_stages_are_alike_until_something_differs():
    cut = partition(STEP, assignment())
    first, second, third, last = map(cut.likeness, range(LAYERS))
    assert second == third
    assert len({first, second, last}) == 3
    other = partition(STEP, assignment(remat=("none", "full", "none", "none")))
    assert other.likeness(1) != other.likeness(2) == second
    assert partition(STEP, assignment(schedule="zero_bubble")).likeness(1) != second


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_stage_has_a_program_for_each_kind_of_its_tasks(schedule):
    cut = partition(STEP, assignment(schedule=schedule))
    for stage in range(LAYERS):
        programs = cut.programs(stage)[0].programs
        if cut.goes_back_at_once(stage):
            assert Kind.FORWARD not in programs  # it is one program with what follows it
        else:
            nothing = {Kind.BACKWARD_INPUT} if stage == 0 else set()  # to send back
            assert set(programs) == cut.kinds(stage) - nothing
    assert [cut.goes_back_at_once(s) for s in range(LAYERS)] == [False] * 3 + [True]


def test_only_gradients_that_the_step_uses_are_made():
    cut = partition(layered_step(SHAPES, BATCH, updated=(0, 2)), assignment())
    made = [
        [n for program in cut.programs(s)[0].programs.values() for n in program.outputs]
        for s in range(LAYERS)
    ]
    assert [any(n.kind == "grad" for n in names) for names in made] == [True, False, True, False]
    assert cut.likeness(1) != cut.likeness(2)


def test_shardings_are_chosen_where_none_are_given():
    asked = []

    def choose(loss, graph):
        asked.append(graph.index)
        return {}

    given = {"0.0": (None, None)}
    cut = partition(STEP, assignment(shardings=(given, None, None, None)), choose)
    assert asked == [1, 2, 3]
    assert cut.assignment.shardings == (given, {}, {}, {})


def test_a_plan_is_the_assignment_that_it_was_made_of():
    method = PipeshardParallel(2, stage_option=UniformStageOption(2))
    plan = method.plan(STEP, local_shape(4, 1, "cpu"))
    cut = partition(STEP, plan.assignment)
    assert cut.assignment == plan.assignment
    assert [g.mesh for g in cut.stages] == list(plan.mesh_of)
    programs = {f"stage.{s}.{kind.value}" for s in range(2) for kind in cut.programs(s)[0].programs}
    emitted = set(emit(STEP, plan).programs)
    assert {name.replace("forward_", "") for name in emitted} >= programs


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layers": ((0,), (1,), (3,), (2,))}, "stages hold layers"),
        ({"mesh_of": (0, 1, 1, 0)}, "must take turns"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"remat": ("none", "some", "none", "none")}, "stage 1: remat some is not one of"),
        ({"submeshes": tuple(Submesh((i // 2,), (1, 1)) for i in range(4))}, "in two submeshes"),
        ({"shardings": ({"nobody": ()}, {}, {}, {})}, "no such argument"),
        ({"remat": ("none",)}, "not each of 4 stages"),
        ({"mesh_of": (0, 1, 2, 4)}, "not each of 4 stages"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(changed, words):
    with pytest.raises(PlanError, match=words):
        partition(STEP, assignment(**changed))


def test_a_refused_batch_is_its_own_error():
    with pytest.raises(BatchError):
        partition(STEP, assignment(num_micro_batches=5))


def test_stages_that_gather_their_parameters_are_priced_apart():
    """They are the same program on one slice as those that hold them whole."""
    submeshes = tuple(Submesh((2 * i, 2 * i + 1), (2, 1)) for i in range(LAYERS))
    plan = build_plan(
        STEP, assignment(submeshes=submeshes, zero=(0, 3, 0, 0)), local_shape(8, 1, "cpu")
    )
    kinds = [{c.kind for c in stage.collectives} for stage in plan.stages]
    assert kinds[1] == {"all-gather", "reduce-scatter"}
    assert kinds[2] == {"all-reduce"}
