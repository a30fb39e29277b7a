"""Buckets of gradients: their order and limits, what does not mix, and when each is summed."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import launcher
from launcher.partition.assignment import PlanError, Slicing
from launcher.partition.gradient_sync import Bucket, GradientSync, sum_places
from launcher.partition.joint_graph import Name
from launcher.partition.task_programs import TaskProgram
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel, Zero2Parallel
from launcher.trace import make_jaxpr, trace_step

WIDTHS = (8, 24, 16, 64, 4)


def init():
    pairs = itertools.pairwise(WIDTHS)
    return [
        {"w": jnp.zeros(pair, jnp.bfloat16 if k == 1 else jnp.float32), "b": jnp.zeros(pair[1])}
        for k, pair in enumerate(pairs)
    ]


def step(state, batch):
    params, momentum = state

    def loss(params):
        x = batch
        for layer in params:
            x = jnp.tanh(x @ layer["w"].astype(jnp.float32) + layer["b"])
        return jnp.mean(x**2)

    value, grads = launcher.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


PARAMS = jax.eval_shape(init)
ROWS = jax.ShapeDtypeStruct((16, WIDTHS[0]), jnp.float32)
TRACED = trace_step(step, ((PARAMS, PARAMS), ROWS))


def planned(method):
    return method.plan(TRACED, local_shape(4, 1, "cpu")).stages[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", [0, 1, 500, 2000, 5000, 10**9])
@pytest.mark.parametrize("kind", [DataParallel, Zero2Parallel])
def test_each_gradient_is_in_one_bucket_that_is_not_too_large(kind, limit):
    buckets = planned(kind(bucket_bytes=limit)).buckets
    leaves, _ = jax.tree_util.tree_flatten_with_path(PARAMS)
    sizes = {f"0.0.{p[0].idx}.{p[1].key}": leaf.size * 4 for p, leaf in leaves}
    assert sorted(name for bucket in buckets for name in bucket.tensors) == sorted(sizes)
    largest = max(sizes, key=sizes.__getitem__)
    behind = False
    for bucket in buckets:
        assert bucket.bytes == sum(sizes[name] for name in bucket.tensors)
        most = sizes[largest] if limit and behind else limit
        assert bucket.bytes <= most or len(bucket.tensors) == 1
        behind = behind or largest in bucket.tensors
    shared = [bucket for bucket in buckets if bucket.bytes <= limit]
    for one, following in itertools.pairwise(shared):
        if (one.kind, one.dtype) == (following.kind, following.dtype):
            assert one.bytes + sizes[following.tensors[0]] > limit  # none is closed early


def test_the_backward_pass_makes_the_last_layers_gradients_first():
    tensors = [name for bucket in planned(DataParallel()).buckets for name in bucket.tensors]
    layer_of = [int(name.split(".")[2]) for name in tensors]
    assert layer_of == sorted(layer_of, reverse=True)
    assert set(layer_of) == set(range(len(WIDTHS) - 1))


def test_a_gradient_that_cannot_be_cut_is_summed_whole():
    widths = jax.eval_shape(lambda: [{"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}])
    traced = trace_step(step, ((widths, widths), ROWS))
    (stage,) = Zero2Parallel().plan(traced, local_shape(4, 1, "cpu")).stages
    found = {(bucket.kind, bucket.tensors) for bucket in stage.buckets}
    assert found == {("reduce-scatter", ("0.0.0.w",)), ("all-reduce", ("0.0.0.b",))}


@pytest.mark.parametrize(
    ("dtype", "crosses", "width"), [("fp32", "float32", 4), ("bf16", "bfloat16", 2)]
)
def test_gradients_cross_in_the_reduce_dtype(dtype, crosses, width):
    (bucket,) = planned(DataParallel(reduce_dtype=dtype)).buckets
    count = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert (bucket.dtype, bucket.bytes) == (crosses, width * count)


def test_what_is_out_of_range_is_refused():
    with pytest.raises(PlanError, match="bucket_bytes=-1 is below 0"):
        planned(DataParallel(bucket_bytes=-1))
    with pytest.raises(PlanError, match="reduce_dtype=int8 is none of fp32, bf16"):
        planned(DataParallel(reduce_dtype="int8"))


def test_without_replicas_nothing_is_summed():
    stage = DataParallel().plan(TRACED, local_shape(1, 1, "cpu")).stages[0]
    assert (stage.buckets, stage.hidden_seconds) == ((), 0.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize(
    "slicing", [Slicing(1, 2), Slicing(4, 2), Slicing(1, 2, 2), Slicing(4, 4, 2)]
)
def test_each_bucket_is_summed_as_often_as_it_says(count, slicing):
    every = (Bucket("reduce-scatter", "float32", (9,), 4),)
    once = tuple(Bucket("all-reduce", "float32", (i,), 4) for i in range(count))
    sync = GradientSync(every, once, slicing)
    passes = [sync.in_pass(m == slicing.micro_batches - 1) for m in range(slicing.micro_batches)]
    summed = [bucket for buckets in (*passes, sync.after_pass) for bucket in buckets]
    assert summed.count(every[0]) == slicing.micro_batches
    by_servers = slicing.own_replicas == 1  # which a worker of one replica leaves all to
    assert [summed.count(bucket) for bucket in once] == [0 if by_servers else 1] * count
    if slicing.micro_batches > 1 and count == 1:
        assert sync.after_pass == (() if by_servers else once)  # one alone would wait for the pass


def test_a_gradient_of_sums_of_sums_is_walked_once():
    """Each level doubles the ways through the sums: 40 would take years one by one."""

    def doubled(params, batch):
        def loss(params):
            for _ in range(40):
                params = params + params
            return jnp.mean(batch @ params)

        return launcher.value_and_grad(loss)(params)

    shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    plan = DataParallel().plan(trace_step(doubled, shapes), local_shape(4, 1, "cpu"))
    assert len(plan.stages[0].buckets) == 1


def test_sums_are_placed_where_the_chain_is_narrowest():
    def backward(wide, x, cotangent):
        first = x * cotangent  # two values of eight numbers continue from here on
        other = jnp.cos(x) + cotangent
        narrow = first[:2] + other[:2]  # and one of two from here
        second = narrow * 3.0
        return first, second, narrow * jnp.sum(wide)

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    closed = make_jaxpr(backward, x, x, x)
    names = [Name("operand", 0), Name("residual", 1), Name("cotangent", 2)]
    outputs = [Name("grad", 0), Name("grad", 1), Name("cotangent", 3)]
    program = TaskProgram(closed, (), tuple(names), tuple(outputs))
    buckets = [(0,), (1,)]
    first, second = sum_places(program, buckets)
    assert (first.buckets, second.buckets) == ((0,), (1,))
    (tie,) = first.ties
    made = {v: n for n, eqn in enumerate(closed.eqns, 1) for v in eqn.outvars}
    assert (tie.aval.shape, first.place) == ((2,), made[tie])
    assert second.ties == first.ties  # what the last cotangent is made from
    assert second.place == made[closed.outvars[1]]
    turned = sum_places(program, buckets[::-1])
    assert [one.buckets for one in turned] == [(1,), (0,)]  # the first complete first
