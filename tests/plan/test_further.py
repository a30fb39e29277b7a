"""Plans of steps with several losses: who follows whom, what keeps its place, what is refused."""

import dataclasses
import itertools
import json
import random

import jax
import jax.numpy as jnp
import pytest
import several

import launcher
from launcher.plan import Plan, PlanError, local_shape, make_forward_plan
from launcher.plan.further import home_of_each, lead_of, moved
from launcher.plan.methods import (
    AutoLayerOption,
    DataParallel,
    ManualStageOption,
    PipeshardParallel,
    Replay,
    UniformStageOption,
    Zero3Parallel,
)
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Send
from launcher.trace import trace_step

TWO_STAGES = PipeshardParallel(num_micro_batches=2, stage_option=UniformStageOption(2))


def traced(make):
    step, init = several.ours(make)
    return trace_step(step, (jax.eval_shape(init), several.BATCH))


def planned(make, method=TWO_STAGES, devices=4):
    step = traced(make)
    return step, method.plan(step, local_shape(devices, 1, "cpu"))


def brute_force(costs, away):
    meshes = range(len(away[0]))

    def key(at):
        work = [sum(c for c, m in zip(costs, at, strict=True) if m == mesh) for mesh in meshes]
        return moved(at, away), max(work), sum(w * w for w in work)

    choices = itertools.product(meshes, repeat=len(costs))
    return min(key(at) for at in choices if list(at) == sorted(at))[:2]


def test_layers_go_where_the_fewest_bytes_are_read_from_elsewhere_and_then_evenly():
    some = random.Random(0)
    for _ in range(60):
        count, meshes = some.randint(1, 6), some.randint(1, 4)
        costs = [some.randint(1, 5) for _ in range(count)]
        away = [[some.randint(0, 2) for _ in range(meshes)] for _ in range(count)]
        at = home_of_each(costs, away)
        assert at == sorted(at)
        work = [sum(c for c, m in zip(costs, at, strict=True) if m == k) for k in range(meshes)]
        assert (moved(at, away), max(work)) == brute_force(costs, away)


def test_a_loss_with_fewer_layers_runs_where_its_parameters_live():
    step, plan = planned(several.generated_outside)
    critic, generator = plan.parts
    assert [stage.devices for stage in generator.stages] == [(0, 1), (2, 3)]
    assert [stage.devices for stage in critic.stages] == [(2, 3)]
    assert lead_of(step) is step.parts[1]  # more work, though it comes later
    assert plan.num_devices == 4
    assert critic.num_micro_batches == generator.num_micro_batches == 2


def test_the_same_layers_make_the_same_stages_and_an_evaluation_goes_forward_only():
    for make in (several.sharpness_aware, several.evaluated_after, several.gan):
        _, plan = planned(make)
        layers = {tuple(s.layers for s in part.stages) for part in plan.parts}
        assert layers == {((0,), (1,))}
    _, plan = planned(several.evaluated_after)
    assert [part.schedule for part in plan.parts] == ["1f1b", "forward"]
    _, plan = planned(several.evaluated_before)
    assert [part.schedule for part in plan.parts] == ["forward", "1f1b"]


