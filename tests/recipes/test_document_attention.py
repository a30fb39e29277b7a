"""Attention within documents and windows: each way of computing it is the plain one."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import launcher
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.plan import local_shape
from launcher.recipes.models.document_attention import (
    attend_since,
    first_seen,
    fused_backward,
    fused_forward,
)
from launcher.runtime import compile_step
from launcher.runtime.programs.partial_sums import emitted_locally
from launcher.trace import OWN_KERNELS, backward_share, factors, flops, make_jaxpr, trace_step, walk

LENGTH = 200
DOCUMENTS = (70, 1, 129)
WAYS = "loop", "kernel"


def places():
    return jnp.concatenate([jnp.arange(n) for n in DOCUMENTS])[None]


def operands(heads=4, kv_heads=2, size=24, rows=2):
    def normal(seed, count):
        return jax.random.normal(jax.random.key(seed), (rows, LENGTH, count, size))

    return normal(0, heads), normal(1, kv_heads), normal(2, kv_heads)


def plain(query, key, value, first):
    at = jnp.arange(LENGTH)
    seen = (at <= at[:, None]) & (at >= first[:, :, None])
    return jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])


@pytest.fixture
def attend(way, monkeypatch):
    """Attention by the loop, or by the kernels in Pallas' interpreter."""
    if way == "loop":
        return functools.partial(attend_since, is_fused=False)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))

    @jax.custom_vjp
    def attend(*given):
        return fused_forward(*given)[0]

    def forward(*given):
        out, sums = fused_forward(*given)
        return out, (*given, sums, out)

    def backward(kept, slope):
        *given, out = kept
        delta = jnp.swapaxes((slope * out).sum(-1), 1, 2)
        return *fused_backward(*given, delta, slope), None

    attend.defvjp(forward, backward)
    return attend


def with_gradients(attend, given, first, weights):
    def loss(*given):
        out = attend(*given, first)
        return jnp.sum(jnp.where(weights == 0, 0, out * weights)), out

    (_, out), slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)
    return jax.tree.map(np.asarray, (out, *slopes))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_plain_one_and_so_are_its_gradients(attend, heads, window):
    given = operands(*heads)
    first = jnp.broadcast_to(first_seen(places(), window), (2, LENGTH))
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(f, given, first, weights) for f in (attend, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_reaches_another_document(attend, poison):
    """Of the others neither results nor gradients change; its own results are no numbers."""
    given = operands(rows=1)
    first, sick = first_seen(places()), slice(DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1])
    poisoned = [x.at[:, sick].set(poison) for x in given]
    weights = jnp.cos(jnp.arange(given[0].size)).reshape(given[0].shape)
    got, want = (with_gradients(attend, x, first, weights) for x in (poisoned, given))
    for a, b in zip(got, want, strict=True):
        assert not np.isfinite(a[:, sick]).any()
        np.testing.assert_array_equal(np.delete(a, sick, 1), np.delete(b, sick, 1))


def kernels_of(jaxpr):
    return [e for e in walk(jaxpr.eqns) if e.primitive.name in OWN_KERNELS]


def gradients(is_fused):
    """Attention's gradients, a program for the planner."""

    def of(first, *given):
        out, pullback = jax.vjp(lambda *x: attend_since(*x, first, is_fused), *given)
        return out, pullback(out)

    return make_jaxpr(of, first_seen(places()).repeat(2, 0), *operands(4, 2, 16))


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_planner_cuts_examples_and_heads_and_prices_pairs(is_fused):
    forward, backward = kernels_of(gradients(is_fused))
    pairs = LENGTH**2 / (2 if is_fused else 1)
    assert flops(forward) == 2 * 2 * 2 * 4 * 16 * pairs
    assert flops(backward) == backward_share(forward) * flops(forward)
    for eqn in (forward, backward):
        for factor, lengths in zip(factors(eqn), ({2}, {4, 2}), strict=True):
            cut = [eqn.invars[i].aval.shape[d] for i, d in factor.operands]
            cut += [eqn.outvars[i].aval.shape[d] for i, d in factor.results]
            assert set(cut) == lengths


