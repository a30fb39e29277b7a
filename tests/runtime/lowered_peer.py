"""Print the text of each program of some plans as this process lowers it, given a seed.

A set's order follows from what its elements hash to: strings by `PYTHONHASHSEED`, most else by
their addresses, which here follow from the seed, too.
"""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import scanned

import launcher
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel, Zero2Parallel, Zero3Parallel
from launcher.runtime.emit.emit import emit
from launcher.runtime.programs.compile import Compilation
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.trace import trace_step

WIDTH = 8
EACH = WIDTH * WIDTH * 4  # bytes of a matrix


def branched(params, batch):
    """A step whose backward pass goes on from several cotangents at once."""

    def loss(params):
        a = b = c = batch
        for w in params:
            a, b, c = jnp.tanh((a + b) @ w), jnp.sin((b * c) @ w), jnp.cos((c - a) @ w)
        return (a * b * c).mean()

    value, grads = launcher.value_and_grad(loss)(params)
    return jax.tree.map(jnp.subtract, params, grads), value


STATE = jax.eval_shape(scanned.init, jax.random.key(0))
STEPS = {
    "branched": (branched, ([jnp.ones((WIDTH, WIDTH))] * 4, jnp.ones((16, WIDTH)))),
    "scanned": (scanned.step, (STATE, scanned.BATCHES[0])),
}
PLANS = [
    ("branched", DataParallel(remat="full", bucket_bytes=EACH)),
    ("branched", Zero2Parallel(2, bucket_bytes=EACH)),
    ("scanned", DataParallel(2, remat="full", bucket_bytes=EACH)),
    ("scanned", Zero3Parallel()),
]


def texts(traced, method):
    plan = method.plan(traced, local_shape(4, 1, "cpu"))
    emitted = emit(traced.planned_as(plan.fingerprint).cut_at(plan.layer_ends), plan)
    placement = place_on_devices(plan, jax.devices(), emitted.slots)
    with ThreadPoolExecutor(1) as pool:
        made = Compilation(emitted, placement, pool, lambda one: one.whole.as_text()).by_names
    return {" ".join(names): future.result() for names, future in made.items()}


def scattered(seed):
    """What leaves free memory of each small size behind, in an order of the seed's."""
    held = [(None,) * (n % 24) + (n,) for n in range(100_000)]
    random.Random(seed).shuffle(held)
    return held[::2]


held = scattered(int(sys.argv[1]))
print(json.dumps({f"{name}, {how}": texts(trace_step(*STEPS[name]), how) for name, how in PLANS}))
