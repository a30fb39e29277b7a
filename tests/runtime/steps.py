"""Train steps that do the unusual: inside the loss, in the update, or with their own state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import (
    LAYERS,
    VOCAB,
    WIDTH,
    Case,
    chain,
    dense,
    mark,
    optimizer,
    plain_build,
    plain_init,
    tokens,
    update,
    vector_case,
    vectors,
    weights,
)
from flax.training.train_state import TrainState

import launcher

# -- inside the loss -------------------------------------------------------------------------------


def checkpoint():
    return vector_case("checkpoint", jax.checkpoint(lambda w, h: jnp.tanh(jnp.sin(h @ w) @ w.T)))


def conditional():
    @launcher.per_slice
    def layer(w, h):
        return jax.lax.cond(h.mean() > 0.0, lambda h: jnp.tanh(h @ w), lambda h: h - h @ w / 4, h)

    return vector_case("cond", layer)


def loops():
    """A `while` that no gradient flows through, and a `fori_loop` that one does."""

    def layer(w, h):
        frozen = jax.lax.stop_gradient(w)
        size, _ = jax.lax.while_loop(
            lambda c: c[1].max() > 1.0, lambda c: (c[0] * 2, c[1] / 2), (1.0, jnp.abs(frozen))
        )
        return jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w / size), h)

    return vector_case("while", layer)


def custom_gradient():
    """A straight-through estimator, inside a function that is jitted on its own."""

    @jax.custom_vjp
    def rounded(x):
        return jnp.round(4 * x) / 4

    rounded.defvjp(lambda x: (rounded(x), jnp.abs(x) < 2), lambda kept, g: (g * kept,))

    @jax.jit
    def layer(w, h):
        return jax.nn.relu(h @ rounded(w)) + h / 2

    return vector_case("custom_vjp", layer)


def penalty():
    """A gradient inside the loss: of the network with respect to its input."""

    def network(params, x):
        return chain(lambda w, h: jnp.tanh(h @ w), x, params)

    def loss(params, batch):
        slopes = jax.vmap(jax.grad(lambda x: network(params, x[None]).sum()))(batch["x"])
        steep = jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)
        return jnp.mean((network(params, batch["x"]) - batch["y"]) ** 2) + 0.1 * steep

    return Case("penalty", plain_init(weights), plain_build(loss), vectors)


# -- around the loss -------------------------------------------------------------------------------


def loss_scale():
    """Dynamic loss scaling: the update is skipped where a gradient is not finite, decided over all
    stages. The scale starts so high that the first step overflows."""
    more = 2.0**40

    def loss(params, batch, scale):
        h = chain(lambda w, h: jnp.tanh(h @ w), batch["x"], params)
        value = jnp.mean((h - batch["y"]) ** 2)
        return value * scale * more, value

    def build(value_and_grad):
        def step(state, batch):
            scale = state["scale"]
            (_, value), grads = value_and_grad(loss, has_aux=True)(state["params"], batch, scale)
            grads = jax.tree.map(lambda g: g / scale / more, grads)
            finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
            kept = {k: v for k, v in state.items() if k != "scale"}
            new = jax.lax.cond(finite, lambda: update(kept, grads), lambda: kept)
            scale = jnp.where(finite, scale, scale * 2.0**-60)
            return {**new, "scale": scale}, {"loss": value, "finite": finite}

        return step

    init = plain_init(weights, scale=jnp.float32(2.0**120))
    return Case("loss_scale", init, build, vectors)


def unused_and_reused():
    """A parameter that no loss reads, integers as input, and after the gradients the batch again
    and a result with a row an example."""

    def make_params(rng):
        return {"unused": jnp.ones(3), "layers": weights(rng), "embed": dense(rng, VOCAB, WIDTH)}

    def loss(params, batch):
        h = chain(lambda w, h: jnp.tanh(h @ w), params["embed"][batch["tokens"]], params["layers"])
        logits = h @ params["embed"].T
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return errors.mean(), {"errors": errors.mean(-1), "last": h[-1]}

    def build(value_and_grad):
        words = ("mean", {"errors": "concat", "last": "last"})
        with_aux = value_and_grad(loss, has_aux=True, reduce=words)

        def step(state, batch):
            (value, aux), grads = with_aux(state["params"], batch)
            worst = jnp.argmax(aux["errors"])
            said = {"loss": value, "worst": worst, "tokens": batch["tokens"][worst]}
            return update(state, grads), {**said, "last": aux["last"]}

        return step

    return Case("unused", plain_init(make_params), build, tokens)


def sums():
    """A loss that adds up weighted rows; gradients are divided by the whole batch's weight."""

    def loss(params, batch, weight):
        h = chain(lambda w, h: jnp.tanh(h @ w), batch["x"], params)
        return jnp.sum(weight[:, None] * (h - batch["y"]) ** 2), weight.sum()

    def build(value_and_grad):
        with_aux = value_and_grad(loss, has_aux=True, reduce="sum")

        def step(state, batch):
            weight = jnp.exp(batch["x"].T[0] - batch["x"].mean())
            (value, total), grads = with_aux(state["params"], batch, weight)
            grads = jax.tree.map(lambda g: g / total, grads)
            return update(state, grads), {"loss": value / total}

        return step

    return Case("sums", plain_init(weights), build, vectors)


