"""What a step may do beyond a mean loss: keys, every way of combining, shared and fixed results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import BatchError

PARTS = 4
W = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
METHODS = {
    "stages": launcher.PipeshardParallel(
        num_micro_batches=PARTS, stage_option=launcher.UniformStageOption(2)
    ),
    "replicas": launcher.DataParallel(num_micro_batches=PARTS // 2),
}
WHOLE = {"whole": launcher.PipeshardParallel(stage_option=launcher.UniformStageOption(2))}


def parallel(step, name, donate_argnums=(0,)):
    return launcher.parallelize(
        step,
        method=(METHODS | WHOLE)[name],
        devices=jax.devices()[:2],
        donate_argnums=donate_argnums,
    )


@pytest.mark.parametrize("name", METHODS)
def test_results_are_combined_as_they_say(name):
    words = {"mean": "mean", "sum": "sum", "last": "last", "rows": "concat", "noise": "concat"}

    def of(w, key, x, scale):
        noise = jax.random.normal(key, (x.shape[0],))
        launcher.mark_pipeline_boundary()
        y = x @ w * scale
        out = {"mean": y.mean(), "sum": y.sum(), "last": y[-1, 0], "rows": y, "noise": noise}
        return (y**2).mean(), out

    def step(state, x):
        found, grads = launcher.value_and_grad(of, has_aux=True, reduce=("mean", words))(
            state["w"], state["key"], x, 0.5
        )
        return {"w": state["w"] - grads, "key": state["key"]}, found

    key = jax.random.key(3)
    new, (loss, out) = parallel(step, name)({"w": W, "key": key}, X)
    y = X @ W * 0.5
    np.testing.assert_allclose(loss, (y**2).mean(), rtol=1e-5)
    for word, want in (("mean", y.mean()), ("sum", y.sum()), ("last", y[-1, 0]), ("rows", y)):
        np.testing.assert_allclose(out[word], want, rtol=1e-5)
    np.testing.assert_allclose(out["noise"], jax.random.normal(key, (len(X),)), rtol=1e-6)
    want = W - jax.grad(lambda w: ((X @ w * 0.5) ** 2).mean())(W)
    np.testing.assert_allclose(new["w"], want, rtol=1e-5)


def noise(key, rows):
    return jax.random.normal(key, (rows, 2))


def looped(keys, rows):
    return jax.lax.scan(lambda c, k: (c + noise(k, rows), None), jnp.zeros((rows, 2)), keys)[0]


def branched(key, rows):
    return jax.lax.cond(key[0] < 1, lambda k: noise(k, rows), lambda k: -noise(k, rows), key)


KEYS = {  # the raw key an argument holds, and what one slice draws from its own for its rows
    "stacked and tiled": (
        jax.random.PRNGKey(3),
        lambda key, rows: noise(jnp.tile(jnp.stack([key, key]), (2, 1))[3], rows),
    ),
    "in a loop": (jax.random.split(jax.random.PRNGKey(3), 2), looped),
    "in a branch": (jax.random.PRNGKey(3), branched),
    "other generator": (
        jax.random.PRNGKey(3, impl="rbg"),
        lambda key, rows: noise(_rbg(key), rows),
    ),
}


def _rbg(raw):
    return jax.random.wrap_key_data(raw, impl="rbg")


@pytest.mark.parametrize("kind", KEYS)
def test_every_slice_draws_what_one_device_draws_for_its_rows(kind):
    """Typed keys, and raw ones that are drawn from at once, are in `programs`."""
    key, draw = KEYS[kind]

    def of(w, key, x):
        launcher.mark_pipeline_boundary()
        return (x @ w).mean(), draw(key, x.shape[0])

    def step(state, x):
        reduce = ("mean", "concat")
        (_, drawn), grads = launcher.value_and_grad(of, has_aux=True, reduce=reduce)(
            state["w"], state["key"], x
        )
        return {"w": state["w"] - grads, "key": state["key"]}, drawn

    _, drawn = parallel(step, "stages", donate_argnums=())({"w": W, "key": key}, X)
    want = draw(key, len(X))
    if kind == "other generator":  # whose numbers are no function of their places
        folded = [jax.random.fold_in(_rbg(key), i) for i in range(PARTS)]
        own = [draw(jax.random.key_data(key), len(X) // PARTS) for key in folded]
        want = np.concatenate(own)
    np.testing.assert_allclose(drawn, want, rtol=1e-6)


def test_the_only_slice_has_the_key_itself():
    def of(w, key, x):
        launcher.mark_pipeline_boundary()
        return (x @ w).mean() + jax.random.normal(key)

    def step(state, x):
        return state, launcher.value_and_grad(of)(state["w"], state["key"], x)[0]

    state = {"w": W, "key": jax.random.PRNGKey(3)}
    _, loss = parallel(step, "whole", donate_argnums=())(state, X)
    np.testing.assert_allclose(loss, of(W, state["key"], X), rtol=1e-6)


def test_integers_that_no_generator_takes_are_no_keys():
    def of(w, numbers, x):
        return (x @ w).mean() * numbers.sum()

    def step(w, x, numbers):
        return w, launcher.value_and_grad(of)(w, numbers, x)[0]

    numbers = np.array([1, 2], np.uint32)
    _, loss = parallel(step, "replicas")(W, X, numbers)
    np.testing.assert_allclose(loss, (X @ W).mean() * 3, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_inputs_made_of_the_batch_keep_their_rows(name):
    """The loss sees, of each, the rows of its own slice: reordered ones would pair with others."""

    def of(w, x, by_row, columns, noise):
        launcher.mark_pipeline_boundary()
        y = (x @ w).sum(1) * by_row * columns.sum(0) + noise
        return (y**2).mean()

    def step(w, x):
        by_row = jnp.exp(x[:, 0] - x.mean())
        noise = jax.random.normal(jax.random.key(1), by_row.shape)
        loss, grads = launcher.value_and_grad(of)(w, x, by_row, x.T * 2, noise)
        return w - grads, loss

    got = parallel(step, name, donate_argnums=())(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, jax.jit(step)(W, X))


@pytest.mark.parametrize("name", METHODS)
def test_every_result_is_an_array_of_its_own(name):
    captured = np.ones(4, np.float32)

    def of(w, x):
        launcher.mark_pipeline_boundary()
        return ((x @ w) ** 2).mean()

    def step(state, x, extra):
        loss, grads = launcher.value_and_grad(of)(state["w"], x)
        n = state["n"] + 1
        w = state["w"] - grads
        old = state["old"] * 0 + state["twin"] * 0
        new = {
            "w": w,
            "twin": w,
            "old": old,
            "n": n,
            "zero": 0.0,
            "fixed": captured + 0,
            "captured": jnp.asarray(captured),
            "extra": extra,
        }
        return new, {"loss": loss, "n": n, "twice": x * 2}

    state = {
        "w": W,
        "twin": W.copy(),
        "old": W.copy(),
        "n": jnp.int32(0),
        "zero": jnp.zeros(()),
        "fixed": jnp.ones(4),
        "captured": jnp.ones(4),
        "extra": jnp.ones(3),
    }
    run = parallel(step, name)
    x, extra = jax.device_put(X, jax.devices()[0]), jnp.ones(3)
    said = []
    for _ in range(3):
        state, metrics = run(state, x, extra)
        said.append(metrics)
    assert [int(m["n"]) for m in said] == [1, 2, 3]
    assert not x.is_deleted()
    assert not extra.is_deleted()
    np.testing.assert_array_equal(said[0]["twice"], X * 2)
    np.testing.assert_array_equal(state["twin"], state["w"])


@pytest.mark.parametrize(
    ("of", "reduce", "argnums", "words"),
    [
        (lambda w, x: ((x @ w).sum(), (x @ w > 0).sum()), ("sum", "mean"), 0, 'say "sum"'),
        (lambda w, x: ((x @ w).sum(), x.sum()), "infer", (0, 1), "with respect to the batch"),
    ],
)
def test_what_has_no_meaning_for_microbatches_is_refused(of, reduce, argnums, words):
    def step(w, x):
        return w, launcher.value_and_grad(of, argnums, has_aux=True, reduce=reduce)(w, x)[0]

    with pytest.raises(BatchError, match=words):
        launcher.parallelize(step, method=launcher.DataParallel(2), devices=jax.devices()[:1])(W, X)
