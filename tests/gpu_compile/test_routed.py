"""Experts without a capacity as XLA's compiler for GPUs has them: what they compute and hold."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from launcher.recipes.models.moe.routed import routed
from launcher.runtime.described import target_of

TOKENS, HIDDEN = 16_384, 2_048
CASES = {"8": (8, 2, 1_408), "128": (128, 8, 768)}  # experts, chosen, width
MOST = {"8": 560, "128": 1_601}  # MiB of temporaries
MOST_IN_TILES = {"8": 1_401, "128": 4_494}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.devices,
]


def compiled(gpu, case, is_fused):
    """The text and the MiB of temporaries of a gated layer in bf16 and all of its gradients."""
    experts, chosen, width = CASES[case]
    target = target_of(gpu, 1)
    here = SingleDeviceSharding(target.devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def layer(x, gates, gate, up, down, index):
        inner = jax.nn.silu(routed(x, index, gate, is_fused)) * routed(x, index, up, is_fused)
        return routed(inner * gates[..., None], index, down, is_fused)

    def both(slope, index, *given):
        out, pullback = jax.vjp(lambda *given: layer(*given, index), *given)
        return out, pullback(slope)

    x, into = array(4, TOKENS // 4, HIDDEN), array(experts, HIDDEN, width)
    index = array(4, TOKENS // 4, chosen, dtype=jnp.int32)
    gates, out = array(*index.shape), array(experts, width, HIDDEN)
    lowered = jax.jit(both).lower(x, index, x, gates, into, into, out)
    made = lowered.compile(dict(target.options))
    return made.as_text(), made.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpu", ["H100-SXM5-80GB", "A100-SXM4-80GB", "L40S-PCIe-48GB"])
def test_kernels_compute_at_most_a_tenth_more_than_is_sent(gpu, case):
    """Even if every expert's last tile has one row. The rows of a tile follow from their number."""
    experts, chosen, width = CASES[case]
    text, temporaries = compiled(gpu, case, True)
    assert temporaries <= MOST[case]
    assert not re.search(r" dot\(|cublas", text)
    grids = re.findall(r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+)", text)
    grids = [tuple(map(int, grid)) for grid in grids]
    assert len(grids) == 9
    places = TOKENS * chosen
    rows = next(r for r in (128, 64, 32, 16) if (places + experts * (r - 1)) // r == grids[0][1])
    routed_products = places * HIDDEN * width
    for x, y, z in grids:
        if z == experts:  # a weight gradient, of blocks of 128 x 128, over its rows
            computed = x * 128 * y * 128 * (places + experts * (rows - 1))
        else:
            depth = HIDDEN if x * 128 == width else width
            computed = x * 128 * depth * y * rows
        assert routed_products <= computed <= 1.10 * routed_products


@pytest.mark.parametrize("case", CASES)
def test_gathered_tiles_compute_little_more_where_no_kernel_is(case):
    chosen = CASES[case][1]
    text, temporaries = compiled("V100-SXM2-16GB", case, False)
    assert temporaries <= MOST_IN_TILES[case]
    assert "gpu.triton" not in text
    products = re.findall(r"= \(f32\[([\d,]+)\]\S*, s8.*cublas.*matmul", text)
    shapes = [tuple(map(int, shape.split(","))) for shape in products]
    batched = {shape[:2] for shape in shapes if len(shape) == 3}
    assert len(shapes) == 9
    ((number, rows),) = batched
    trips = sorted(map(int, re.findall(r'known_trip_count":{"n":"(\d+)"', text)))
    steps, tiles = trips[0], trips[-1]
    assert trips == [steps] * 6 + [tiles] * 3
    places = TOKENS * chosen
    assert places <= steps * number * rows <= 1.15 * places
    assert places <= tiles * rows <= 1.15 * places
