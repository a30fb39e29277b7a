"""Cutting a stage into passes: nothing is computed twice, and no more kept than is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.partition.joint_graph import trace_joint
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.partition.remat import POLICIES
from launcher.partition.stages import cut_stages
from launcher.partition.task_programs import cut, outputs_by_kind, trace_stage, with_less_kept
from launcher.plan.cost.stage_memory import footprint
from launcher.schedule import Kind
from launcher.trace import trace_step
from launcher.trace.ir.cost import matmul_flops
from launcher.trace.ir.jaxpr import make_jaxpr, nbytes

WIDTH, ROWS, DEPTH = 16, 8, 3
WHOLE = {Kind.FORWARD, Kind.BACKWARD}
SPLIT = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


def dense(params, x):
    for w, b in zip(params["w"], params["b"], strict=True):
        x = jax.nn.gelu(x @ w + b) + x
    return x


def checkpointed(params, x):
    for i in range(DEPTH):
        layer = jax.checkpoint(lambda w, b, x: jnp.sin(jnp.tanh(x @ w + b)))
        x = layer(params["w"][i], params["b"][i], x)
    return x


def scanned(params, x):
    def layer(x, wb):
        return jnp.sin(jnp.tanh(x @ wb[0] + wb[1])), None

    return jax.lax.scan(layer, x, (params["w"], params["b"]))[0]


def own_gradient(params, x):
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, jnp.cos(x)), lambda cos, ct: (2 * ct * cos / cos,))
    return doubled(dense(params, x))


LAYERS = [dense, checkpointed, scanned, own_gradient]


def stages(layer):
    """The loss of three stages of such layers, and their graphs."""

    def loss(params, x):
        for i, of_stage in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = layer(of_stage, x)
        return (x**2).mean()

    weights = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)
    biases = jax.ShapeDtypeStruct((DEPTH, WIDTH), jnp.float32)
    args = [{"w": weights, "b": biases}] * 3, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    found = trace_step(lambda p, x: launcher.grad(loss)(p, x), args).loss(1)
    return found, cut_stages(found, [(0,), (1,), (2,)])


def passes_of(layer, stage, kinds, remat="none", together=False):
    loss, graphs = stages(layer)
    graph = graphs[stage]
    data = [i for i in graph.operands if i not in loss.wrt]
    joint = trace_joint(
        graph, loss, graph.wrt, data, remat, open_checkpoints=Kind.BACKWARD_WEIGHT in kinds
    )
    joint = with_less_kept(joint)
    return joint, cut(joint, outputs_by_kind(joint, [0], kinds, together))


def values(joint):
    """A number generator's value for every input."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=v.aval.shape), v.aval.dtype)
        for name, v in joint.inputs.items()
    }


def evaluate(passes, env):
    """Run the passes in order; what each makes and what they cost."""
    env, flops = dict(env), {}
    for kind, one in passes.items():
        args = [env[name] for name in one.inputs]
        flops[kind] = matmul_flops(make_jaxpr(one.fun, *args).eqns)
        env.update(zip(one.outputs, one.fun(*args), strict=True))
    return env, flops


def left_bytes(one):
    return sum(nbytes(name.of.aval) for name in one.outputs if name.kind == "residual")


@pytest.mark.sampled(9)
@pytest.mark.devices
@pytest.mark.parametrize("remat", ["none", "full", "dots_saveable"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_any_cut_computes_the_same_and_nothing_twice(layer, stage, remat):
    joint, whole = passes_of(layer, stage, WHOLE, remat)
    want, once = evaluate(whole, values(joint))
    for together in (False, True) if stage == 2 else (False,):
        cut_joint, split = passes_of(layer, stage, SPLIT, remat, together)
        named = dict(zip(cut_joint.inputs, values(joint).values(), strict=True))
        got, flops = evaluate(split, named)
        assert sum(flops.values()) == sum(once.values())
        made = zip(joint.outputs, cut_joint.outputs, strict=True)
        for a, b in made:
            if a in want:
                np.testing.assert_allclose(got[b], want[a], rtol=1e-5, atol=1e-6)


def test_the_input_part_makes_only_what_others_wait_for():
    joint, passes = passes_of(dense, 1, SPLIT)
    _, flops = evaluate(passes, values(joint))
    assert flops[Kind.BACKWARD_INPUT] == flops[Kind.BACKWARD_WEIGHT] == flops[Kind.FORWARD]
    sizes = {
        kind: [joint.outputs[n].aval.ndim for n in one.outputs if n.kind == "grad"]
        for kind, one in passes.items()
    }
    # A bias's gradient is no matrix product: not worth keeping its operand for.
    assert sizes == {Kind.FORWARD: [], Kind.BACKWARD_INPUT: [2], Kind.BACKWARD_WEIGHT: [3]}


def test_the_first_stage_has_no_input_part():
    assert list(passes_of(dense, 0, SPLIT)[1]) == [Kind.FORWARD, Kind.BACKWARD_WEIGHT]


def test_a_loop_over_layers_is_not_taken_apart():
    """Its gradients come out of the one loop that the input part needs; none is put off."""
    _, passes = passes_of(scanned, 1, SPLIT)
    assert list(passes) == [Kind.FORWARD, Kind.BACKWARD_INPUT]


def test_both_passes_can_be_one():
    assert list(passes_of(dense, 2, WHOLE, together=True)[1]) == [Kind.BACKWARD]
    joint, passes = passes_of(dense, 2, SPLIT, together=True)
    assert list(passes) == [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
    assert {n.kind for n in passes[Kind.BACKWARD_INPUT].inputs} == {
        "operand",
        "activation",
        "seed",
    }
    assert set(joint.named("result")) <= set(passes[Kind.BACKWARD_INPUT].outputs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("remat", ["none", "full", "dots_saveable"])
@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_and_inputs_are_read_again_and_never_kept(layer, remat):
    joint, passes = passes_of(layer, 1, SPLIT, remat)
    env, _ = evaluate(passes, values(joint))
    inputs = [np.asarray(env[name]) for name in joint.inputs]
    for name, value in env.items():
        if name.kind == "residual":
            same = [x for x in inputs if x.shape == value.shape and np.array_equal(x, value)]
            assert not same, name


def test_a_forward_pass_leaves_only_what_products_make_and_read():
    """Of each layer the product, from which its activation function and that one's derivative are
    computed again, and, but for the first layer, its input."""
    _, passes = passes_of(dense, 1, WHOLE)
    assert left_bytes(passes[Kind.FORWARD]) == (DEPTH + DEPTH - 1) * ROWS * WIDTH * 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_planner_knows_what_is_kept(layer, remat):
    """What the passes leave, and the activation that a backward pass reads again."""
    loss, graphs = stages(layer)
    joint, passes = passes_of(layer, 1, WHOLE, remat)
    read_again = [n for n in passes[Kind.BACKWARD].inputs if n.kind == "activation"]
    kept = left_bytes(passes[Kind.FORWARD]) + sum(nbytes(joint.inputs[n].aval) for n in read_again)
    of = trace_stage(graphs[1], loss, remat, WHOLE)
    room = footprint(of, Sharding(NamedDims([]), {}), on_gpu=False)
    assert room.left[Kind.FORWARD] == pytest.approx(kept, rel=0.02)
    assert room.left[Kind.BACKWARD] == -room.left[Kind.FORWARD]
