"""Plans from what a user asks for: stages and meshes, names, and what is predicted of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.plan import Plan, PlanError, local_shape, make_forward_plan, timeline
from launcher.plan.methods import DataParallel, PipeshardParallel, UniformStageOption
from launcher.schedule import Kind
from launcher.trace import trace_step

LAYERS, WIDTH = 6, 64


def loss(params, x):
    for i in range(LAYERS):
        if i:
            launcher.mark_pipeline_boundary()
        x = jnp.tanh(x @ params[i])
    return (x**2).mean()


def train(params, x):
    return launcher.grad(loss)(params, x)


PARAMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
BATCH = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
TRACED = trace_step(train, (PARAMS, BATCH))


def planned(devices, traced=TRACED, **options):
    stages = UniformStageOption(
        options.pop("num_stages", None), options.pop("stages_per_mesh", None)
    )
    method = PipeshardParallel(**{"num_micro_batches": 4, "stage_option": stages} | options)
    return method.plan(traced, local_shape(devices, 1, "cpu"))


@pytest.mark.parametrize("kind", ["Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA L40S"])
def test_a_gpu_without_bf16_is_priced_as_it_computes_it(kind):
    """In fp32, which the plan says."""
    shape, width = local_shape(1, 1, kind), 4096

    def plan(dtype):
        params = [jax.ShapeDtypeStruct((width, width), dtype)] * LAYERS
        traced = trace_step(train, (params, jax.ShapeDtypeStruct((4096, width), dtype)))
        return DataParallel().plan(traced, shape)

    half, single = plan(jnp.bfloat16), plan(jnp.float32)
    said = [note for note in half.notes if note.startswith(f"bf16: {kind} (compute capability")]
    assert not any("bf16" in note for note in single.notes)
    if kind == "NVIDIA L40S":
        assert not said
        assert half.predicted_step_seconds < 0.6 * single.predicted_step_seconds
    else:
        assert len(said) == 1
        # as many products; what is fused moves half the bytes
        assert half.predicted_step_seconds > 0.8 * single.predicted_step_seconds


@pytest.mark.parametrize(
    ("devices", "asked", "each", "stages", "meshes"),
    [
        (2, 4, None, 4, 2),
        (2, 6, None, 6, 2),
        (4, 4, None, 4, 2),  # two devices a mesh
        (4, 4, 4, 4, 1),
        (4, 6, 3, 6, 2),
        (3, None, None, 6, 3),
        (4, None, None, 4, 2),  # four meshes would need eight layers
        (2, None, 3, 6, 2),
        (2, 3, None, 3, 1),
        (2, 1, None, 1, 1),
        (2, 2, 1, 2, 2),
    ],
)
def test_several_stages_share_a_mesh(devices, asked, each, stages, meshes):
    plan = planned(devices, schedule="interleaved_1f1b", num_stages=asked, stages_per_mesh=each)
    assert (len(plan.stages), len(plan.meshes)) == (stages, meshes)
    assert plan.mesh_of == tuple(s % meshes for s in range(stages))
    assert plan.num_devices == devices
    assert Plan.from_dict(plan.to_dict()).meshes == plan.meshes
    assert sum(stage.num_parameters for stage in plan.stages) == LAYERS * WIDTH**2
    on_one_mesh = {stage.memory_bytes for stage in plan.stages if stage.devices == plan.meshes[0]}
    assert len(on_one_mesh) == 1  # one device, one peak


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (4, {"schedule": "1f1b", "stages_per_mesh": 2}, "needs .*interleaved_1f1b; 1f1b runs one"),
        (
            4,
            {"schedule": "interleaved_1f1b", "num_stages": 5, "stages_per_mesh": 2},
            "num_stages=5 with 2 stages on each; possible here: 2, 4",
        ),
        (2, {"schedule": "interleaved_1f1b", "stages_per_mesh": 7}, "=7 is more than .* 6 layers"),
        (2, {"schedule": "pipedream"}, "parallel.schedule=pipedream is not one of gpipe, 1f1b"),
        (2, {"schedule": "forward"}, "parallel.schedule=forward is not one of"),
        (2, {"remat": "dots_savable"}, "dots_savable is not one of .*did you mean dots_saveable"),
        (2, {"remat": ["none", "full", "none"], "num_stages": 2}, "3 names for 2 stages"),
    ],
)
def test_what_cannot_be_planned_is_named(devices, options, words):
    with pytest.raises(PlanError, match=words):
        planned(devices, **options)


def test_a_mesh_runs_one_task_at_a_time_and_sends_nothing_to_itself():
    plan = planned(2, schedule="interleaved_1f1b", num_stages=6)
    ends = {}
    for timed in timeline(plan):
        assert timed.mesh == plan.mesh_of[timed.task.stage]
        assert timed.start >= ends.get(timed.mesh, 0.0)
        ends[timed.mesh] = timed.end
    links = {(t.src_stage, t.dst_stage) for t in plan.transfers if t.bytes_per_microbatch}
    assert links == {(s, s + 1) for s in range(5)} | {(s + 1, s) for s in range(5)}
    alone = planned(1, schedule="interleaved_1f1b", num_stages=6)
    assert alone.transfers == ()


def test_the_parts_of_a_backward_pass_are_predicted():
    plan = planned(3, schedule="zero_bubble", num_stages=3, remat="none")
    first, second, last = plan.stages
    assert first.backward_weight_seconds == first.backward_seconds  # nobody waits for its input's
    assert 0 < second.backward_weight_seconds < second.backward_seconds
    start = plan.cluster["dispatch_overhead"]
    forward = last.forward_seconds - start  # of the one program that does both
    assert last.backward_seconds == pytest.approx(2 * forward + start)  # of what may wait
    spent = {}
    for timed in timeline(plan):
        key = timed.task.stage, timed.task.kind
        spent[key] = spent.get(key, 0.0) + timed.end - timed.start
    assert spent[0, Kind.BACKWARD_INPUT] == 0.0


def test_what_is_computed_again_takes_time_and_saves_memory():
    plans = {
        remat: planned(2, num_stages=2, remat=remat) for remat in ("none", "dots_saveable", "full")
    }
    first = [plan.stages[0] for plan in plans.values()]
    seconds = [stage.backward_seconds for stage in first]
    assert seconds == sorted(set(seconds))
    # Of eight microbatches in flight the first stage keeps nothing; it works on one at a time.
    many = {"num_stages": 3, "schedule": "gpipe", "num_micro_batches": 8}
    traced = trace_step(train, (PARAMS, jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)))
    memory = [
        planned(3, traced, remat=remat, **many).stages[0].memory_bytes for remat in ("none", "full")
    ]
    assert memory[1] < memory[0]
    flops = {name: plan.predicted_tflops_per_device_with_remat for name, plan in plans.items()}
    useful = {name: plan.predicted_tflops_per_device for name, plan in plans.items()}
    assert flops["none"] == useful["none"]
    assert flops["dots_saveable"] == useful["dots_saveable"]  # no matrix product is done again
    assert flops["full"] == pytest.approx(useful["full"] * (1 + 1 / 3))


def test_evaluation_runs_on_the_same_meshes():
    plan = planned(4, schedule="interleaved_1f1b", num_stages=4)
    traced = trace_step(
        lambda params, x: launcher.microbatched(loss)(params, x),
        (PARAMS, BATCH),
        donate_argnums=(),
    )
    forward = make_forward_plan(traced, plan)
    assert forward.meshes == plan.meshes
    assert forward.mesh_of == plan.mesh_of
    assert {task.kind for tasks in forward.tasks() for task in tasks} == {Kind.FORWARD}


def test_stages_share_meshes_in_turn():
    plan = planned(2, schedule="interleaved_1f1b", num_stages=4)
    first, second, third, fourth = plan.stages
    folded = dataclasses.replace(plan, stages=(first, second, fourth, third))
    with pytest.raises(PlanError, match="4 stages are on meshes 0, 1, 1, 0"):
        folded.tasks()
