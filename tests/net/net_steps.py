"""Small train steps by public names, one of them with its layers in one `lax.scan`, and methods."""

from __future__ import annotations

from typing import Any

import doors
import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, ROWS = 4, 8, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def chain_loss(params: Any, x: Any) -> Any:
    """Layer after layer, a boundary between any two; the first weight is also the last."""
    for i in range(LAYERS):
        if i:
            doors.boundary()
        x = jnp.tanh(x @ params[f"w{i}"] + params["b"][i])
    return ((x @ params["w0"].T) ** 2).mean()


def scanned_loss(params: Any, x: Any) -> Any:
    """The layers are stacked."""

    def layer(h: Any, p: Any) -> Any:
        return h + jnp.tanh(h @ p["w"] + p["b"]), None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def _zeros(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


LOSSES = {
    "chain": (
        chain_loss,
        {**{f"w{i}": _zeros(WIDTH, WIDTH) for i in range(LAYERS)}, "b": _zeros(LAYERS, WIDTH)},
    ),
    "scanned": (scanned_loss, {"w": _zeros(LAYERS, WIDTH, WIDTH), "b": _zeros(LAYERS, WIDTH)}),
}


def step_of(name: str) -> tuple[Any, Any]:
    """Return a train step and the shapes of its arguments."""
    loss, params = LOSSES[name]

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        value, grads = doors.value_and_grad(loss)(params, x)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    return step, ((params, jax.eval_shape(OPTIMIZER.init, params)), _zeros(ROWS, WIDTH))


def pipeline(stages: int, micro_batches: int, **how: Any) -> Any:
    """Return a pipeline of equal stages."""
    option = doors.UniformStageOption(stages)
    return doors.PipeshardParallel(micro_batches, stage_option=option, **how)


# name: (step, method, devices, hosts)
LISTS = {
    "gpipe": ("chain", pipeline(4, 4, schedule="gpipe"), 4, 1),
    "1f1b, remat": ("chain", pipeline(4, 8, schedule="1f1b", remat="full"), 4, 1),
    "interleaved on 2": ("chain", pipeline(4, 4, schedule="interleaved_1f1b"), 2, 1),
    "zero bubble": ("scanned", pipeline(2, 4, schedule="zero_bubble"), 2, 1),
    "eager 3d": ("chain", doors.ThreeDParallel(2, 2, 2, 4, schedule="eager_1f1b"), 8, 1),
    "servers": ("scanned", doors.ParameterServer(2, servers=2, bucket_bytes=256), 4, 2),
}
PROGRAMS = {
    "data": ("chain", doors.DataParallel(2, bucket_bytes=512), 4, 1),
    "zero2": ("chain", doors.Zero2Parallel(1), 4, 1),
    "zero3, scanned": ("scanned", doors.Zero3Parallel(2, remat="full"), 4, 1),
    "shard 2x2": ("chain", doors.ShardParallel(1, (2, 2)), 4, 1),
    "1f1b, scanned": ("scanned", pipeline(2, 4, schedule="1f1b"), 2, 1),
    "3d": ("chain", doors.ThreeDParallel(2, 2, 2, 2), 8, 1),
}
