"""What `test_engine` runs on the device, a process a part: `parts.py PART ARGUMENTS`.

Prints a line of JSON.
"""

import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import launcher
from launcher.config.compose import load
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel, PipeshardParallel, UniformStageOption
from launcher.runtime import PermuteTransport, PullTransport, compile_step
from launcher.runtime.transport import Parcel
from launcher.trace import trace_step
from recipes import build_model
from recipes.gpt_options import GPTOptions

ROUNDS = 12


def sized(name):
    """A GPT's options and its batch by the settings' own tables."""
    options = dataclasses.replace(load([f"model.size={name}"]).model, dropout=0.0)
    rows = 8 if name != "nano" else 4
    text = np.random.default_rng(0).integers(
        0, options.vocab_size, (rows, options.sequence_length + 1), dtype=np.int32
    )
    return options, {"tokens": text[:, :-1], "targets": text[:, 1:]}


def training(loss, init, value_and_grad):
    """A step with AdamW, and what makes its state."""
    optimizer = optax.adamw(1e-4)

    def step(state, batch):
        value, grads = value_and_grad(loss)(state[0], batch)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    def start(key):
        params = init(key)
        return params, optimizer.init(params)

    return step, start


def ours(loss, init, batch):
    """The step by our engine on one device, and its state."""
    step, start = training(loss, init, launcher.value_and_grad)
    traced = trace_step(step, (jax.eval_shape(start, jax.random.key(0)), batch))
    device = jax.devices()[0]
    plan = DataParallel().plan(traced, local_shape(1, 1, device.device_kind))
    executable = compile_step(traced, plan, [device])
    return executable, executable.create(start, jax.random.key(0))


def timed(calls, batch):
    """Milliseconds a step of each (call, state), by turns, and their losses."""
    times, values = [[] for _ in calls], [[] for _ in calls]
    states = [state for _, state in calls]
    for k in range(ROUNDS + 2):
        for n, (call, _) in enumerate(calls):
            start = time.perf_counter()
            states[n], loss = call(states[n], batch)
            jax.block_until_ready((states[n], loss))
            values[n].append(float(loss))
            if k >= 2:
                times[n].append(1e3 * (time.perf_counter() - start))
    return times, values


