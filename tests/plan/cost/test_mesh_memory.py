"""The parts of the memory estimate; tests/runtime/test_memory_measured.py measures them."""

import pytest
from layered import layered_step

from launcher.partition.named_dims import NamedDims, Sharding
from launcher.partition.stages import cut_stages
from launcher.partition.task_programs import trace_stage
from launcher.plan import local_shape
from launcher.plan.cost.mesh_memory import Sums, mesh_activation_bytes, waiting_bytes
from launcher.plan.cost.stage_memory import Footprint, footprint
from launcher.plan.methods import DataParallel, Zero3Parallel
from launcher.schedule import Kind, make_tasks, max_in_flight

WIDTH, ROWS, STAGES, MICRO_BATCHES = 8, 4, 4, 6
BOUNDARY = ROWS * WIDTH * 4
F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.fixture(scope="module")
def found():
    return layered_step([(WIDTH, WIDTH)] * STAGES, ROWS)


def footprints(traced, meshes, remat, kinds=frozenset((Kind.FORWARD, Kind.BACKWARD))):
    """Of each stage, on one device, its passes apart; by mesh."""
    graphs = cut_stages(traced.loss(1), [(i,) for i in range(STAGES)])
    found = [{} for _ in range(meshes)]
    for graph in graphs:
        of = trace_stage(graph, traced.loss(1), remat, kinds)
        found[graph.index % meshes][graph.index] = footprint(
            of, Sharding(NamedDims([]), {}), on_gpu=False
        )
    return found


def peaks(traced, name, meshes, remat, kinds=frozenset((Kind.FORWARD, Kind.BACKWARD))):
    tasks = make_tasks(name, STAGES, meshes, MICRO_BATCHES)
    found = footprints(traced, meshes, remat, kinds)
    return [mesh_activation_bytes(of, on_mesh) for of, on_mesh in zip(found, tasks, strict=True)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_kept_is_kept_for_every_microbatch_in_flight(found, name, remat):
    (one,) = footprints(found, STAGES, remat)[1].values()
    in_flight = max_in_flight(make_tasks(name, STAGES, STAGES, MICRO_BATCHES)[1])
    kept, worked = one.left[Kind.FORWARD], one.working
    last = max((in_flight - 1) * kept + worked[Kind.FORWARD], in_flight * kept)
    assert peaks(found, name, STAGES, remat)[1] == pytest.approx(
        max(last, in_flight * kept + worked[Kind.BACKWARD])
    )


def test_full_rematerialisation_keeps_the_boundary(found):
    for stage, of in enumerate(footprints(found, STAGES, "full")):
        # The first stage's input is the batch, which is there anyway.
        assert of[stage].left[Kind.FORWARD] == (BOUNDARY if stage else 0)


def test_what_is_computed_again_is_held_between_the_parts_of_a_backward_pass(found):
    kinds = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    (one,) = footprints(found, STAGES, "full", kinds)[1].values()
    assert one.left[Kind.BACKWARD_INPUT] > 0
    assert sum(one.left.values()) == 0


@pytest.mark.parametrize("method", [DataParallel, Zero3Parallel])
def test_layers_computed_again_add_their_inputs_alone(method):
    """Each is done with, gradient and all, before the one below is computed again."""
    width, rows, devices = 2048, 2**14, 8
    weight, activation = width * width * 4, rows * width * 4

    def needed(layers):
        step = layered_step([(width, width)] * layers, devices * rows)
        plan = method(1, remat="full").plan(step, local_shape(devices, 1, "H100"))
        return plan.stages[0].memory_bytes

    most = activation + 3 * weight  # with its gradient and its place in a bucket
    assert needed(8) - needed(4) <= 4 * most


def test_a_gradient_is_copied_twice_where_the_rest_of_the_pass_waits_for_it():
    """That of the second layer: a layer has its weight and its gradient besides."""
    weight = 2048 * 2048 * 4

    def needed(layers):
        step = layered_step([(2048, 2048)] * layers, 4 * ROWS, updated=range(layers))
        plan = DataParallel(2, bucket_bytes=1).plan(step, local_shape(2, 1, "H100"))
        return plan.stages[0].memory_bytes

    assert needed(2) - needed(1) == pytest.approx(4 * weight, rel=0.01)


def test_the_stages_of_a_mesh_add_up(found):
    tasks = make_tasks("interleaved_1f1b", STAGES, 2, MICRO_BATCHES)
    shared = peaks(found, "interleaved_1f1b", 2, "full")
    assert shared[1] >= max_in_flight(tasks[1]) * BOUNDARY
    assert shared[0] < shared[1] + max_in_flight(tasks[0]) * BOUNDARY  # stage 0 keeps nothing


@pytest.mark.parametrize(
    ("fresh", "last", "expected"), [(3, {}, 35), (10, {}, 39), (10, {B: 18.0}, 42)]
)
def test_sums_are_made_beside_the_last_task_alone(fresh, last, expected):
    """Two microbatches are in flight before, and one as their gradients are summed.

    Gradients wait for others in the last task, and so does what they are made of.
    """
    left, working = {F: 10.0, B: -10.0}, {F: 12.0, B: 15.0}
    tasks = [(0, 0, F), (0, 1, F), (0, 0, B), (0, 1, B)]
    sums = {0: Sums(fresh, 4, True)}
    assert mesh_activation_bytes({0: Footprint(left, working, last=last)}, tasks, sums) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"), [("gpipe", 0), ("1f1b", 1), ("eager_1f1b", 1), ("zero_bubble", 1)]
)
def test_what_stages_send_ahead_waits_where_it_is_read(schedule, expected):
    """While the last of three stages runs its first backward pass."""
    tasks = make_tasks(schedule, 3, 3, 6)
    footprints = {s: Footprint({}, {}, arriving=10 if s else 0) for s in range(3)}
    waiting = waiting_bytes(footprints, tasks)
    first = next(task for task in tasks[2] if task.kind is not F)
    assert waiting[first] == 10 * expected
    assert all(waiting[task] == 0 for task in tasks[0])
    assert waiting[tasks[2][-1]] == 0
