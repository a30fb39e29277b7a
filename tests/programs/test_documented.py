"""Steps as the pages of Flax NNX, Equinox and Flax Linen write them, with another decorator."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import value_and_grad
from programs.program import DEVICES, TWO_STAGES, assert_same

import launcher
from launcher.trace import GradientError, JoinedError, TraceError, trace_step
from launcher.trace.primitives import plain_gradients

ROWS, SIDE, CLASSES = 16, 8, 10
LAYERS = launcher.AutoLayerOption(2)
PLANS = {
    "data": launcher.DataParallel(),
    "zero3": launcher.Zero3Parallel(),
    "stages": launcher.PipeshardParallel(4, stage_option=TWO_STAGES, layer_option=LAYERS),
}
# A larger eps than usual: else the noise in gradients that are all but 0 decides a step's sign.
ADAM = functools.partial(optax.adamw, 0.005, 0.9, eps=1e-3)


def digits(k):
    rng = np.random.default_rng(k)
    images = rng.normal(size=(ROWS, SIDE, SIDE, 1)).astype(np.float32)
    return {"image": images, "label": rng.integers(0, CLASSES, ROWS).astype(np.int32)}


class NNXNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.last = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.pool(nnx.relu(self.conv(x)))
        return self.last(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def nnx_loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def nnx_step(model, optimizer, metrics, batch):
    grad_fn = nnx.value_and_grad(nnx_loss, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def nnx_eval(model, metrics, batch):
    loss, logits = nnx_loss(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def nnx_training(step):
    """With the metrics of a following evaluation, where the step is parallelized."""
    model = NNXNet(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM(), wrt=nnx.Param)
    average, accuracy = nnx.metrics.Average("loss"), nnx.metrics.Accuracy()
    metrics = nnx.MultiMetric(loss=average, accuracy=accuracy)
    for k in range(2):
        yield step(model, optimizer, metrics, digits(k))
    trained = metrics.compute()
    metrics.reset()
    if isinstance(step, launcher.ParallelizedFunction):
        options = {"method": step, "batch_argnums": 2, "donate_argnums": ()}
        evaluate = launcher.parallelize(nnx_eval, devices=jax.devices()[:DEVICES], **options)
    else:
        evaluate = nnx.jit(nnx_eval)
    evaluate(model, metrics, digits(2))
    yield nnx.to_pure_dict(nnx.state([model, optimizer])), trained, metrics.compute()


class EquinoxNet(eqx.Module):
    layers: list
    rate: float  # a leaf that is no array

    def __init__(self, key):
        self.rate = 0.5
        first, second = jax.random.split(key)
        linear = eqx.nn.Linear(75, CLASSES, use_bias=False, key=second)  # its bias is None
        conv, pool = eqx.nn.Conv2d(1, 3, kernel_size=3, key=first), eqx.nn.MaxPool2d(kernel_size=2)
        self.layers = [conv, pool, jax.nn.relu, jnp.ravel, linear, jax.nn.log_softmax]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * 2 if self.rate == 0.5 else x


def equinox_loss(model, x, y):
    chances = jax.vmap(model)(jnp.transpose(x, (0, 3, 1, 2)))
    return -jnp.mean(jnp.take_along_axis(chances, y[:, None], axis=1))


def equinox_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(equinox_loss)(model, x, y)
    updates, opt_state = ADAM().update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def equinox_training(step):
    model, losses = EquinoxNet(jax.random.key(0)), []
    opt_state = ADAM().init(eqx.filter(model, eqx.is_array))
    if isinstance(step, launcher.ParallelizedFunction):
        model = step.create(EquinoxNet, jax.random.key(0), like=(opt_state, *digits(0).values()))
    for k in range(2):
        model, opt_state, loss = step(model, opt_state, *digits(k).values())
        yield losses.append(loss)
    assert (model.layers[2], type(model.rate)) == (jax.nn.relu, float)
    yield [x for x in jax.tree.leaves(model) if hasattr(x, "dtype")], opt_state, losses


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(32)(x.reshape((x.shape[0], -1)))))


def linen_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        one_hot = jax.nn.one_hot(batch["label"], CLASSES)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

    (loss, logits), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


def linen_training(step):
    net, metrics = LinenNet(), []
    params = net.init(jax.random.key(0), digits(0)["image"])["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1, 0.9))
    for k in range(2):
        state, found = step(state, digits(k))
        yield metrics.append(found)
    yield state.params, state.opt_state, metrics


EXAMPLES = {  # the step, what its page decorates it with, its training, and the decorator's options
    "NNX": (nnx_step, nnx.jit, nnx_training, {"batch_argnums": 3, "donate_argnums": (0, 1, 2)}),
    "Equinox": (
        *(equinox_step, eqx.filter_jit, equinox_training),
        {"batch_argnums": (2, 3), "donate_argnums": (0, 1)},
    ),
    "Linen": (linen_step, jax.jit, linen_training, {}),
}


def check_example(name, plan, devices=None):
    """It trains as by the library's `jit`, and is traced in its first call."""
    step, jit, training, options = EXAMPLES[name]
    traces = []

    @functools.wraps(step)
    def counted(*args):
        traces.append(len(args))
        return step(*args)

    train = launcher.parallelize(counted, method=PLANS[plan], devices=devices, **options)
    *calls, got = ((found, len(traces)) for found in training(train))
    assert len({number for _, number in calls}) == 1
    *_, want = training(jit(step))
    assert_same(jax.device_get(got[0]), jax.device_get(want), 1e-5)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", [*PLANS][::-1])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_as_by_jit(name, plan):
    check_example(name, plan, jax.devices()[:DEVICES])