def memory():
    """Whether the state is donated, and the device's bytes after each step."""
    options = GPTOptions(
        vocab_size=256, hidden_size=256, num_layers=4, num_heads=4, sequence_length=128
    ).filled()
    model = build_model(options, "fp32")
    text = np.random.default_rng(0).integers(0, 256, (8, 129), dtype=np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    call, state = ours(lambda p, b: model.loss(p, b, None)[0], model.init, batch)
    used = []
    for _ in range(6):
        before = state
        state, loss = call(state, batch)
        jax.block_until_ready((state, loss))
        used.append((jax.devices()[0].memory_stats() or {}).get("bytes_in_use"))
    gone = all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    return {"donated": gone, "bytes": used}


def attention(kind):
    """A step whose attention is JAX's fused one, against the same without cuDNN."""
    rng, shape = np.random.default_rng(0), (4, 512, 8, 64)
    batch = rng.normal(size=(*shape[:2], 512)).astype(np.float32)

    def init(key):
        return jax.random.normal(key, (512, 3, 8, 64)) * 0.02

    def loss_by(implementation):
        def loss(params, x):
            made = jnp.einsum("bth,hpnd->pbtnd", x, params).astype(jnp.bfloat16)
            mixed = jax.nn.dot_product_attention(
                *made, is_causal=True, implementation=implementation
            )
            return jnp.mean((mixed.astype(jnp.float32) - 1) ** 2)

        return loss

    calls = [ours(loss_by(by), init, batch) for by in (kind, "xla")]
    times, (a, b) = timed(calls, batch)
    apart = max(abs(x - y) / y for x, y in zip(a, b, strict=True))
    return {"ours": statistics.median(times[0]), "xla": statistics.median(times[1]), "apart": apart}


def speed(size):
    """Our step against plain jit's, and the device's use."""
    options, batch = sized(size)
    model = build_model(options, "bf16")

    def loss(params, batch):
        return model.loss(params, batch, None)[0]

    step, start = training(loss, model.init, jax.value_and_grad)
    plain = jax.jit(step, donate_argnums=0), jax.jit(start)(jax.random.key(0))
    mine = ours(loss, model.init, batch)
    times, (a, b) = timed([mine, plain], batch)
    np.testing.assert_allclose(a, b, rtol=1e-2)
    ratio = statistics.median(x / y for x, y in zip(*times, strict=True))
    seconds = statistics.median(times[0]) / 1e3
    plan = mine[0].plan
    flops = plan.predicted_tflops_per_device * 1e12 * plan.predicted_step_seconds
    peak = plan.cluster.get("peak_flops")
    return {
        "ours": 1e3 * seconds,
        "ratio": ratio,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else None,
    }


def processes(transport, *gpus):
    """What the second of two processes says of `peer`, on a GPU each or both on the one named."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, __file__, "peer", str(i), where, transport, gpus[i % len(gpus)]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        told = [each.communicate(timeout=180) for each in both]
    except subprocess.TimeoutExpired:
        return {"problem": "no answer within three minutes"}
    finally:
        for each in both:
            each.kill()
    if any(each.returncode for each in both):
        return {"problem": " ".join(err.strip()[-200:] for _, err in told)}
    return {"problem": "", **json.loads(told[1][0].splitlines()[-1])}


def peer(index, where, way, gpu):
    """One of two: 64 MiB from the first to the second, twice, the second time timed; then the
    losses of a pipeline of two stages, beside those of one process."""
    from jax._src import distributed

    index = int(index)
    device_ids = [int(gpu)] if jax.config.jax_platforms != "cpu" else None
    jax.distributed.initialize(where, 2, index, local_device_ids=device_ids)
    store = distributed.global_state.client
    if way == "collective":
        transport = PermuteTransport()
    else:
        transport = PullTransport()
        store.key_value_set(f"at_{index}", transport.address)
        transport.connect([store.blocking_key_value_get(f"at_{i}", 60_000) for i in range(2)])
    taken = handed_over(transport, store, is_first=index == 0)
    return {"ms": taken, "losses": pipeline(transport), "alone": alone()}


def handed_over(transport, store, is_first):
    """Milliseconds of 64 MiB from the first to the second."""
    first, second = jax.devices()
    array = jax.device_put(np.ones((16, 1 << 20), np.float32), jax.local_devices()[0])
    exchange = transport.bind([Parcel(first, second, array.shape, array.dtype)])
    transport.open([exchange], "")
    for turn in range(2):
        key = transport.reserve(1)
        store.wait_at_barrier(f"begin_{turn}", 60_000)
        start = time.perf_counter()
        arrived = exchange(key, {0: array} if is_first else {})
        jax.block_until_ready(arrived)
        if not is_first:
            assert float(arrived[0].sum()) == array.size
        taken = 1e3 * (time.perf_counter() - start)
    return taken


def small():
    """A step and what makes its state, a batch, and the traced step."""
    options = GPTOptions(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=2, sequence_length=32
    ).filled()
    model = build_model(options, "fp32")
    text = np.random.default_rng(0).integers(0, 256, (4, 33), dtype=np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    step, start = training(
        lambda p, b: model.loss(p, b, None)[0], model.init, launcher.value_and_grad
    )
    return start, batch, trace_step(step, (jax.eval_shape(start, jax.random.key(0)), batch))


def trained(executable, start, batch):
    """The losses of a few steps that this process knows."""
    state, found = executable.create(start, jax.random.key(0)), []
    for _ in range(4):
        state, loss = executable(state, batch)
        found += [float(shard.data) for shard in loss.addressable_shards[:1]]
    jax.block_until_ready([x for x in jax.tree.leaves(state) if x.addressable_shards])
    return found


def pipeline(transport):
    """The losses of two stages, one in each process."""
    start, batch, traced = small()
    kind = jax.devices()[0].device_kind
    method = PipeshardParallel(2, stage_option=UniformStageOption(2))
    plan = method.plan(traced, local_shape(2, 2, kind))
    return trained(compile_step(traced, plan, jax.devices(), transport), start, batch)


def alone():
    """The same on this process's device alone."""
    start, batch, traced = small()
    device = jax.local_devices()[0]
    plan = DataParallel().plan(traced, local_shape(1, 1, device.device_kind))
    return trained(compile_step(traced, plan, [device]), start, batch)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
