"""Fused attention without cuDNN: what it is on CPUs, and what a planner reads off it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launcher
from launcher.plan import local_shape
from launcher.runtime import compile_step
from launcher.trace import trace_step
from launcher.trace.ir.cost import backward_share, flops
from launcher.trace.ir.cudnn import described_cudnn
from launcher.trace.ir.factors import factors
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr

BATCH, LENGTH, HEADS, SIZE = 4, 16, 4, 8
MASKS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0)},
    "lengths": {"key_value_seq_lengths": jnp.array([16, 3, 9, 1], jnp.int32)},
}


def attention(implementation, **masks):
    def attend(query, key, value, bias=None):
        return jax.nn.dot_product_attention(
            query, key, value, bias, implementation=implementation, **masks
        )

    return attend


def operands(kv_heads=HEADS):
    def normal(seed, heads):
        shape = BATCH, LENGTH, heads, SIZE
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    return [normal(0, HEADS), normal(1, kv_heads), normal(2, kv_heads)]


def with_gradient(attend, given):
    """Values and gradients, computed while cuDNN is taken to be there."""

    def loss(*given):
        out = attend(*given).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    with described_cudnn():
        (_, out), grads = jax.jit(jax.value_and_grad(loss, tuple(range(len(given))), has_aux=True))(
            *given
        )
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (out, grads))


def equation(attend, *given):
    """The fused kernel's equation in the forward pass."""
    with described_cudnn():
        closed = inline_calls(make_jaxpr(attend, *given))
    (call,) = [e for e in closed.eqns if e.primitive.name == "custom_vjp_call"]
    (found,) = call.params["call_jaxpr"].eqns
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mask", "kv_heads"), [("all", 1), ("causal", HEADS), ("window", 2), ("lengths", HEADS)]
)
def test_on_cpus_it_is_xlas_and_so_is_its_gradient(mask, kv_heads):
    given, masks = operands(kv_heads), MASKS[mask]
    got, want = (with_gradient(attention(i, **masks), given) for i in ("cudnn", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_a_bias_is_added_and_gets_its_gradient():
    given = [*operands(), jnp.ones((BATCH, HEADS, LENGTH, LENGTH), jnp.bfloat16) * 0.5]
    got, want = (with_gradient(attention(i), given) for i in ("cudnn", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_without_our_word_jax_asks_for_cudnn():
    """What is described is described while a step is traced, and not afterwards."""
    with described_cudnn():
        jax.eval_shape(attention("cudnn"), *operands())
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(attention("cudnn"), *operands())


def test_it_is_counted_by_the_pairs_that_it_computes_with():
    whole = 4 * BATCH * HEADS * SIZE * LENGTH**2
    counted = {m: flops(equation(attention("cudnn", **MASKS[m]), *operands())) for m in MASKS}
    assert counted["all"] == counted["lengths"] == whole
    assert counted["causal"] == whole / 2
    pairs = sum(min(i + 1, 4) for i in range(LENGTH))
    assert counted["window"] == pytest.approx(whole * pairs / LENGTH**2, rel=0.05)
    assert backward_share(equation(attention("cudnn"), *operands())) == 2.5


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_examples_and_heads_can_be_cut(kv_heads):
    eqn = equation(attention("cudnn"), *operands(kv_heads))
    examples, heads = factors(eqn)
    assert examples.operands == ((0, 0), (1, 0), (2, 0))
    assert heads.operands == ((0, 2), (1, 2), (2, 2))
    assert (examples.results, heads.results) == (((0, 0),), ((0, 2),))


def model(implementation):
    """Two layers of attention with products before and after."""
    width = HEADS * SIZE

    def layer(weights, x):
        heads = [(x @ w).reshape(*x.shape[:2], HEADS, SIZE) for w in weights[:3]]
        out = attention(implementation, is_causal=True)(*heads)
        return x + out.reshape(x.shape) @ weights[3]

    def loss(params, x):
        first, second = params
        x = layer(first.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
        launcher.mark_pipeline_boundary()
        return (layer(second.astype(jnp.bfloat16), x).astype(jnp.float32) ** 2).mean()

    def step(params, x):
        value, grads = launcher.value_and_grad(loss)(params, x)
        return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), value

    params = jax.random.normal(jax.random.key(3), (2, 4, width, width)) / width**0.5
    return step, params, jax.random.normal(jax.random.key(4), (8, LENGTH, width))


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "method",
    [
        launcher.PipeshardParallel(num_micro_batches=2),
        pytest.param(launcher.ThreeDParallel(1, 2, 2, num_micro_batches=2), marks=pytest.mark.slow),
        pytest.param(launcher.Zero3Parallel(), marks=pytest.mark.stress),
    ],
    ids=["pipeline", "tensor", "zero3"],
)
def test_plans_of_it_train_as_one_device_with_xlas(method):
    def trained(implementation, method):
        step, params, x = model(implementation)
        traced = trace_step(step, (params, x))
        compiled = compile_step(
            traced, method.plan(traced, local_shape(4, 1, "cpu")), jax.devices()
        )
        return jax.device_get(compiled(compiled.create(lambda: params), x))

    step, params, x = model("xla")
    want = jax.jit(step)(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3),
        trained("cudnn", method),
        jax.device_get(want),
    )


def test_the_planner_holds_no_array_of_pairs():
    """Twice the length takes twice the memory, and of XLA's four times."""

    def peak(implementation, length):
        def loss(w, x):
            heads = (x @ w).reshape(*x.shape[:2], HEADS, SIZE)
            out = attention(implementation, is_causal=True)(heads, heads, heads)
            return (out.astype(jnp.float32) ** 2).mean()

        def step(w, x):
            value, grad = launcher.value_and_grad(loss)(w, x)
            return w - grad, value

        width = HEADS * SIZE
        shapes = [(width, width), (1, length, width)]
        traced = trace_step(step, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
        method = launcher.DataParallel()
        return (
            method.plan(traced, local_shape(1, 1, "NVIDIA H100 80GB HBM3")).stages[0].memory_bytes
        )

    def growth(implementation):  # of what is not there at any length
        short, double, fourfold = (peak(implementation, n) for n in (4096, 8192, 16384))
        return (fourfold - double) / (double - short)

    assert growth("cudnn") == pytest.approx(2, rel=0.1)
    assert growth("xla") == pytest.approx(4, rel=0.1)
