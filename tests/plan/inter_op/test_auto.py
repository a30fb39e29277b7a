"""What the whole search can be asked for, on a traced step."""

import jax
import jax.numpy as jnp

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import auto_plan
from launcher.trace import trace_step

WIDTH = 8


def traced(layers, batch=8):
    def train(params, x):
        def loss(params, x):
            for i, w in enumerate(params):
                if i:
                    launcher.mark_pipeline_boundary()
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        return launcher.grad(loss)(params, x)

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    return trace_step(train, (params, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)))


def test_more_stages_than_groups_of_layers_that_are_searched_by_default():
    plan = auto_plan(traced(18), local_shape(18, 1, "cpu"), 2, "1f1b", "none", num_stages=17)
    assert len(plan.stages) == 17
