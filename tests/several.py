"""Train steps with several losses, each given `value_and_grad` and `evaluated`: JAX's or ours."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import launcher

ROWS = 8
OPTIMIZER = optax.adam(1e-2)
_rng = np.random.default_rng(0)


def normal(*shape):
    return (_rng.normal(size=shape) / 2).astype(np.float32)


BATCH = {"x": normal(ROWS, 4), "y": normal(ROWS, 4)}
NET = {name: normal(4, 4) for name in ("a", "b", "c")}
GENERATOR = {"a": normal(4, 4), "b": normal(4, 4)}
CRITIC = {"a": normal(4, 4), "b": normal(4, 1)}


def net(p, x):
    h = jnp.tanh(x @ p["a"])
    launcher.mark_pipeline_boundary()
    h = jnp.tanh(h @ p["b"])
    return h @ p["c"]


def error(p, b):
    return jnp.mean((net(p, b["x"]) - b["y"]) ** 2)


def size(p, b):
    return jnp.mean(net(p, b["x"]) ** 2)


def first_state():
    return {"params": NET, "opt": OPTIMIZER.init(NET)}


def updated(state, grads):
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def generated(g, b):
    h = jnp.tanh(b["x"] @ g["a"])
    launcher.mark_pipeline_boundary()
    return jnp.tanh(h @ g["b"])


def realness(d, x):
    return jnp.tanh(x @ d["a"]) @ d["b"]


def generator_loss(g, d, b):
    return jax.nn.softplus(-realness(d, generated(g, b))).mean()


def critic_loss(d, g, b):
    fake = jax.lax.stop_gradient(generated(g, b))
    terms = jax.nn.softplus(-realness(d, b["y"])) + jax.nn.softplus(realness(d, fake))
    return terms.mean()


def critic_loss_of(d, real, fake):
    """One layer: the generator ran outside of the loss."""
    return jnp.mean(jax.nn.softplus(-realness(d, real)) + jax.nn.softplus(realness(d, fake)))


def gan_state():
    return {
        "d": {"params": CRITIC, "opt": OPTIMIZER.init(CRITIC)},
        "g": {"params": GENERATOR, "opt": OPTIMIZER.init(GENERATOR)},
        "count": jnp.int32(0),
    }


def gan(value_and_grad, evaluated):
    """The generator's gradient is taken through the critic that was updated in the same step."""

    def step(state, batch):
        d, g = state["d"], state["g"]
        d_value, grads = value_and_grad(critic_loss)(d["params"], g["params"], batch)
        d = updated(d, grads)
        g_value, grads = value_and_grad(generator_loss)(g["params"], d["params"], batch)
        new = {"d": d, "g": updated(g, grads), "count": state["count"] + 1}
        return new, {"d": d_value, "g": g_value}

    return step, gan_state


def generated_outside(value_and_grad, evaluated):
    """The critic's loss has a layer less, and its parameters live on the last stage."""

    def step(state, batch):
        d, g = state["d"], state["g"]
        fake = jnp.tanh(jnp.tanh(batch["x"] @ g["params"]["a"]) @ g["params"]["b"])
        d_value, grads = value_and_grad(critic_loss_of)(d["params"], batch["y"], fake)
        d = updated(d, grads)
        g_value, grads = value_and_grad(generator_loss)(g["params"], d["params"], batch)
        new = {"d": d, "g": updated(g, grads), "count": state["count"] + 1}
        return new, {"d": d_value, "g": g_value}

    return step, gan_state


def added(value_and_grad, evaluated):
    """Two losses of the same parameters, whose gradients are added."""

    def step(state, batch):
        one, grads = value_and_grad(error)(state["params"], batch)
        other, more = value_and_grad(size)(state["params"], batch)
        return updated(state, jax.tree.map(jnp.add, grads, more)), (one, other)

    return step, first_state


def halves(value_and_grad, evaluated):
    """Unrolled accumulation."""

    def step(state, batch):
        parts = [jax.tree.map(lambda x, i=i: jnp.split(x, 2)[i], batch) for i in range(2)]
        found = [value_and_grad(error)(state["params"], part) for part in parts]
        value, grads = jax.tree.map(lambda a, b: (a + b) / 2, *found)
        return updated(state, grads), value

    return step, first_state


def evaluated_after(value_and_grad, evaluated):
    def step(state, batch):
        value, grads = value_and_grad(error)(state["params"], batch)
        new = updated(state, grads)
        return new, (value, evaluated(error)(new["params"], batch))

    return step, first_state


def evaluated_before(value_and_grad, evaluated):
    def step(state, batch):
        before = evaluated(size)(state["params"], batch)
        value, grads = value_and_grad(error)(state["params"], batch)
        return updated(state, grads), (value, before)

    return step, first_state


def sharpness_aware(value_and_grad, evaluated):
    def step(state, batch):
        params = state["params"]
        value, grads = value_and_grad(error)(params, batch)
        norm = optax.tree.norm(grads)
        near = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        sharp, grads = value_and_grad(error)(near, batch)
        return updated(state, grads), (value, sharp)

    return step, first_state


def with_much_else(value_and_grad, evaluated):
    """Keys, weights by the first loss's rows, an average of parameters, a leaf that is passed
    through, one that nothing reads, one that is reset, and a number and the batch as results."""

    def each(p, b):
        return jnp.mean((net(p, b["x"]) - b["y"]) ** 2, -1)

    def first(p, b):
        found = each(p, b)
        return found.mean(), found

    def second(p, b, weight, key):
        return jnp.sum(each(p, b) * weight) / jnp.sum(weight) + 0 * jax.random.uniform(key)

    def step(state, batch):
        key, now = jax.random.split(state["key"])
        trained = {name: state[name] for name in ("params", "opt")}
        (value, rows), grads = value_and_grad(first, has_aux=True)(trained["params"], batch)
        trained = updated(trained, grads)
        weight = jax.nn.softmax(rows)
        other, grads = value_and_grad(second)(trained["params"], batch, weight, now)
        trained = updated(trained, grads)
        slow = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["slow"], trained["params"])
        new = {**trained, "key": key, "slow": slow, "before": state["params"]}
        new |= {"count": jnp.int32(0), "unused": state["unused"]}
        return new, (value, other, rows, batch["x"], 2.0)

    def init():
        more = {"slow": NET, "before": NET, "count": jnp.int32(1), "unused": jnp.ones(3)}
        return {**first_state(), "key": jax.random.PRNGKey(3), **more}

    return step, init


STEPS = [
    gan,
    generated_outside,
    added,
    halves,
    evaluated_after,
    evaluated_before,
    sharpness_aware,
    with_much_else,
]


def ours(make):
    """The step for `launcher.parallelize`, and what makes its state."""
    return make(launcher.value_and_grad, launcher.microbatched)


def jax_own(make):
    """The same step in plain JAX."""
    return make(jax.value_and_grad, lambda fun: fun)
