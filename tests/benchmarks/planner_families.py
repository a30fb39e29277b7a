"""Our plans for mixtures of experts and wide residual networks, on the cluster of the Alpa paper.

    python tests/benchmarks/planner_families.py [most GPUs]

Weak scaling on V100-16GB of p3.16xlarge (Zheng et al. 2022, arXiv 2201.12023, section 8.1 and its
tables 6 to 8): the models' shapes, batches and precisions are the paper's. For each are printed the
predicted throughput of the plan that the search finds, of the best one stage on all devices, of the
best pipeline of single devices, and of plain data parallelism with everything cut (ZeRO-3).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from planner_published import cluster_of, fits, restricted

import launcher
from launcher.plan import Plan, describe_plan
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.methods import Zero3Parallel
from launcher.trace import TracedStep, trace_step

SUSTAINED = 0.4  # of the datasheet's peak; any: only plans of one model are compared
SEQUENCE, VOCABULARY = 1024, 32000
Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A network as shapes: its parameters, a batch, and its loss on rows of one."""

    params: Params
    batch: Params
    loss: Callable[[Params, Params], Any]


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normed(h: Any) -> Any:
    wide = h.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return wide.astype(h.dtype)


# -- a transformer in which every other MLP is a mixture of experts ------------------------------


def mixture(hidden: int, layers: int, experts: int) -> Model:
    """The GShard network, its tokens routed in groups to two experts each, by einsum."""
    inner = 8 * hidden
    blocks = []
    for k in range(layers):
        block = {"qkv": zeros(hidden, 3 * hidden), "out": zeros(hidden, hidden)}
        lead = (experts,) if k % 2 else ()
        block |= {"up": zeros(*lead, hidden, inner), "down": zeros(*lead, inner, hidden)}
        blocks.append(block | ({"gate": zeros(hidden, experts)} if k % 2 else {}))
    tokens = zeros(1024, SEQUENCE, dtype=jnp.int32)
    params = {"embed": zeros(VOCABULARY, hidden), "blocks": blocks}

    def loss(params: Params, batch: Params) -> Any:
        h = params["embed"][batch["tokens"]]
        for k, block in enumerate(params["blocks"]):
            if k:
                launcher.mark_pipeline_boundary()
            h = h + attention(block, normed(h))
            h = h + (experts_of(block, normed(h)) if "gate" in block else dense(block, normed(h)))
        logits = (normed(h) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return Model(params, {"tokens": tokens, "targets": tokens}, loss)


def attention(block: Params, h: Any, heads: int = 16) -> Any:
    rows, length, width = h.shape
    qkv = (h @ block["qkv"]).reshape(rows, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(scores).astype(h.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width) @ block["out"]


def dense(block: Params, h: Any) -> Any:
    return jax.nn.gelu(h @ block["up"]) @ block["down"]


def experts_of(block: Params, h: Any) -> Any:
    """Each row is a group; an expert takes twice its share of the tokens at most."""
    experts = block["gate"].shape[1]
    room = 2 * h.shape[1] // experts
    gates = jax.nn.softmax((h @ block["gate"]).astype(jnp.float32))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    place = jnp.cumsum(chosen, 1) * chosen
    combine = (gates * chosen)[..., None] * jax.nn.one_hot(place.astype(jnp.int32), room)
    combine = combine.astype(h.dtype)
    sent = (combine != 0).astype(h.dtype)
    taken = jnp.einsum("gsec,gsm->gecm", sent, h)
    inner = jax.nn.gelu(jnp.einsum("gecm,emf->gecf", taken, block["up"]))
    made = jnp.einsum("gecf,efm->gecm", inner, block["down"])
    return jnp.einsum("gsec,gecm->gsm", combine, made)


# -- a residual network of bottlenecks ------------------------------------------------------------


def residual(depth: int, channels: int, width: int) -> Model:
    """Of 224 × 224 pixels in 32 bits; normalised over channels, since rows do not mix here."""
    single = functools.partial(zeros, dtype=jnp.float32)
    blocks, before = [], channels
    for stage, count in enumerate({50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]):
        inner = channels * 2**stage
        after = inner * 4 * width
        for k in range(count):
            block = {
                "into": single(1, 1, before, inner),
                "across": single(3, 3, inner, inner),
                "out": single(1, 1, inner, after),
            }
            if before != after:
                block["beside"] = single(1, 1, before, after)
            blocks.append((block, 2 if stage and not k else 1))
            before = after
    params = {
        "stem": single(7, 7, 3, channels),
        "blocks": [block for block, _ in blocks],
        "head": single(before, 1024),
    }
    strides = [stride for _, stride in blocks]
    batch = {"x": single(1536, 224, 224, 3), "y": zeros(1536, dtype=jnp.int32)}

    def loss(params: Params, batch: Params) -> Any:
        h = jax.nn.relu(normed(conv(batch["x"], params["stem"], 4)))
        for k, (block, stride) in enumerate(zip(params["blocks"], strides, strict=True)):
            if k:
                launcher.mark_pipeline_boundary()
            inner = jax.nn.relu(normed(conv(h, block["into"])))
            inner = jax.nn.relu(normed(conv(inner, block["across"], stride)))
            beside = conv(h, block["beside"], stride) if "beside" in block else h
            h = jax.nn.relu(normed(conv(inner, block["out"])) + beside)
        logits = h.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return Model(params, batch, loss)


def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# -- plans ----------------------------------------------------------------------------------------

# By GPUs: (hidden, layers, experts), and (depth, channels, width).
MIXTURES = {
    1: (768, 8, 8),
    2: (768, 8, 16),
    4: (768, 16, 16),
    8: (1024, 16, 16),
    16: (1536, 16, 32),
    32: (2048, 16, 48),
}
RESIDUALS = {
    1: (50, 160, 2),
    2: (50, 224, 2),
    4: (50, 320, 2),
    8: (50, 448, 2),
    16: (50, 640, 2),
    32: (50, 320, 16),
}


def traced(model: Model) -> TracedStep:
    """Its train step, with Adam."""
    optimizer = optax.adam(1e-4)

    def step(state: Any, batch: Any) -> Any:
        params, kept = state
        value, grads = launcher.value_and_grad(model.loss)(params, batch)
        updates, kept = optimizer.update(grads, kept, params)
        return (optax.apply_updates(params, updates), kept), value

    kept = jax.eval_shape(optimizer.init, model.params)
    return trace_step(step, ((model.params, kept), model.batch))


def plans(model: Model, gpus: int) -> dict[str, Plan | None]:
    """The plan that is found, and those that have only one kind of parallelism."""
    step, cluster = traced(model), cluster_of(gpus, SUSTAINED)
    return {
        "auto": search(step, cluster, Constraints())[0][0],
        "intra": restricted(step, cluster, intra=True),
        "inter": restricted(step, cluster, intra=False),
        "zero3": Zero3Parallel(step.batch_size // (2 * gpus)).plan(step, cluster),
    }


def main(most: int = 16) -> None:
    print("gpus  model              auto   intra   inter   zero3  samples/s   TFLOPS a GPU")
    for make, sizes in ((mixture, MIXTURES), (residual, RESIDUALS)):
        for gpus, shape in sizes.items():
            if gpus > most:
                break
            found = plans(make(*shape), gpus)
            speeds = [
                f"{p.predicted_samples_per_second:.1f}{'' if fits(p) else '*'}" if p else "-"
                for p in found.values()
            ]
            auto = found["auto"]
            assert auto is not None
            print(
                f"{gpus:4}  {make.__name__} {auto.num_parameters / 1e9:5.2f} B"
                f"{''.join(f'{speed:>8}' for speed in speeds)}"
                f"   {auto.predicted_tflops_per_device_with_remat:10.1f}   {describe_plan(auto)}",
                flush=True,
            )
    print("* does not fit")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
