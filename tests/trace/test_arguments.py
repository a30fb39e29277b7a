"""Arguments: weak types, and which result takes a donated argument's place."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import TraceError, trace_step

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


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
        (({"w": W, "name": "x"}, X), {}, r"leaf \['name'\] of argument 0 is a str.*static_argnums"),
        ((W, X, np.array("x")), {}, "argument 2 is a ndarray, which is not an array of numbers"),
        ((W, X, len), {}, "argument 2 is a builtin_function"),
        ((W, X), {"batch_argnums": (3,)}, "batch_argnums names argument 3"),
    ],
)
def test_bad_arguments_are_named(args, options, words):
    with pytest.raises(TraceError, match=words):
        trace_step(lambda w, x, *_: w, args, **options)
