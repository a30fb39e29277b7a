"""Where a parallelized step may be called, with what, and the errors of everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import launcher
from launcher.plan import PlanError
from launcher.trace import TraceError

W = np.eye(4, dtype=np.float32) / 2
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


def step_of(loss):
    def step(w, x):
        value, grads = launcher.value_and_grad(loss)(w, x)
        return w - grads, value

    return step


def parallel(fun=loss, num_micro_batches=1):
    method = launcher.DataParallel(num_micro_batches)
    return launcher.parallelize(step_of(fun), method=method, devices=jax.devices()[:2])


@pytest.mark.parametrize(
    ("around", "args"),
    [(jax.jit, (W, X)), (jax.vmap, (np.stack([W, W]), np.stack([X, X])))],
    ids=["jit", "vmap"],
)
def test_a_transformation_around_the_step_is_refused(around, args):
    step = parallel()
    step(jnp.asarray(W), X)
    with pytest.raises(TypeError, match=r"cannot be called under jax\.jit, jax\.vmap or another"):
        around(lambda w, x: step(w, x))(*args)


def test_disable_jit_is_refused():
    with (
        jax.disable_jit(),
        pytest.raises(TraceError, match=r"step is called under jax\.disable_jit"),
    ):
        parallel()(jnp.asarray(W), X)


def test_a_mesh_of_the_users_own_is_refused():
    mesh = jax.make_mesh((2,), ("mine",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(TraceError, match=r"step is called under jax\.set_mesh"):
        parallel()(jnp.asarray(W), X)


def test_debug_nans_names_nothing_that_is_right():
    with jax.debug_nans(True):
        parallel()(jnp.asarray(W), X)


def test_a_sharding_constraint_is_refused_by_its_line():
    spec = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def constrained(w, x):
        return (jax.lax.with_sharding_constraint(x @ w, spec) ** 2).mean()

    words = r"with_sharding_constraint at .*test_contexts\.py:\d+.*Remove the constraint"
    with pytest.raises(TraceError, match=words):
        parallel(constrained)(jnp.asarray(W), X)


def test_an_argument_that_was_used_up_is_named():
    step = parallel()
    first, _ = step(jnp.asarray(W), X)
    step(first, X)
    with pytest.raises(ValueError, match=r"argument\[0\] was used up by an earlier call"):
        step(first, X)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("auto", r"method='auto' is no parallel method; .* launcher\.PipeshardParallel\(num_micro"),
        (launcher.DataParallel, r"method=DataParallel is no .* launcher\.DataParallel\(\)"),
    ],
    ids=["name", "class"],
)
def test_what_is_no_method_is_refused(method, words):
    with pytest.raises(PlanError, match=words):
        launcher.parallelize(step_of(loss), method=method)


def test_methods_are_parallelized_bound():
    class Trainer:
        rate = 0.5

        @launcher.parallelize
        def train(self, w, x):
            return w

        def step(self, w, x):
            value, grads = launcher.value_and_grad(loss)(w, x)
            return w - self.rate * grads, value

    with pytest.raises(TypeError, match=r"self\.train = launcher\.parallelize\(self\.train\)"):
        Trainer().train(W, X)
    bound = launcher.parallelize(Trainer().step, devices=jax.devices()[:2])
    np.testing.assert_allclose(bound(jnp.asarray(W), X)[1], loss(W, X), rtol=1e-6)


@jax.custom_vjp
def doubled(x):
    def kernel(of, out):
        out[...] = of[...] * 2

    return pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    ("kernel", "num_micro_batches"), [(doubled, 1), (launcher.per_slice(doubled), 2)]
)
def test_a_kernel_runs_in_a_step(kernel, num_micro_batches):
    """A kernel of unknown ways runs on the whole batch, unless it is said to be a slice's own."""

    def of(w, x):
        return (kernel(x @ w) ** 2).mean()

    _, value = parallel(of, num_micro_batches)(jnp.asarray(W), X)
    np.testing.assert_allclose(value, ((2 * X @ W) ** 2).mean(), rtol=1e-5)
