"""Where and how a parallelized step may be called: in plain Python, with arguments that live."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import launcher
from launcher.plan import PlanError
from launcher.trace import BatchError, TraceError

STAGES = launcher.PipeshardParallel(
    num_micro_batches=2, stage_option=launcher.UniformStageOption(2)
)
W = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def step_of(layer):
    def loss(w, x):
        x = layer(x @ w)
        launcher.mark_pipeline_boundary()
        return (x @ w).mean()

    def step(w, x):
        value, grads = launcher.value_and_grad(loss)(w, x)
        return w - grads, value

    return step


def parallel(step, **options):
    options = {"method": STAGES, "batch_argnums": (1,), "donate_argnums": (), **options}
    return launcher.parallelize(step, devices=jax.devices()[:2], **options)


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (jax.disable_jit, "jax.disable_jit()"),
        (lambda: jax.set_mesh(jax.make_mesh((2,), ("x",))), "jax.set_mesh()"),
    ],
)
def test_a_context_that_a_step_cannot_be_compiled_in_is_named(context, name):
    train = parallel(step_of(jnp.tanh))
    with pytest.raises(TraceError, match=rf"^step is called under {re.escape(name)}"), context():
        train(W, X)
    train(W, X)


def test_a_step_runs_whatever_transfers_are_guarded():
    train = parallel(step_of(jnp.tanh), donate_argnums=(0,))
    expected = jax.device_get(train(W, X))
    train = parallel(step_of(jnp.tanh))
    with jax.transfer_guard("disallow"):
        state, value = train(W, X)
        again = train(state, X)
    launcher.testing.assert_allclose((state, value), expected, rtol=1e-6)
    assert np.isfinite(again[1])


def test_a_nan_is_found_in_its_stage():
    train = parallel(step_of(lambda x: jnp.log(x * 0 - 1)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="forward pass of stage 0"):
        train(W, X)


def test_a_batch_without_rows_or_arrays_is_named():
    train = parallel(step_of(jnp.tanh))
    with pytest.raises(BatchError, match=r"the batch has no rows \(\[1\] along axis 0\)"):
        train(W, X[:0])


@pytest.mark.parametrize("batch", [{}, jax.random.key(0)], ids=["empty", "a key"])
def test_a_step_without_a_batch_has_one_microbatch(batch):
    def step(w, x):
        return launcher.grad(lambda w: (w**2).sum())(w)

    with pytest.raises(BatchError, match="holds no arrays, and is to be cut into 4 slices"):
        parallel(step, method=launcher.PipeshardParallel(2))(W, batch)
    for method in (launcher.DataParallel(), launcher.Zero3Parallel(), launcher.ShardParallel()):
        launcher.testing.assert_allclose(parallel(step, method=method)(W, batch), 2 * W)


def test_state_of_four_bits_is_refused_and_of_eight_is_kept():
    def step(state, x):
        w, scale = state
        loss = lambda w: (w * scale.astype(w.dtype)).mean() * x.mean()  # noqa: E731
        return (w - launcher.grad(loss)(w), scale), scale

    def by_dtype(dtype):
        return parallel(step, method=launcher.DataParallel())((W, jnp.ones((4, 4), dtype)), X)

    with pytest.raises(TraceError, match=r"leaf \[1\] of argument 0 is int4, .* in int8"):
        by_dtype(jnp.int4)
    assert by_dtype(jnp.float8_e4m3fn)[1].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("transformed", "weights"),
    [
        (jax.jit, W),
        (lambda train: jax.vmap(train, in_axes=(0, None)), np.stack([W, W])),
        (lambda train: jax.grad(lambda w, x: train(w, x)[1]), W),
    ],
    ids=["jit", "vmap", "grad"],
)
def test_a_transformation_of_a_step_is_refused(transformed, weights):
    train = parallel(step_of(jnp.tanh))
    with pytest.raises(TypeError, match=r"compiled already, and cannot be called under jax\.jit"):
        transformed(train)(weights, X)


def test_an_argument_that_was_used_up_is_named():
    train = parallel(step_of(jnp.tanh), donate_argnums=(0,))
    first, _ = train(W, X)
    second, _ = train(first, X)
    with pytest.raises(ValueError, match=r"^argument\[0\] was donated to an earlier call"):
        train(first, X)
    train(second, X)


def test_a_method_is_parallelized_bound():
    class Trainer:
        @launcher.parallelize
        def step(self, w, x):
            return w, x

        def __init__(self):
            self.bound = parallel(self.own)

        def own(self, w, x):
            return step_of(jnp.tanh)(w, x)

    with pytest.raises(TypeError, match=r"parallelize it bound, in __init__: self.step = "):
        Trainer().step(W, X)
    assert isinstance(Trainer.step, launcher.api.parallelize.ParallelizedFunction)
    Trainer().bound(W, X)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("auto", "method='auto' is not a parallel method; give an object, such as launcher.Pipe"),
        (launcher.DataParallel, "such as launcher.DataParallel()"),
    ],
)
def test_a_method_is_an_object(method, told):
    with pytest.raises(PlanError, match=re.escape(told)):
        launcher.parallelize(step_of(jnp.tanh), method=method)


def test_a_sharding_of_the_users_own_is_refused_with_its_line():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def layer(x):
        return jax.lax.with_sharding_constraint(x, sharding)

    mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    for inside, name in (
        (layer, "with_sharding_constraint"),
        (jax.checkpoint(layer), "with_sharding_constraint"),
        (mapped, "shard_map"),
    ):
        with pytest.raises(TraceError, match=rf"{name} at .*test_contexts\.py:\d+.* Remove it"):
            parallel(step_of(inside))(W, X)


def test_a_kernels_reads_and_writes_are_no_side_effects():
    """Which rows it joins is not known: it runs on the whole batch, or as the user says."""

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    @jax.custom_vjp
    def kernel(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, interpret=True)(x)

    kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (kernel(g),))
    expected = jax.jit(step_of(kernel))(W, X)
    with pytest.raises(BatchError, match=r"pallas_call at .* joins examples"):
        parallel(step_of(kernel))(W, X)
    for layer, method in ((kernel, launcher.DataParallel()), (launcher.per_slice(kernel), STAGES)):
        train = parallel(step_of(layer), method=method)
        launcher.testing.assert_allclose(train(W, X), expected, rtol=1e-5)
