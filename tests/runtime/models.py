"""Small networks as a JAX or Flax user writes them, each of four stages or more."""

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
    images,
    mark,
    plain_build,
    plain_init,
    tokens,
    update,
    vector_case,
    vectors,
)

import launcher


def mlp():
    return vector_case("mlp", lambda w, h: jnp.tanh(h @ w))


def block_init(rng, *lead):
    return {
        "norm": jnp.ones((*lead, 2, WIDTH)),
        "qkv": dense(rng, *lead, WIDTH, 3 * WIDTH),
        "out": dense(rng, *lead, WIDTH, WIDTH),
        "up": dense(rng, *lead, WIDTH, 2 * WIDTH),
        "down": dense(rng, *lead, 2 * WIDTH, WIDTH),
    }


def normed(scale, h):
    return scale * (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def block(p, h, key=None, heads=2):
    """A causal transformer block, `[rows, length, width]`."""
    rows, length, width = h.shape
    qkv = (normed(p["norm"][0], h) @ p["qkv"]).reshape(rows, length, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
    mixed = mixed.reshape(rows, length, width) @ p["out"]
    if key is not None:
        mixed = mixed * jax.random.bernoulli(key, 0.9, mixed.shape) / 0.9
    h = h + mixed
    return h + jax.nn.gelu(normed(p["norm"][1], h) @ p["up"]) @ p["down"]


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def gpt(tied):
    """The embedding is also the head, and every other layer has dropout; or neither."""

    def make_params(rng):
        blocks = [block_init(rng) for _ in range(LAYERS)]
        params = {"embed": dense(rng, VOCAB, WIDTH), "blocks": blocks}
        return params if tied else {**params, "head": dense(rng, WIDTH, VOCAB)}

    def loss(params, batch, key, dropout):
        h = params["embed"][batch["tokens"]]
        for i, p in enumerate(params["blocks"]):
            if i:
                mark()
            h = block(p, h, jax.random.fold_in(key, i) if dropout and i % 2 else None)
        head = params["embed"].T if tied else params["head"]
        return cross_entropy(h @ head, batch["targets"]).mean()

    def build(value_and_grad):
        def step(state, batch):
            key = jax.random.fold_in(state["key"], state["step"])
            value, grads = value_and_grad(loss)(state["params"], batch, key=key, dropout=tied)
            return update(state, grads), {"loss": value}

        return step

    init = plain_init(make_params, key=jax.random.key(7))
    return Case("gpt_tied" if tied else "gpt_untied", init, build, tokens)


def scan_transformer():
    """Every stage scans over its own two blocks; every other one draws from a raw key."""

    def make_params(rng):
        pairs = [block_init(rng, 2) for _ in range(LAYERS)]
        return {"embed": dense(rng, VOCAB, WIDTH), "pairs": pairs}

    def loss(params, batch, keys):
        h = params["embed"][batch["tokens"]]
        for i, pair in enumerate(params["pairs"]):
            if i:
                mark()
            h, _ = jax.lax.scan(lambda h, p: (block(p, h), None), h, pair)
            if i % 2:
                h = h * (1 + 0.1 * jax.random.normal(keys[i], h.shape))
        return cross_entropy(h @ params["embed"].T, batch["targets"]).mean()

    def build(value_and_grad):
        def step(state, batch):
            keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), LAYERS)
            value, grads = value_and_grad(loss)(state["params"], batch, keys)
            return update(state, grads), {"loss": value}

        return step

    return Case("scan", plain_init(make_params, key=jax.random.PRNGKey(7)), build, tokens)


def mixture_of_experts(experts=3):
    """Top-1 routing by einsum, with its balancing loss beside the main one."""

    def make_params(rng):
        sizes = {"gate": (WIDTH, experts), "up": (experts, WIDTH, 4), "down": (experts, 4, WIDTH)}
        return [{k: dense(rng, *s) for k, s in sizes.items()} for _ in range(LAYERS)]

    @launcher.per_slice
    def layer(p, carried):
        h, balance = carried
        gates = jax.nn.softmax(h @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        inner = jax.nn.relu(jnp.einsum("bd,edf,be->bef", h, p["up"], chosen))
        out = jnp.einsum("bef,efd,be->bd", inner, p["down"], gates)
        return h + out, balance + jnp.sum(chosen.mean(0) * gates.mean(0))

    def loss(params, batch):
        h, balance = chain(layer, (batch["x"], jnp.float32(0)), params)
        error = jnp.mean((h - batch["y"]) ** 2)
        return error + 0.01 * balance, {"error": error, "balance": balance}

    def build(value_and_grad):
        def step(state, batch):
            (value, aux), grads = value_and_grad(loss, has_aux=True)(state["params"], batch)
            return update(state, grads), {"loss": value, **aux}

        return step

    return Case("experts", plain_init(make_params), build, vectors)


class ConvNet(nn.Module):
    """Convolutions with batch statistics, a pooled head."""

    @nn.compact
    def __call__(self, x, train):
        for i in range(LAYERS):
            if i:
                mark()
            x = nn.Conv(4, (3, 3), strides=2 if i == 1 else 1)(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9)
            x = nn.relu(launcher.per_slice(norm)(x))
        return nn.Dense(3)(x.mean((1, 2)))


def conv_net():
    """`batch_stats` travel through aux; each slice normalizes by its own, the running ones are the
    mean over slices."""
    net = ConvNet()

    def init(key):
        made = net.init(key, images(0)["image"], train=False)
        state = plain_init(lambda _: made["params"])(key)
        return {**state, "stats": made["batch_stats"]}

    def loss(params, stats, batch, train):
        variables = {"params": params, "batch_stats": stats}
        logits, new = net.apply(variables, batch["image"], train, mutable=["batch_stats"])
        right = (logits.argmax(-1) == batch["label"]).sum()
        value = cross_entropy(logits, batch["label"]).mean()
        return value, {"stats": new["batch_stats"], "right": right}

    def build(value_and_grad):
        words = {"stats": "mean", "right": "sum"}
        with_aux = value_and_grad(loss, has_aux=True, reduce=("mean", words))

        def step(state, batch):
            (value, aux), grads = with_aux(state["params"], state["stats"], batch, train=True)
            new = {**update(state, grads), "stats": aux["stats"]}
            return new, {"loss": value, "accuracy": aux["right"] / batch["label"].shape[0]}

        return step

    return Case("conv", init, build, images)


def u_net():
    """Every layer on the way down hands its result to its partner on the way up, stages later."""

    def make_params(rng):
        return [dense(rng, *s) for s in [(WIDTH, 6), (6, 4), (4, 4), (8, 6), (12, WIDTH)]]

    def loss(params, batch):
        down = [jnp.tanh(batch["x"] @ params[0])]
        mark()
        down.append(jnp.tanh(down[-1] @ params[1]))
        mark()
        h = jnp.tanh(down[-1] @ params[2])
        mark()
        h = jnp.tanh(jnp.concatenate([h, down[1]], -1) @ params[3])
        mark()
        h = jnp.concatenate([h, down[0]], -1) @ params[4]
        return jnp.mean((h - batch["y"] + 0.1 * batch["x"]) ** 2)

    return Case("u_net", plain_init(make_params), plain_build(loss), vectors)


MODELS = [
    mlp(),
    gpt(tied=True),
    gpt(tied=False),
    conv_net(),
    mixture_of_experts(),
    scan_transformer(),
    u_net(),
]
