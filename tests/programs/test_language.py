"""Language models in the shape of Flax's examples."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from filled import filled
from flax.training import common_utils, train_state
from programs.program import ROWS, Program, table_test

import launcher

VOCAB, LENGTH, WIDTH = 11, 6, 8


def texts(k, length=LENGTH):
    """Tokens of rows that are the longer the further down they are; 0 is padding, which a few rows
    hold alone."""
    rng = np.random.default_rng(k)
    lengths = np.arange(ROWS) * (length + 1) // ROWS
    tokens = rng.integers(1, VOCAB, (ROWS, length))
    return np.where(np.arange(length) < lengths[:, None], tokens, 0).astype(np.int32)


SGD = optax.sgd(0.05)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))


class Attention(nn.Module):
    """Of one head; `x` looks at `y` where the mask says so."""

    @nn.compact
    def __call__(self, x, y, mask):
        q, k, v = (nn.Dense(WIDTH, use_bias=False)(z) for z in (x, y, y))
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(WIDTH)
        return jnp.einsum("bqk,bkd->bqd", nn.softmax(jnp.where(mask, scores, -1e9)), v)


class Layer(nn.Module):
    """A transformer's layer; `encoded`: what the decoder looks at, with its mask."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, encoded=None, cross=None):
        h = nn.LayerNorm(use_bias=False)(x)
        h = Attention()(h, h, mask)
        x = x + nn.Dropout(self.dropout, deterministic=not self.dropout)(h)
        if encoded is not None:
            x = x + Attention()(x, encoded, cross)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x)))


def seen(queries, keys, causal=False):
    """Which tokens see which: none sees padding."""
    mask = (queries > 0)[:, :, None] & (keys > 0)[:, None]
    return mask & jnp.tri(queries.shape[1], keys.shape[1], dtype=bool) if causal else mask


def shifted(x):
    return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


class Decoder(nn.Module):
    """A decoder-only language model, as lm1b's: the head is the embedding."""

    dropout: float

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(shifted(tokens)) + self.param("place", nn.initializers.zeros, (LENGTH, WIDTH))
        mask = seen(tokens, tokens, causal=True)
        x = Layer(self.dropout)(x, mask)
        launcher.mark_pipeline_boundary()
        x = Layer(self.dropout)(x, mask)
        return embed.attend(nn.LayerNorm()(x)) / np.sqrt(WIDTH)


class Translator(nn.Module):
    """An encoder and a decoder, as wmt's."""

    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCAB, WIDTH)
        encoded = Layer()(embed(inputs), seen(inputs, inputs))
        launcher.mark_pipeline_boundary()
        mask, cross = seen(targets, targets, causal=True), seen(targets, inputs)
        x = Layer()(embed(shifted(targets)), mask, encoded, cross)
        return nn.Dense(VOCAB)(x)


def weighted_cross_entropy(logits, targets, weights, smoothing=0.1):
    """The sum over the tokens and that of the weights, as in the examples."""
    size = logits.shape[-1]
    confidence = 1.0 - smoothing
    low = smoothing / (size - 1)
    constant = -(confidence * np.log(confidence) + (size - 1) * low * np.log(low + 1e-20))
    soft = common_utils.onehot(targets, size, on_value=confidence, off_value=low)
    each = (-jnp.sum(soft * nn.log_softmax(logits), axis=-1) - constant) * weights
    return each.sum(), weights.sum()


def token_metrics(logits, targets, weights):
    loss, weight = weighted_cross_entropy(logits, targets, weights)
    hits = (jnp.argmax(logits, -1) == targets) * weights
    return {"loss": loss, "accuracy": hits.sum(), "denominator": weight}


def initial(model, *args, tx=SGD):
    """What makes the first state, of shapes alone."""

    @functools.cache
    def params():
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *args))
        return filled(shapes["params"])

    def init():
        return train_state.TrainState.create(apply_fn=model.apply, params=params(), tx=tx)

    return init


def lm1b():
    """Gradients through the logits' weighted mean; metrics of the logits, outside the loss."""
    model = Decoder(0.2)

    def forward(params, tokens, key):
        return model.apply({"params": params}, tokens, rngs={"dropout": key})

    def build(value_and_grad):
        def step(state, batch):
            key = jax.random.fold_in(jax.random.key(0), state.step)
            weights = jnp.where(batch > 0, 1, 0).astype(jnp.float32)

            def loss_fn(params):
                logits = forward(params, batch, key)
                loss, weight = weighted_cross_entropy(logits, batch, weights)
                return loss / weight, logits

            (_, logits), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads), token_metrics(logits, batch, weights)

        return step

    return Program(initial(Decoder(0.0), texts(0), tx=ADAMW), build, texts)


def wmt():
    """Metrics of the loss itself; a source and a target of other lengths."""
    model = Translator()

    def batch(k):
        return {"inputs": texts(k), "targets": texts(k + 50, LENGTH + 1)}

    def build(value_and_grad):
        def step(state, batch):
            def loss_fn(params):
                weights = (batch["targets"] > 0).astype(jnp.float32)
                logits = model.apply({"params": params}, batch["inputs"], batch["targets"])
                loss, weight = weighted_cross_entropy(logits, batch["targets"], weights)
                return loss / weight, token_metrics(logits, batch["targets"], weights)

            (_, metrics), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads), metrics

        return step

    return Program(initial(model, *batch(0).values()), build, batch)


def preference():
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290), beside a frozen model."""

    def chances(p, tokens):
        h = jnp.tanh(p["embed"][shifted(tokens)] @ p["a"])
        launcher.mark_pipeline_boundary()
        of_all = nn.log_softmax(h @ p["head"])
        each = jnp.take_along_axis(of_all, tokens[..., None], -1)[..., 0]
        return (each * (tokens > 0)).sum(-1)

    def init():
        shapes = {"embed": (VOCAB, WIDTH), "a": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
        params = filled({n: jax.ShapeDtypeStruct(s, np.float32) for n, s in shapes.items()})
        return params, jax.tree.map(lambda x: x * np.float32(0.9), params)

    def build(value_and_grad):
        def step(state, batch):
            trained, frozen = state
            before = [chances(frozen, batch[name]) for name in ("chosen", "rejected")]

            def loss_fn(params):
                after = [chances(params, batch[name]) for name in ("chosen", "rejected")]
                margin = 0.1 * ((after[0] - before[0]) - (after[1] - before[1]))
                return -nn.log_sigmoid(margin).mean(), {"right": (margin > 0).mean()}

            found, grads = value_and_grad(loss_fn, has_aux=True)(trained)
            trained = jax.tree.map(lambda p, g: p - 0.05 * g, trained, grads)
            return (trained, frozen), found

        return step

    def batch(k):
        return {"chosen": texts(k), "rejected": texts(k + 50)}

    return Program(init, build, batch)


PROGRAMS = {
    "lm1b": lm1b(),
    "wmt": wmt(),
    "preference": preference(),
}
test_equal_to_one_device_or_refused = table_test(PROGRAMS)
