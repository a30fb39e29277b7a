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


def parallel(step, name, donate_argnums=(0,)):
    return launcher.parallelize(
        step, method=METHODS[name], devices=jax.devices()[:2], donate_argnums=donate_argnums
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
    folded = [jax.random.normal(jax.random.fold_in(key, i), (2,)) for i in range(PARTS)]
    np.testing.assert_allclose(out["noise"], np.concatenate(folded), rtol=1e-5)
    want = W - jax.grad(lambda w: ((X @ w * 0.5) ** 2).mean())(W)
    np.testing.assert_allclose(new["w"], want, rtol=1e-5)


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
        (lambda w, x: ((x @ w).sum(), (x > 0).sum()), "mean", 0, "is int32, whose mean"),
        (lambda w, x: ((x @ w).sum(), x.sum()), "mean", (0, 1), "with respect to the batch"),
    ],
)
def test_what_has_no_meaning_for_microbatches_is_refused(of, reduce, argnums, words):
    def step(w, x):
        return w, launcher.value_and_grad(of, argnums, has_aux=True, reduce=reduce)(w, x)[0]

    with pytest.raises(BatchError, match=words):
        launcher.parallelize(step, method=launcher.DataParallel(2), devices=jax.devices()[:1])(W, X)
