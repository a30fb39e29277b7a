"""Sums of gradients in buckets: where they stand in the compiled programs, and what they make."""

import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collective_counts import collectives

import launcher
from launcher.partition import Between
from launcher.plan import local_shape
from launcher.plan.methods import (
    DataParallel,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.runtime import compile_step
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Run
from launcher.trace import dependents, is_var, make_jaxpr, sub_jaxprs, trace_step

WIDTH, LAYERS, ROWS = 32, 4, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes
OPTIMIZER = optax.adamw(1e-2)
BATCH = {
    name: jax.random.normal(jax.random.key(k), (ROWS, WIDTH)) for k, name in enumerate(("x", "y"))
}


def init(key):
    del key  # drawing is half of what each plan has to compile
    params = [{"w": jnp.asarray(w), "b": jnp.zeros(WIDTH)} for w in WEIGHTS]
    return params, OPTIMIZER.init(params)


WEIGHTS = [
    np.asarray(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5)
    for k in jax.random.split(jax.random.key(0), LAYERS)
]


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for k, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
            if k == LAYERS // 2 - 1:
                launcher.mark_pipeline_boundary()
        return jnp.mean((x - batch["y"]) ** 2)

    params, moments = state
    value, grads = launcher.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


TRACED = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), BATCH))


def compiled(method, num_devices=4):
    plan = method.plan(TRACED, local_shape(num_devices, 1, "cpu"))
    return compile_step(TRACED, plan, jax.devices()[:num_devices])


def trained(executable, steps=10):
    state = executable.create(init, jax.random.key(0))
    for _ in range(steps):
        state, loss = executable(state, BATCH)
    return jax.device_get(state), float(loss)


def serial(steps=10):
    run, state = jax.jit(step), init(jax.random.key(0))
    for _ in range(steps):
        state, loss = run(state, BATCH)
    return jax.device_get(state), float(loss)


OPERATION = re.compile(r"= [^=]*? (all-reduce|reduce-scatter|dot)\((.*)")
BYTES = re.compile(r"\bf32\[([\d,]*)\]")


def operations(text):
    """What a program runs of products and collectives, in the order of its schedule; those that
    move a single number are left out."""
    found = []
    for line in re.sub(r"/\*.*?\*/", "", text[text.index("ENTRY") :]).splitlines():
        if made := OPERATION.search(line):
            shapes = BYTES.findall(line[: made.start(1)])
            lengths = [[int(n) for n in shape.split(",") if n] for shape in shapes]
            size = sum(4 * math.prod(each) for each in lengths)
            found += [(made[1], size)] if size > 4 else []
    return found


def sums(executable):
    """The collectives of every program that has any."""
    found = {
        name: [one for one in operations(text) if one[0] != "dot"]
        for name, text in executable.hlo_text().items()
    }
    return {name: ops for name, ops in found.items() if ops}


TWO = 2 * LAYER + 100


def test_two_buckets_are_two_sums_the_first_under_the_backward_pass():
    executable = compiled(DataParallel(bucket_bytes=TWO))
    program = "stage.0.forward_backward"
    assert sums(executable) == {program: [("all-reduce", 2 * LAYER)] * 2}
    kinds = [kind for kind, _ in operations(executable.hlo_text()[program])]
    last_product = len(kinds) - 1 - kinds[::-1].index("dot")
    assert kinds.index("all-reduce") < last_product
    (stage,) = executable.plan.stages
    assert [bucket.bytes for bucket in stage.buckets] == [2 * LAYER] * 2


def test_no_bucket_is_a_sum_for_each_gradient():
    found = sums(compiled(DataParallel(bucket_bytes=0)))
    assert sorted(found["stage.0.forward_backward"]) == sorted(
        [("all-reduce", WIDTH * WIDTH * 4), ("all-reduce", WIDTH * 4)] * LAYERS
    )
    assert len(found) == 1


def test_one_bucket_is_one_sum():
    assert sums(compiled(DataParallel())) == {
        "stage.0.forward_backward": [("all-reduce", LAYERS * LAYER)]
    }


def test_only_the_last_microbatch_sums():
    assert sums(compiled(DataParallel(4, bucket_bytes=TWO))) == {
        "stage.0.forward_backward.last": [("all-reduce", 2 * LAYER)] * 2
    }
    assert sums(compiled(DataParallel(4))) == {"stage.0.reduce": [("all-reduce", LAYERS * LAYER)]}


