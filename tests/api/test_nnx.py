"""`launcher.nnx`: what becomes of a module's parameters, random streams and other variables."""

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import launcher

ONES = {"x": jnp.ones((64, 8))}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.table = nnx.data(jnp.arange(3.0))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Masks(nnx.Module):
    """Two dropout layers side by side, and three more that are one module under `nnx.vmap`."""

    def __init__(self, rngs):
        self.first, self.second = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.three = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        three = nnx.vmap(lambda drop, x: drop(x))(self.three, jnp.stack([x] * 3))
        return jnp.concatenate([self.first(x)[None], self.second(x)[None], three])


def squares(net, batch):
    return jnp.mean(net(batch["x"]) ** 2)


def test_parameters_and_all_other_variables_are_dicts_of_arrays():
    model = launcher.nnx.model(Net, squares)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    assert model.has_state
    assert set(params) == {"layers", "norm"}
    assert set(params["layers"]) == {str(i) for i in range(11)}
    assert set(state) == {"norm", "calls", "table"}
    assert set(state["norm"]) == {"mean", "var"}


def test_the_module_comes_back_with_its_arrays():
    params, state = launcher.nnx.model(Net, squares).init(jax.random.key(3))
    net = launcher.nnx.module(Net, params, state)
    x = jax.random.normal(jax.random.key(1), (4, 8))
    np.testing.assert_allclose(net(x), Net(nnx.Rngs(jax.random.key(3)))(x), rtol=1e-6)


def test_what_the_loss_changes_is_the_next_state_and_in_evaluation_nothing():
    def loss(net, batch):
        return squares(net, batch), {"calls": net.calls[...]}

    model = launcher.nnx.model(Net, loss)
    params, state = model.init(jax.random.key(0))
    x = {"x": jax.random.normal(jax.random.key(1), (16, 8))}
    value, (metrics, new) = jax.jit(model.loss)(params, state, x, jax.random.key(0))
    assert (metrics["calls"], new["calls"]) == (1, 1)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert np.any(new["norm"]["mean"] != state["norm"]["mean"])
    evaluated, (_, same) = model.loss(params, new, x, None)
    jax.tree.map(np.testing.assert_array_equal, same["norm"], new["norm"])
    assert evaluated != value


def test_each_random_stream_draws_numbers_of_its_own_by_the_steps_key():
    def masks(net, batch):
        return jnp.float32(0), {"masks": net(batch["x"]) != 0}

    model = launcher.nnx.model(Masks, masks)
    drawn = [
        model.loss({}, {}, ONES, key)[1][0]["masks"]
        for key in (jax.random.key(0), jax.random.key(1), jax.random.key(0), None)
    ]
    every = np.concatenate(drawn[:2]).reshape(10, -1)
    assert len(np.unique(every, axis=0)) == 10
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert drawn[3].all()  # no dropout


def test_its_functions_go_to_other_processes():
    model = launcher.nnx.model(Net, squares)
    params, state = model.init(jax.random.key(0))
    again = cloudpickle.loads(cloudpickle.dumps(model.loss))
    found = (loss(params, state, ONES, None)[0] for loss in (model.loss, again))
    assert len(set(map(float, found))) == 1