@pytest.mark.parametrize("make", [several.gan, several.sharpness_aware, several.added])
def test_no_parameter_moves_between_stages(make):
    step, plan = planned(make)
    emitted = emit(step, plan)
    sends = [x for x in emitted.instructions if isinstance(x, Send)]
    given = {slot for _, slot in emitted.arguments if emitted.slots[slot].aval.size > 1}
    assert not {slot for x in sends for slot in x.inputs} & given
    assert not any("bytes move" in note for part in plan.parts for note in part.notes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", several.STEPS)
@pytest.mark.parametrize("method", [TWO_STAGES, Zero3Parallel()])
def test_results_lie_where_the_arguments_do_whose_places_they_take(make, method):
    step, plan = planned(make, method)
    emitted = emit(step, plan)
    at = dict(emitted.arguments)
    for result, argument in step.whole.aliases.items():
        slot, _, mesh = emitted.results[result]
        place = emitted.slots[at[argument]]
        assert mesh == place.mesh
        if slot is not None:
            assert [axis or None for axis in emitted.slots[slot].spec] == [
                axis or None for axis in place.spec
            ][: len(emitted.slots[slot].spec)]


def test_zero_cuts_the_parameters_of_every_loss_also_where_another_only_reads_them():
    _, plan = planned(several.gan, Zero3Parallel())
    for part in plan.parts:
        cut = {name for name, spec in part.stages[0].shardings.items() if "data" in spec}
        for name in ("d.params.a", "g.params.a"):
            assert any(found.endswith(name) for found in cut)


def test_what_arguments_of_other_losses_hold_counts_as_memory():
    critic, generator = (part.stages[0] for part in planned(several.gan, DataParallel())[1].parts)
    _, alone = planned(several.evaluated_after, DataParallel())
    state = sum(x.size * 4 for x in jax.tree.leaves(several.gan_state()))
    assert min(critic.memory_bytes, generator.memory_bytes) > state
    assert alone.parts[0].stages[0].memory_bytes > 0


def test_predictions_are_for_all_losses():
    _, plan = planned(several.gan)
    critic, generator = dataclasses.replace(plan, further=()), plan.parts[1]
    assert plan.predicted_step_seconds > generator.predicted_step_seconds
    assert plan.predicted_samples_per_second == 8 / plan.predicted_step_seconds
    trained = jax.tree.leaves((several.CRITIC, several.GENERATOR))
    assert plan.num_parameters == sum(x.size for x in trained)
    assert planned(several.sharpness_aware)[1].num_parameters == 3 * 16
    assert plan.notes[0].startswith("2 losses a step, one after the other: ")
    assert critic.num_devices == 4


def test_a_plan_comes_back_from_disk_and_is_checked_against_the_step():
    step, plan = planned(several.gan)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert Replay(again).plan(step, local_shape(4, 1, "cpu")) == plan
    (further,) = plan.further

    def edited(**changes):
        return dataclasses.replace(plan, further=(dataclasses.replace(further, **changes),))

    wrong = {
        r"1 of the step's 2 losses": dataclasses.replace(plan, further=()),
        r"into 2×2 and 4×2 slices": edited(num_micro_batches=4),
        r"stages hold layers \[1\]": edited(stages=further.stages[1:]),
        r"a device is in two submeshes": edited(
            stages=tuple(
                dataclasses.replace(s, devices=d)
                for s, d in zip(further.stages, [(0, 2), (1, 3)], strict=True)
            )
        ),
    }
    for words, found in wrong.items():
        with pytest.raises(PlanError, match=words):
            found.validate(step)


def test_submeshes_of_different_shapes_must_all_be_used():
    option = ManualStageOption([[0], [1]], [(1, 2), (1, 2)], [(1, 2), (2, 1)])
    with pytest.raises(PlanError, match=r"too few layers for all of 1x2 and 2x1 devices"):
        planned(several.generated_outside, PipeshardParallel(stage_option=option))


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "interleaved_1f1b"])
def test_further_losses_follow_under_every_schedule(schedule):
    def make(value_and_grad, evaluated):
        def deep(p, b):
            h = b["x"]
            for name in "abc":
                h = jnp.tanh(h @ p[name])
                launcher.mark_pipeline_boundary()
            return jnp.mean((h @ p["a"] - b["y"]) ** 2)

        def step(state, batch):
            value, grads = value_and_grad(deep)(state["params"], batch)
            state = several.updated(state, grads)
            other, grads = value_and_grad(several.error)(state["params"], batch)
            return several.updated(state, grads), (
                value,
                other,
                evaluated(deep)(state["params"], batch),
            )

        return step, several.first_state

    method = PipeshardParallel(num_micro_batches=2, schedule=schedule)
    step, plan = planned(make, method, devices=2)
    emit(step, plan)
    count = 4 if schedule == "interleaved_1f1b" else 2
    assert [len(part.stages) for part in plan.parts] == [count, 2, count]
    assert plan.all_meshes == ((0,), (1,))


def test_automatic_layers_are_found_for_each_loss():
    method = dataclasses.replace(TWO_STAGES, layer_option=AutoLayerOption(2))
    step, plan = planned(several.gan, method)
    assert all(part.layer_ends is not None for part in plan.parts)
    emit(step, plan)


def test_an_evaluation_follows_the_loss_with_its_layers():
    def evaluation(state, batch):
        return launcher.microbatched(several.critic_loss_of)(
            state["d"]["params"], batch["y"], batch["x"]
        )

    _, plan = planned(several.generated_outside)
    _, init = several.ours(several.generated_outside)
    step = trace_step(evaluation, (jax.eval_shape(init), several.BATCH), donate_argnums=())
    found = make_forward_plan(step, plan)
    assert [stage.devices for stage in found.stages] == [(2, 3)]
    two_layers = trace_step(
        lambda s, b: launcher.microbatched(several.generator_loss)(
            s["g"]["params"], s["d"]["params"], b
        ),
        (jax.eval_shape(init), several.BATCH),
        donate_argnums=(),
    )
    assert len(make_forward_plan(two_layers, plan).stages) == 2
