"""What tracing reads off a train step and its arguments, and what it refuses."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel
from launcher.trace import BatchError, BoundaryError, GradientError, TraceError, trace_step
from launcher.trace.slicing.slices import ANY_LAYER
from launcher.trace.step import no_gradient_note

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def step_of(loss, **options):
    def step(w, x):
        value, grads = launcher.value_and_grad(loss, **options)(w, x)
        return w - grads, value

    return step


def test_layers_follow_the_marks_and_constants_belong_to_none():
    def loss(w, x):
        mask = jnp.arange(4) < 2
        x = jnp.tanh(x @ w)
        launcher.mark_pipeline_boundary()
        return jnp.where(mask, x @ w, 0.0).sum()

    found = trace_step(step_of(loss), (W, X)).loss(1)
    assert found.num_layers == 2
    by_name = {
        e.primitive.name: layer for e, layer in zip(found.equations, found.layers, strict=True)
    }
    assert by_name["tanh"] == 0
    assert by_name["reduce_sum"] == 1
    assert by_name["iota"] == by_name["lt"] == ANY_LAYER


def test_the_batch_is_sliced_also_after_preprocessing():
    def step(w, x):
        centred = (x - x.mean()).T  # grows along axis 1
        return w, launcher.microbatched(lambda w, c, m: (w @ c).sum() + m)(w, centred, x.mean())

    found = trace_step(step, (W, X)).loss(4)
    assert found.slice_axes == (None, 1, None)
    assert found.invars[1].aval.shape == (4, 2)


def test_donated_state_and_its_successor():
    step = trace_step(step_of(lambda w, x: (x @ w).sum()), (W, X))
    assert step.donated == (True, False)
    assert step.batch == (False, True)
    assert step.aliases == {0: 0}


def test_fingerprint_names_the_program():
    def make(scale):
        return step_of(lambda w, x: (x @ w).sum() * scale)

    same = {trace_step(make(2.0), (W, X)).fingerprint for _ in range(2)}
    assert len(same) == 1
    assert trace_step(make(3.0), (W, X)).fingerprint not in same


def in_scan(w, x):
    def body(c, _):
        launcher.mark_pipeline_boundary()
        return c @ w, None

    return jax.lax.scan(body, x, None, length=2)[0].sum()


def printing(w, x):
    jax.debug.print("{}", x.sum())
    return (x @ w).sum()


def calling_back(w, x):
    y = jax.pure_callback(lambda a: a, X, x)
    return (y @ w).sum()


def calling_back_in_scan(w, x):
    def body(c, _):
        return jax.pure_callback(lambda a: a, X, c), None

    return (jax.lax.scan(body, x, None, length=2)[0] @ w).sum()


def printing_update(w, x):
    grads = launcher.grad(lambda w: (x @ w).sum())(w)
    jax.debug.print("{}", grads.sum())
    return w - grads


def printing_first(w, x):
    x = jax.jit(lambda x: (jax.debug.callback(print, x), x)[1])(x)
    return w - launcher.grad(lambda w: (x @ w).sum())(w)


def grad_in_scan(w, x):
    def body(w, row):
        return w - launcher.grad(lambda w: (row @ w).sum())(w), None

    return jax.lax.scan(body, w, x)[0]


def grad_in_branch(w, x):
    return jax.lax.cond(x.sum() > 0, lambda w: launcher.grad(jnp.sum)(w), lambda w: w, w)


def jax_grad_of_ours(w, x):
    return jax.grad(lambda w: launcher.value_and_grad(lambda w: (x @ w).sum())(w)[0])(w)


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("step", "slices", "error", "words"),
    [
        (printing_update, 1, TraceError, r"debug_.* at .*test_step.py.*side effect.* result of"),
        (printing_first, 1, TraceError, r"debug_.* at .*test_step.py.*side effect"),
        (step_of(calling_back), 1, TraceError, "pure_callback at .*test_step.py.* as aux"),
        (step_of(calling_back_in_scan), 1, TraceError, "pure_callback at .*test_step.py"),
        (
            grad_in_scan,
            1,
            GradientError,
            r"at .*test_step.py.* inside scan at .*test_step.py.*say num_micro_batches",
        ),
        (grad_in_branch, 1, GradientError, "inside cond at .*test_step.py"),
        (jax_grad_of_ours, 1, GradientError, "do not differentiate it"),
        (step_of(lambda w, x: (x @ w).sum()), 0, BatchError, "at least 1"),
        (
            step_of(lambda w, x: ((x @ w).sum(), (x @ w > 0).any()), has_aux=True, reduce="sum"),
            2,
            BatchError,
            'the largest of the examples, .*reduce="sum".* say "max"',
        ),
        (
            lambda w, x: w * (launcher.grad(jnp.sum)(w) if x.shape[0] > 4 else len(x)),
            2,
            GradientError,
            "takes no gradient",
        ),
        (lambda w, x: (x @ w, 0), 1, GradientError, "takes no gradient of a loss"),
        (step_of(in_scan), 1, BoundaryError, "inside scan at .*test_step.py"),
        (step_of(printing), 1, TraceError, "side effect"),
        (step_of(lambda w, x: (x @ w).sum()), 3, BatchError, "batch of 8 .* into 3"),
    ],
)
def test_refusals(step, slices, error, words):
    with pytest.raises(error, match=words):
        trace_step(step, (W, X)).loss(slices)


def test_batch_leaves_must_agree():
    batch = {"x": X, "y": jax.ShapeDtypeStruct((6,), jnp.float32)}
    with pytest.raises(BatchError, match=r"\['x'\]: 8, .*\['y'\]: 6"):
        trace_step(lambda w, b: w, (W, batch))


def test_values_serve_as_shapes():
    step = trace_step(step_of(lambda w, x: (x @ w).sum()), (np.zeros((4, 4)), np.ones((8, 4))))
    assert step.batch_size == 8


def test_slices_are_of_the_loss_that_the_step_holds():
    """Not of one that is only asked for its shape, though that has the same equations."""

    def loss(first, second, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ first) @ second)

    def step(params, batch):
        jax.eval_shape(
            launcher.value_and_grad(lambda a, b, batch: loss(b, a, batch)), *params, batch
        )
        return launcher.value_and_grad(loss)(*params, batch)

    params = jnp.eye(4), jnp.arange(16.0).reshape(4, 4)
    traced = trace_step(step, (params, {"x": jnp.ones((8, 4))}))
    for loss_of in (traced.loss(1), traced.loss(2)):
        weights = [e.invars[1] for e in loss_of.equations if e.primitive.name == "dot_general"]
        assert weights == list(loss_of.invars[:2])


def test_a_slice_is_traced_no_further_than_the_loss():
    traced = {"loss": 0, "update": 0}

    def loss(w, x):
        traced["loss"] += 1
        return (x @ w).mean()

    def step(w, x):
        grads = launcher.grad(loss)(w, x)
        traced["update"] += 1
        return w - grads

    found = trace_step(step, (jnp.eye(4), jnp.ones((8, 4))))
    assert found.loss(2).num_slices == 2
    assert found.loss(4).num_slices == 4
    assert traced == {"loss": 3, "update": 1}


def test_a_function_without_a_loss_is_a_step_that_only_updates():
    def apply(state, grads):
        return state - 0.1 * grads, grads[:1]

    shapes = jax.ShapeDtypeStruct((4, 2), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    with pytest.raises(GradientError, match=r"method=step"):
        trace_step(apply, shapes)
    step = trace_step(apply, shapes, needs_loss=False)
    assert (step.batch, step.donated, step.traces) == ((False, False), (True, False), None)
    assert step.aliases == {0: 0}
    assert (step.loss(4).num_slices, step.loss(4).num_layers, step.operands) == (4, 0, ())
    assert [eqn.primitive.name for eqn in step.after] == ["mul", "sub", "slice"]
    with pytest.raises(TraceError, match="side effect"):
        trace_step(lambda x, y: jax.debug.print("{}", x), shapes, needs_loss=False)


class Named(NamedTuple):
    loss: Any
    state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    loss: Any
    state: Any


def gradient(state, x):
    return launcher.value_and_grad(lambda s: (x @ s["w"]).mean() * s["b"].sum())(state)


STATE = {"b": jax.ShapeDtypeStruct((3,), jnp.float32), "w": W}


@pytest.mark.parametrize(
    ("wrap", "first"),
    [
        (lambda loss, state: state, 0),
        (lambda loss, state: (loss, state), 1),
        (lambda loss, state: [state, loss], 0),
        (lambda loss, state: {"loss": loss, "state": state}, 1),
        (Named, 1),
        (Record, 1),
    ],
)
def test_the_state_is_found_among_the_results(wrap, first):
    def step(state, x):
        loss, grads = gradient(state, x)
        return wrap(loss, jax.tree.map(jnp.subtract, state, grads))

    assert trace_step(step, (STATE, X)).aliases == {first: 0, first + 1: 1}


def test_a_tuple_of_parts_is_one_state():
    def step(state, x):
        grads = launcher.grad(lambda w: (x @ w).sum())(state[0])
        return state[0] - grads, state[1] + 1

    assert trace_step(step, ((W, W), X)).aliases == {0: 0, 1: 1}


def test_two_donated_arguments_of_one_shape_take_two_places():
    def step(a, x, b):
        return a - launcher.grad(lambda w: (x @ w).sum())(a), b + 1

    assert trace_step(step, (W, X, W), donate_argnums=(0, 2)).aliases == {0: 0, 1: 2}


@pytest.mark.parametrize("scale", [0.5, jnp.asarray(0.5)], ids=["float", "weak array"])
def test_weak_types_do_not_widen_the_parameters(scale):
    def step(state, x):
        grads = launcher.grad(lambda w: (x @ w).sum())(state["w"])
        return {"w": state["w"] - state["scale"] * grads, "scale": state["scale"]}

    small = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    args = {"w": small, "scale": scale}, jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    found = trace_step(step, args)
    want = [x.dtype for x in jax.tree.leaves(jax.eval_shape(step, *args))]
    assert [v.aval.dtype for v in found.outvars] == want
    assert found.aliases == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((W, X), {"batch_argnums": (3,)}, "batch_argnums names argument 3"),
    ],
)
def test_bad_arguments_are_named(args, options, words):
    with pytest.raises(TraceError, match=words):
        trace_step(lambda w, x, *_: w, args, **options)


WHY = "or only through stop_gradient or whole numbers"


def traced(loss, params):
    def step(params, x):
        value, grads = launcher.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return trace_step(step, (params, X))


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("through", "said"),
    [
        (lambda w, x: x @ w, False),
        (lambda w, x: x, True),
        (lambda w, x: x @ jax.lax.stop_gradient(w), True),
        (lambda w, x: x + jnp.argmax(w), True),
        (lambda w, x: x + jnp.round(w).sum(), True),
        (lambda w, x: x + straight_through(w).sum(), False),
        (lambda w, x: jnp.where(w.sum() > 0, x, 2 * x), True),
        (jax.checkpoint(lambda w, x: x @ jax.lax.stop_gradient(w)), True),
        (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), False),
        (lambda w, x: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0], False),
    ],
)
def test_a_parameter_is_named_if_no_gradient_reaches_it(through, said):
    def loss(params, x):
        return jnp.mean(through(params["w"], x @ params["used"]) ** 2)

    step = traced(loss, {"used": W, "w": W})
    expected = f"no gradient reaches 0.w: the loss does not depend on it, {WHY}"
    assert no_gradient_note(step) == (expected if said else None)


def test_many_are_counted_and_the_plan_says_it():
    step = traced(lambda params, x: jnp.mean(x @ params[0]), [W] * 7)
    expected = (
        "no gradient reaches 0.1, 0.2, 0.3, 0.4 and 2 more: the loss does not depend on them, "
        f"{WHY}"
    )
    assert no_gradient_note(step) == expected
    assert DataParallel().plan(step, local_shape(1, 1, "cpu")).notes == (expected,)


def test_an_evaluation_has_no_gradients_to_miss():
    step = trace_step(launcher.microbatched(lambda w, x: jnp.mean(x)), (W, X), donate_argnums=())
    assert no_gradient_note(step) is None