@pytest.mark.parametrize(
    ("method", "program"),
    [
        (Zero2Parallel(1, bucket_bytes=TWO), "stage.0.forward_backward"),
        (Zero2Parallel(2, bucket_bytes=TWO), "stage.0.forward_backward.last"),
        (Zero3Parallel(2, bucket_bytes=TWO), "stage.0.forward_backward"),
    ],
)
def test_a_reduce_scatter_a_bucket(method, program):
    assert sums(compiled(method)) == {program: [("reduce-scatter", 2 * LAYER // 4)] * 2}


def test_each_stage_of_a_pipeline_sums_its_own():
    option = UniformStageOption(2)
    found = sums(compiled(PipeshardParallel(2, stage_option=option, bucket_bytes=LAYER)))
    each = [("all-reduce", LAYER)] * 2
    assert found == {"stage.0.backward.last": each, "stage.1.forward_backward.last": each}


SIZES = (0, LAYER, TWO, 25 << 20)


@pytest.mark.parametrize("micro_batches", [2, pytest.param(1, marks=pytest.mark.stress)])
def test_two_replicas_train_to_the_same_bits_whatever_the_buckets(micro_batches):
    runs = [trained(compiled(DataParallel(micro_batches, bucket_bytes=size), 2)) for size in SIZES]
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)


def close(found, expected):
    """Parameters to 1e-6, and all else."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )
    for a, b in zip(jax.tree.leaves(found[0][0]), jax.tree.leaves(expected[0][0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        *(
            pytest.param(
                DataParallel(2, bucket_bytes=size), marks=() if size == TWO else pytest.mark.stress
            )
            for size in SIZES
        ),
        ShardParallel(2, (2, 2), bucket_bytes=LAYER),
        Zero2Parallel(2, bucket_bytes=TWO),
        PipeshardParallel(2, stage_option=UniformStageOption(2), bucket_bytes=LAYER),
    ],
    ids=repr,
)
def test_four_devices_train_as_one(method):
    close(trained(compiled(method)), serial())


def test_gradients_that_cross_in_sixteen_bits_train_nearly_as_one():
    _, loss = trained(compiled(DataParallel(reduce_dtype="bf16", bucket_bytes=TWO)))
    _, expected = serial()
    assert 0 < abs(loss - expected) < 1e-3


def test_the_sums_take_the_place_of_the_accumulators():
    """So a program with several buckets needs two buckets more, no second copy of all gradients."""
    programs = compiled(DataParallel(4, bucket_bytes=LAYER))._compiled
    last, before = (
        said.argument_size_in_bytes
        + said.output_size_in_bytes
        + said.temp_size_in_bytes
        - said.alias_size_in_bytes
        for name in (".last", "")
        for said in [programs[f"stage.0.forward_backward{name}"].memory_analysis()]
    )
    assert last < before + 2.5 * LAYER


@pytest.mark.parametrize("kind", [DataParallel, Zero2Parallel])
def test_the_update_unpacks_the_sums_of_the_only_microbatch(kind):
    """In the pass each gradient would be copied once more."""
    method = kind(bucket_bytes=TWO)
    plan = method.plan(TRACED, local_shape(4, 1, "cpu"))
    emitted = emit(TRACED.cut_at(plan.layer_ends), plan)
    runs = {x.program: x for x in emitted.instructions if isinstance(x, Run)}
    grads = runs["stage.0.forward_backward"].outputs[-2:]
    assert set(grads) <= set(runs["update.0"].inputs)
    share = 4 if kind is Zero2Parallel else 1
    assert [emitted.slots[s].aval.shape for s in grads] == [(4, 2 * LAYER // 4 // share)] * 2
    close(trained(compile_step(TRACED, plan, jax.devices()[:4])), serial())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_flat_array_crosses_sockets(monkeypatch, micro_batches):
    """Of a single bucket, too, whose sums XLA would combine: each array costs its round trips."""
    locality = sys.modules[compile_step.__module__].Locality
    monkeypatch.setattr(locality, "between", lambda *_: Between.SOCKETS)
    made = compiled(DataParallel(micro_batches))
    crossing = [size for text in made.hlo_text().values() for _, size in collectives(text)]
    assert [size for size in crossing if size > 4] == [LAYERS * LAYER]  # 4: the loss
    close(trained(made), serial())


EACH = {"bucket_bytes": LAYER}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (DataParallel(**EACH), [3]),
        (DataParallel(2, **EACH), [3]),
        (DataParallel(remat="full", **EACH), [1]),  # both layers of a half are recomputed together
        (DataParallel(bucket_bytes=0), [7]),
        (ShardParallel(2, (2, 2), **EACH), [2]),
        (Zero2Parallel(2, **EACH), [3]),
        (Zero3Parallel(2, **EACH), [3]),
        (PipeshardParallel(2, stage_option=UniformStageOption(2), **EACH), [2, 1]),
    ],
    ids=repr,
)
def test_the_backward_pass_waits_for_each_bucket_and_the_sums_before(method, expected):
    """So that no scheduler can keep what gradients are made of until the end of the pass."""
    plan = method.plan(TRACED, local_shape(4, 1, "cpu"))
    emitted = emit(TRACED.cut_at(plan.layer_ends), plan)
    runs = {x.program: x for x in emitted.instructions if isinstance(x, Run)}
    summing = [name for name in runs if len(emitted.programs[name].buckets) > 1]
    found = []
    for name in summing:
        avals = [emitted.slots[slot].aval for slot in runs[name].inputs]
        equations = make_jaxpr(emitted.programs[name].fun, *avals).eqns
        found.append(waits(equations))
        sums = [eqn for eqn in equations if is_sum(eqn)]
        assert len(sums) == len(emitted.programs[name].buckets)
    assert found == expected


def is_sum(eqn):
    inside = [e.primitive.name for body in sub_jaxprs(eqn) for e in body.eqns]
    return eqn.primitive.name == "shard_map" and {"psum", "reduce_scatter"} & {*inside} != set()


def waits(equations):
    """The places where what is left of a program waits for all sums begun before, and for the next
    packs; of the last place, where nothing is left, the sums alone wait for those before."""
    found, pending = 0, set()
    for n, eqn in enumerate(equations):
        if is_sum(eqn):
            pending.update(eqn.outvars)
        elif eqn.primitive.name == "optimization_barrier":
            following = [e for e in equations[n:] if is_sum(e)]
            held = {v for v in eqn.invars if is_var(v)}
            assert pending <= held
            if set(following[0].invars) <= set(eqn.outvars):
                assert all(set(e.invars) <= set(eqn.outvars) for e in following)
                return found
            assert set(following[0].invars) <= held
            ties = dict(zip(eqn.invars, eqn.outvars, strict=True))
            ties = {ties[v] for v in held - pending} - {ties[v] for v in following[0].invars}
            on = dependents(equations[n + 1 :], ties)
            later = [e.primitive.name for e in equations if on.intersection(e.outvars)]
            assert {"dot_general", "remat2", "checkpoint"} & {*later}
            pending, found = set(), found + 1
    return found


@pytest.mark.parametrize("method", [DataParallel(2, **EACH), DataParallel(bucket_bytes=TWO)])
def test_gradients_that_the_step_returns_are_the_sums(method):
    def gradients(params, batch):
        def loss(params):
            x = batch["x"]
            for weights in params.values():
                x = jnp.tanh(x @ weights)
            return jnp.mean(x**2)

        return launcher.grad(loss)(params)

    params = {name: jnp.eye(WIDTH) for name in "abcd"}
    traced = trace_step(gradients, (params, BATCH), donate_argnums=())
    plan = method.plan(traced, local_shape(4, 1, "cpu"))
    assert len(plan.stages[0].buckets) > 1
    found = compile_step(traced, plan, jax.devices()[:4])(params, BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        jax.device_get(found),
        jax.jit(gradients)(params, BATCH),
    )


def test_a_large_last_gradient_is_summed_before_products_that_are_put_off():
    """Those of as many bytes follow it, in buckets of about half of what is left."""
    table = jnp.asarray(np.concatenate(WEIGHTS)) / LAYERS

    def start(key):
        params = {"layers": init(key)[0], "table": table}
        return params, OPTIMIZER.init(params)

    def wide(state, batch):
        def loss(params):
            x = jnp.tile(batch["x"], LAYERS) @ params["table"]
            for layer in params["layers"]:
                x = jnp.tanh(x @ layer["w"] + layer["b"])
            return jnp.mean((x - batch["y"]) ** 2)

        params, moments = state
        value, grads = launcher.value_and_grad(loss)(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    traced = trace_step(wide, (jax.eval_shape(start, jax.random.key(0)), BATCH))
    plan = DataParallel(bucket_bytes=LAYER).plan(traced, local_shape(4, 1, "cpu"))
    weight = WIDTH * WIDTH * 4
    sizes = [bucket.bytes for bucket in plan.stages[0].buckets]
    assert sizes == [LAYERS * WIDTH * 4, LAYERS * weight, 2 * weight, weight, weight]
    made = compile_step(traced, plan, jax.devices()[:4])
    (text,) = (text for name, text in made.hlo_text().items() if name.startswith("stage"))
    after = operations(text)[operations(text).index(("all-reduce", LAYERS * weight)) :]
    assert [kind for kind, _ in after].count("dot") == LAYERS
    state, expected = (made.create(start, jax.random.key(0)), start(jax.random.key(0)))
    for _ in range(3):
        state, loss = made(state, BATCH)
        expected, value = jax.jit(wide)(expected, BATCH)
    close((jax.device_get(state), float(loss)), (jax.device_get(expected), float(value)))