@pytest.mark.parametrize("differentiates", [False, True])
def test_each_device_calls_it_for_its_own_part(differentiates):
    def alone(first, *given):
        return (attend_since(*given, first, True),)

    first = first_seen(places()).repeat(2, 0)
    closed = gradients(True) if differentiates else make_jaxpr(alone, first, *operands(4, 2, 16))
    sharding = Sharding(NamedDims(closed.eqns), {"data": 2, "model": 2})
    sharding.seed(closed.invars[1], ("data", None, "model", None))
    emitted = emitted_locally(closed, sharding, 1)
    outside = walk(emitted.eqns, lambda e: e.primitive.name != "shard_map")
    assert not [e for e in outside if e.primitive.name in OWN_KERNELS]
    found = kernels_of(emitted)
    assert len(found) == 1 + differentiates
    assert {e.invars[0].aval.shape for e in found} == {(1, LENGTH, 2, 16)}


@pytest.mark.devices(4)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "method",
    [
        launcher.ThreeDParallel(2, 2, 1),
        launcher.PipeshardParallel(num_micro_batches=2),
        launcher.DataParallel(num_micro_batches=2),
    ],
    ids=["tensor", "pipeline", "data"],
)
def test_plans_of_it_train_as_one_device(method):
    def layer(weights, x, positions):
        query, key, value = (
            jnp.einsum("bth,hnd->btnd", x, w.reshape(16, 4, 4)) for w in weights[:3]
        )
        out = attend_since(query, key, value, first_seen(positions), True)
        return x + out.reshape(x.shape) @ weights[3]

    def loss(params, batch):
        x, positions = batch
        x = layer(params[0], x, positions)
        launcher.mark_pipeline_boundary()
        return (layer(params[1], x, positions) ** 2).mean()

    def step(params, batch):
        value, grads = launcher.value_and_grad(loss)(params, batch)
        return params - 0.1 * grads, value

    params = jax.random.normal(jax.random.key(3), (2, 4, 16, 16)) / 4
    x = jax.random.normal(jax.random.key(4), (8, 24, 16))
    given = params, (x, jnp.broadcast_to(jnp.arange(24) % 10, (8, 24)))
    want = jax.jit(step)(*given)
    traced = trace_step(step, given)
    plan = method.plan(traced, local_shape(4, 1, "cpu"))
    assert any("a kernel that skips other documents" in note for note in plan.notes)
    compiled = compile_step(traced, plan, jax.devices())
    got = compiled(compiled.create(lambda: params), given[1])
    for a, b in zip(jax.device_get(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {core} threads_per_core_limit: 2048 core_count: {count} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 84942979072 shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {major} minor: 0 }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
GPUS = {
    "h100": {"name": "NVIDIA H100 80GB HBM3", "major": 9, "count": 132, "core": 233472}
    | {"block": 232448},
    "a100": {"name": "NVIDIA A100-SXM4-80GB", "major": 8, "count": 108, "core": 167936}
    | {"block": 166912},
}


@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize(("is_fused", "most"), [(True, 3), (False, 800)])
@pytest.mark.parametrize("gpu", GPUS)
def test_gpus_hold_no_array_of_pairs(gpu, is_fused, most, monkeypatch):
    """Of a row of 8,192 tokens, 32 heads and 8 of keys, by the GPU's own compiler."""
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("needs XLA's compiler for GPUs: jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    described = topologies.get_topology_desc(
        "gpu", "cuda", target_config=TARGET.format(**GPUS[gpu]), topology="1x1x1"
    )
    here = SingleDeviceSharding(described.devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def both(positions, slope, *given):
        first = first_seen(positions)
        out, pullback = jax.vjp(lambda *x: attend_since(*x, first, is_fused), *given)
        return out, pullback(slope)

    queries, keys = array(1, 8192, 32, 128), array(1, 8192, 8, 128)
    positions = array(1, 8192, dtype=jnp.int32)
    lowered = jax.jit(both).lower(positions, queries, queries, keys, keys)
    compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    shapes = re.findall(r"\w\[([\d,]+)\]", re.sub("backend_config=.*", "", compiled.as_text()))
    assert max(shape.split(",").count("8192") for shape in shapes) == 1
    assert compiled.memory_analysis().temp_size_in_bytes <= most * 2**20