@pytest.mark.slow
def test_the_examples_train_on_workers():
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    try:
        for name in EXAMPLES:
            check_example(name, "stages")
    finally:
        launcher.shutdown()


# -- forms of a step with objects ------------------------------------------------------------------


class Dense(nnx.Module):
    """Two layers with one array by two names, and a stream of random numbers."""

    def __init__(self, rngs, norm):
        self.first = nnx.Linear(SIDE, SIDE, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(SIDE, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(1e-9, rngs=rngs)
        self.shared = self.first.kernel

    def __call__(self, x):
        x = self.drop(self.first(x))
        return jnp.tanh(x if self.norm is None else self.norm(x)) @ self.shared


def square(model, x):
    return jnp.mean((model(x) - x) ** 2)


def in_place(model, optimizer, x):
    loss, grads = nnx.value_and_grad(square)(model, x)
    optimizer.update(model, grads)
    return loss


def split_by_hand(model, optimizer, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda p: square(nnx.merge(graph, p, rest, copy=True), x))(params)
    optimizer.update(model, grads)
    return grads


def of_held_model(optimizer, x):
    loss, grads = nnx.value_and_grad(square)(optimizer.model, x)
    optimizer.update(grads)
    return loss


def changes_mode(model, optimizer, x):
    model.eval()
    return in_place(model, optimizer, x)


def check_form(form, plan, norm=False):
    def trained(step):
        model, tx = Dense(nnx.Rngs(0), norm), optax.sgd(0.1, 0.9)
        objects = (
            [nnx.ModelAndOptimizer(model, tx, wrt=nnx.Param)]
            if form is of_held_model
            else [model, nnx.Optimizer(model, tx, wrt=nnx.Param)]
        )
        results = [step(*objects, np.eye(ROWS, SIDE, k, np.float32) + 0.5) for k in range(2)]
        leaves = jax.tree.leaves(jax.device_get((nnx.to_pure_dict(nnx.state(objects)), results)))
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.number)]

    count = 1 if form is of_held_model else 2
    options = {"batch_argnums": count, "donate_argnums": tuple(range(count))}
    step = launcher.parallelize(
        form, method=PLANS[plan], devices=jax.devices()[:DEVICES], **options
    )
    assert_same(trained(step), trained(nnx.jit(form)), 1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", [in_place, split_by_hand, of_held_model])
def test_objects_of_nnx_are_updated_in_place(form, plan):
    check_form(form, plan)


def test_a_metric_in_a_container_is_on_one_device():
    """Its total is of the first stage and its count of the last."""

    def step(objects, x):
        loss, grads = nnx.value_and_grad(square)(objects["model"], x)
        weight = objects["model"].layers[0].kernel[...]
        objects["optimizer"].update(objects["model"], grads)
        objects["metrics"]["weight"].update(values=weight.sum())
        return loss

    model = nnx.Sequential(*(nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(i)) for i in range(2)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    average, want = nnx.metrics.Average(), model.layers[0].kernel[...].sum()
    objects = {"model": model, "optimizer": optimizer, "metrics": {"weight": average}}
    options = {"method": PLANS["stages"], "devices": jax.devices()[:DEVICES]}
    launcher.parallelize(step, **options)(objects, np.eye(ROWS, SIDE, dtype=np.float32))
    assert np.isclose(average.compute(), want)


def test_statistics_are_updated_in_place():
    check_form(in_place, "data", norm=True)
    with pytest.raises(JoinedError, match=r"test_documented\.py:\d+.* joins examples"):
        check_form(in_place, "stages", norm=True)


# -- functions that take gradients -----------------------------------------------------------------

LIBRARIES = {"jax": jax, "nnx": nnx, "eqx": eqx}  # Linen's are for the inside of its modules
_WORD = re.compile(r"(^|_)(grad|jvp|vjp|jac\w*|hessian|linearize|fwd_and_bwd)$")
SLOPES = [
    f"{library}.{name}"
    for library, module in LIBRARIES.items()
    for name in dir(module)
    if _WORD.search(name) and "custom" not in name
]


def slope(name, f, p):
    """The slope of `f` at `p` by one of the functions, which are called in one of these ways."""
    library, function = name.split(".")
    take, ones = getattr(LIBRARIES[library], function), jax.tree.map(jnp.ones_like, p)
    options = {"graph": False} if library == "nnx" else {}
    if function == "fwd_and_bwd":
        forward, backward = take(f, argnums=0)
        return backward(forward(p)[1], jnp.ones(()))
    if function.endswith("vjp"):
        return take(f, p, **options)[1](jnp.ones(()))
    if function == "linearize":
        return take(f, p)[1](ones)
    if function.endswith("jvp"):
        return take(f, (p,), (ones,), **options)[1]
    return eqx.filter_jit(take(f))(p)


def squares_of(p, x):
    return (jnp.tanh(x @ p["first"]) @ p["last"] - x) ** 2


def loss_of(p, x):
    return jnp.mean(squares_of(p, x))


def compare(step, plan):
    rng = np.random.default_rng(0)
    p = {name: rng.normal(size=(SIDE, SIDE)).astype(np.float32) / 3 for name in ("first", "last")}
    x = rng.normal(size=(ROWS, SIDE)).astype(np.float32)
    options = {"donate_argnums": (), "devices": jax.devices()[:DEVICES]}
    got = launcher.parallelize(step, method=PLANS[plan], **options)(p, x)
    assert_same(jax.device_get(got), jax.device_get(jax.jit(step)(p, x)), 1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_plain_gradients_of_single_examples(plan):
    compare(lambda p, x: jax.vmap(jax.value_and_grad(loss_of), (None, 0))(p, x), plan)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SLOPES)
def test_a_gradient_of_the_step_is_the_loss_or_refused(name, plan):
    def step(p, x):
        return slope(name, lambda p: loss_of(p, x), p), p

    if name.endswith("grad"):
        compare(step, plan)
    else:
        with pytest.raises(GradientError, match="takes no gradient of a loss"):
            compare(step, plan)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", SLOPES)
def test_a_gradient_in_a_loss_is_a_part_of_it(name):
    """Of each example at its own place, as in a penalty."""

    def loss(p, x):
        def of_shift(row):
            return slope(name, lambda shift: loss_of(p, (row + shift)[None]), jnp.zeros(()))

        return loss_of(p, x) + sum(jnp.mean(s**2) for s in jax.tree.leaves(jax.vmap(of_shift)(x)))

    compare(value_and_grad(loss), "stages")  # made before anything is traced


def test_beside_a_gradient_of_launcher_one_of_jax_is_no_loss():
    decay = jax.jit(jax.grad(lambda p: jnp.sum(p["first"] ** 3)))  # JAX keeps its traces

    def step(p, x):
        return jax.tree.map(jnp.add, launcher.grad(loss_of)(p, x), decay(p)), p

    compare(step, "stages")
    shapes = {"first": jnp.eye(SIDE), "last": jnp.eye(SIDE)}, jnp.ones((ROWS, SIDE))
    assert [len(trace_step(step, shapes).parts) for _ in range(2)] == [1, 1]


def test_a_loss_returns_a_module_beside():
    """Its activation is a leaf that is no array."""
    model = eqx.nn.MLP(SIDE, SIDE, SIDE, 1, key=jax.random.key(0))

    def step(p, x):
        def loss(p, x):
            return loss_of(p, x), eqx.tree_at(lambda m: m.layers[0].weight, model, p["first"])

        (_, module), grads = eqx.filter_value_and_grad(loss, has_aux=True)(p, x)
        return grads, jax.vmap(module)(jnp.eye(SIDE))

    compare(step, "stages")


def test_other_threads_take_gradients_as_ever():
    """While one thread traces; and afterwards all."""

    def is_loss():
        return "microbatched_loss" in str(jax.make_jaxpr(jax.grad(jnp.sin))(0.0))

    with plain_gradients(), ThreadPoolExecutor(1) as pool:
        assert (pool.submit(is_loss).result(), is_loss()) == (False, True)
    assert not is_loss()


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (
            lambda: compare(lambda p, x: jax.grad(squares_of)(p, x), "data"),
            r"the loss of squares_of \(.*test_documented\.py:\d+\) must be one .*32\[16,8\]",
        ),
        (
            lambda: compare(lambda p, x: jax.grad(loss_of, 1)(p, x), "data"),
            "take that gradient inside the loss",
        ),
        (
            lambda: launcher.parallelize(in_place)(Dense(nnx.Rngs(0), False), nnx.Rngs(0), 0),
            r"batch_argnums=\(1,\) of in_place names a Flax NNX .* in donate",
        ),
        (lambda: check_form(changes_mode, "data"), "changes_mode changes .* before the call"),
        (
            lambda: launcher.parallelize(nnx_step).create(lambda: nnx.Rngs(0), like=0),
            "create makes no Flax NNX objects: call init itself",
        ),
    ],
)
def test_a_program_is_refused_in_one_line(run, match):
    with pytest.raises(TraceError, match=match) as caught:
        run()
    assert "\n" not in str(caught.value)