def augmented():
    """Examples mixed with shuffled others before the loss; a key that is split off the state's."""

    def loss(params, x, y, key):
        h = chain(lambda w, h: jnp.tanh(h @ w), x, params)
        return jnp.mean((h * jax.random.bernoulli(key, 0.9, h.shape) - y) ** 2)

    def build(value_and_grad):
        def step(state, batch):
            key, *keys = jax.random.split(state["key"], 4)
            others = jax.random.permutation(keys[0], batch["x"].shape[0])
            part = jax.random.uniform(keys[1])
            x, y = (part * a + (1 - part) * a[others] for a in (batch["x"], batch["y"]))
            value, grads = value_and_grad(loss)(state["params"], x, y, keys[2])
            return {**update(state, grads), "key": key}, {"loss": value}

        return step

    return Case("augmented", plain_init(weights, key=jax.random.key(2)), build, vectors)


def teacher():
    """A second network that follows the first one slowly and is its target."""

    def loss(params, slow, batch):
        h, target = (chain(lambda w, h: jnp.tanh(h @ w), batch["x"], p) for p in (params, slow))
        return jnp.mean((h - jax.lax.stop_gradient(target) - batch["y"]) ** 2)

    def build(value_and_grad):
        def step(state, batch):
            slow = state["slow"]
            value, grads = value_and_grad(loss)(state["params"], slow, batch)
            new = update({k: v for k, v in state.items() if k != "slow"}, grads)
            slow = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, slow, new["params"])
            return {**new, "slow": slow}, {"loss": value}

        return step

    init = plain_init(weights, slow=weights(np.random.default_rng(1)))
    return Case("teacher", init, build, vectors)


def two_networks():
    """Gradients of two arguments, each with an optimizer of its own."""

    def init(key):
        del key
        first, *rest = weights(np.random.default_rng(0))
        opts = {"a": optax.adam(1e-2).init(first), "b": optax.sgd(0.1).init(rest)}
        return {"a": first, "b": rest, "opts": opts}

    def loss(a, b, batch):
        h = chain(lambda w, h: jnp.tanh(h @ w), batch["x"], [a, *b])
        return jnp.mean((h - batch["y"]) ** 2)

    def build(value_and_grad):
        def step(state, batch):
            both = value_and_grad(loss, argnums=(0, 1))
            value, (of_a, of_b) = both(state["a"], state["b"], batch)
            a, opt_a = optax.adam(1e-2, eps=1e-3).update(of_a, state["opts"]["a"])
            b, opt_b = optax.sgd(0.1).update(of_b, state["opts"]["b"])
            new = {"a": state["a"] + a, "b": optax.apply_updates(state["b"], b)}
            return {**new, "opts": {"a": opt_a, "b": opt_b}}, {"loss": value}

        return step

    return Case("two_networks", init, build, vectors)


class Perceptron(nn.Module):
    """Dense layers and dropout, whose key linen folds by the layer's name."""

    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            if i:
                mark()
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dropout(0.1, deterministic=False)(x)


def flax_state():
    """A `TrainState` with its static fields, a raw dropout key, gradients averaged over steps."""
    net = Perceptron()
    tx = optax.MultiSteps(optimizer(), every_k_schedule=2)

    def init(key):
        params = net.init({"params": key, "dropout": key}, vectors(0)["x"])["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    def build(value_and_grad):
        def step(state, batch):
            def loss(params, batch, key):
                h = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key})
                return jnp.mean((h - batch["y"]) ** 2)

            key = jax.random.fold_in(jax.random.PRNGKey(1), state.step)
            value, grads = value_and_grad(loss)(state.params, batch, key)
            return state.apply_gradients(grads=grads), {"loss": value}

        return step

    return Case("flax", init, build, vectors)


STEPS = [
    checkpoint(),
    conditional(),
    loops(),
    custom_gradient(),
    penalty(),
    loss_scale(),
    unused_and_reused(),
    sums(),
    augmented(),
    teacher(),
    two_networks(),
    flax_state(),
]
