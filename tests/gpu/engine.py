"""Parts that drive the engine in one process, on one device."""

import dataclasses
import json
import os
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
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel, PipeshardParallel, UniformStageOption
from launcher.recipes import build_model
from launcher.recipes.models.gpt import GPTOptions
from launcher.runtime import PermuteTransport, PullTransport, compile_step
from launcher.runtime.transport.transport import Parcel
from launcher.trace import trace_step
from launcher.train.program import build_program

GPU = os.environ.get("GPU_TESTS_ON", "gpu") == "gpu"
QUIET = "train.eval_every=0", "report=none"


def device():
    return jax.devices()[0]


def capability():
    said = getattr(device(), "compute_capability", None)  # a CPU has none
    return said and float(said)


def run_of(*words):
    """Plan, compile and run a few steps on one device; return predictions and measurements."""
    config = load([*QUIET, *words], [])
    program = build_program(config, capability())
    shape = local_shape(1, 1, device().device_kind)
    plan = plan_of(config.parallel, program.train, shape)
    began = time.perf_counter()
    executable = compile_step(program.train.planned_as(plan.fingerprint), plan, [device()])
    compiled = time.perf_counter() - began
    state, times = executable.create(program.init, program.seed), []
    batch = program.dataset.train(0)
    for _ in range(8 if GPU else 3):
        began = time.perf_counter()
        state, metrics = executable(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    used = (device().memory_stats() or {}).get("peak_bytes_in_use")
    said = max(stage.memory_bytes for stage in plan.stages)
    return {
        "words": words,
        "loss": float(jax.tree.leaves(metrics)[0]),
        "memory_predicted": said,
        "memory_of_programs": executable.peak_bytes,
        "memory_measured": used,
        "step_predicted": plan.predicted_step_seconds,
        "step_measured": statistics.median(times[1:]),
        "compile_seconds": compiled,
        "tflops": plan.predicted_tflops_per_device
        * plan.predicted_step_seconds
        / statistics.median(times[1:]),
    }


def told(name, found):
    """A run as a sentence: memory and step, predicted over measured."""
    memory, least = found["memory_measured"] or found["memory_of_programs"], 2**20
    by = "" if found["memory_measured"] else " of programs"
    return (
        f"{name}: memory {found['memory_predicted'] / least:.0f} MiB predicted, "
        f"{(memory or 0) / least:.0f} measured{by} "
        f"({found['memory_predicted'] / memory if memory else float('nan'):.2f}); step "
        f"{1e3 * found['step_predicted']:.2f} ms predicted, {1e3 * found['step_measured']:.2f} "
        f"measured ({found['step_predicted'] / found['step_measured']:.2f}); "
        f"{found['tflops']:.1f} TFLOP/s; compiled in {found['compile_seconds']:.1f} s"
    ), found


def each(cases):
    """Every case in a process of its own: so are its peak of memory, and its crash."""
    failed = []
    for name, words in cases.items():
        command = [sys.executable, __file__, "run_of", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed.append(name)
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            yield f"{name}: FAILED, {last[:200]}", {"words": words, "error": done.stderr[-2000:]}
        else:
            yield told(name, json.loads(done.stdout.splitlines()[-1]))
    assert not failed, f"failed: {failed}"


def sizes(folder):
    """Ascending, so that what memory allows is seen before what it does not."""
    big = ("mini", "125m", "350m", "760m", "1.3b", "2.6b")
    batch = {"760m": 8, "1.3b": 8, "2.6b": 4}
    yield from each({
        size: (f"model.size={size}", "dataset=synthetic", "train.precision=bf16",
               f"train.global_batch_size={batch.get(size, 16 if GPU else 2)}")
        for size in (big if GPU else ("nano",))
    })  # fmt: skip


def families(folder):
    text = (
        "model.size=micro train.global_batch_size=32" if GPU
        else "model.size=nano train.global_batch_size=4"
    ).split()  # fmt: skip
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.int32))
    packed = (f"dataset=tokens dataset.path={tokens} dataset.packing=documents "
              "dataset.end_token=0 dataset.validation_fraction=0").split()  # fmt: skip
    made = ("dataset=synthetic",)
    picture = ["train.global_batch_size=64" if GPU else "train.global_batch_size=2"]
    small = [] if GPU else ["model.image_size=32"]
    cases = {
        "gpt": ("model=gpt", *text, *made),
        "gpt packed": ("model=gpt", *text, *packed),
        "gpt by XLA": ("model=gpt", *text, *made, "model.attention=xla"),
        "llama": ("model=llama", *text, *made),
        "llama windowed": ("model=llama", *text, *made, "model.sliding_window=64"),
        "llama packed": ("model=llama", *text, *packed),
        "moe": ("model=moe", *text, *made),
        "bert": ("model=bert", *made, *picture[:1]),
        "vit": ("model=vit", *made, *picture, *small),
        "resnet": ("model=resnet", *made, *picture, *small),
        "wide_resnet": ("model=wide_resnet", *made, *picture, *small),
        "unet": ("model=unet", *made, *picture, *small),
        "mlp": ("model=mlp", *made),
    }
    if not GPU:  # two cores
        cases = {k: cases[k] for k in ("gpt packed", "moe", "mlp")}
    yield from each({k: (*words, "train.precision=bf16") for k, words in cases.items()})


def remat(folder):
    size = (
        "model.size=125m train.global_batch_size=16" if GPU
        else "model.size=nano train.global_batch_size=4"
    ).split()  # fmt: skip
    yield from each({
        f"{blocks} blocks, {word}": (
            *size, f"model.num_layers={blocks}", f"parallel.remat={word}", "parallel=data",
            "dataset=synthetic", "train.precision=bf16",
        )
        for blocks in ((8, 16) if GPU else (2,))
        for word in ("none", "selective", "full")
    })  # fmt: skip


def scan(folder):
    size = "model.size=350m" if GPU else "model.size=nano"
    yield from each({
        word: (size, f"model.scan_layers={word == 'scanned'}".lower(), "dataset=synthetic",
               "parallel=data", "train.precision=bf16", "train.global_batch_size=8")
        for word in ("unrolled", "scanned")
    })  # fmt: skip


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


def text_of(options, rows):
    tokens = np.random.default_rng(0).integers(
        0, options.vocab_size, (rows, options.sequence_length + 1), dtype=np.int32
    )
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def small(**other):
    """A small GPT, and a batch."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_layers": 4, "num_heads": 2}
    options = GPTOptions(**sizes | {"sequence_length": 32} | other).filled()
    return build_model(options, "fp32"), text_of(options, 8)


def parity(folder):
    """Losses of a few steps beside plain `jax.jit`."""
    jax.config.update("jax_default_matmul_precision", "highest")
    model, batch = small()

    def loss(params, batch):
        return model.loss(params, batch, None)[0]

    def trained(step, start):
        state, found = jax.jit(start)(jax.random.key(0)), []
        for _ in range(4):
            state, value = step(state, batch)
            found.append(float(value))
        return found

    plain, start = training(loss, model.init, jax.value_and_grad)
    wanted = trained(jax.jit(plain), start)
    ours, _ = training(loss, model.init, launcher.value_and_grad)

    def shared(count):
        option = UniformStageOption(count, stages_per_mesh=count)
        return PipeshardParallel(4, stage_option=option, schedule="interleaved_1f1b")

    methods = {
        "data": DataParallel(),
        "data, 4 microbatches": DataParallel(4),
        "zero2": launcher.Zero2Parallel(2),
        "zero3": launcher.Zero3Parallel(2),
        "shard": launcher.ShardParallel(1, (1, 1)),
        "three_d": launcher.ThreeDParallel(1, 1, 1, 2),
        "pipeline": PipeshardParallel(4, stage_option=UniformStageOption(1)),
        "auto": PipeshardParallel(None, stage_option="auto"),
        "2 stages share the device": shared(2),
        "4 stages share the device": shared(4),
    }
    failed = []
    for name, method in methods.items():
        try:
            found = trained(launcher.parallelize(ours, method=method, devices=[device()]), start)
        except Exception as error:
            failed.append(name)
            yield f"{name}: FAILED, {type(error).__name__}: {error}"[:300], {"method": name}
            continue
        off = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
        if not off <= 1e-4:
            failed.append(name)
        yield f"{name}: losses {off:.1e} from one device's", {"method": name, "apart": off}
    assert not failed, f"failed, or more than 1e-4 away: {failed}"


def planned(loss, init, batch):
    """The step by our engine on one device, and its state."""
    step, start = training(loss, init, launcher.value_and_grad)
    traced = trace_step(step, (jax.eval_shape(start, jax.random.key(0)), batch))
    plan = DataParallel().plan(traced, local_shape(1, 1, device().device_kind))
    executable = compile_step(traced, plan, [device()])
    return executable, executable.create(start, jax.random.key(0))


def in_turn(calls, batch, rounds=12):
    """Milliseconds a step of each (call, state), by turns, and their losses."""
    times, values = [[] for _ in calls], [[] for _ in calls]
    states = [state for _, state in calls]
    for k in range(rounds + 2):
        for n, (call, _) in enumerate(calls):
            began = time.perf_counter()
            states[n], loss = call(states[n], batch)
            jax.block_until_ready((states[n], loss))
            values[n].append(float(loss))
            if k >= 2:
                times[n].append(1e3 * (time.perf_counter() - began))
    return times, values


def donation(folder):
    model, batch = small()
    call, state = planned(lambda p, b: model.loss(p, b, None)[0], model.init, batch)
    used = []
    for _ in range(6):
        before = state
        state, loss = call(state, batch)
        jax.block_until_ready((state, loss))
        used.append((device().memory_stats() or {}).get("bytes_in_use"))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    yield f"donated; bytes in use after each step: {used[:4]}", {"bytes": used}
    if used[0] is not None:  # CPU devices do not say
        assert max(used[2:]) <= used[1] * 1.01


def attention(folder):
    """A step whose attention is JAX's fused one, against the same without cuDNN."""
    shape = (4, 512, 8, 64) if GPU else (2, 64, 2, 16)
    width = shape[2] * shape[3]
    batch = np.random.default_rng(0).normal(size=(*shape[:2], width)).astype(np.float32)

    def init(key):
        return jax.random.normal(key, (width, 3, *shape[2:])) * 0.02

    def loss_by(implementation):
        def loss(params, x):
            made = jnp.einsum("bth,hpnd->pbtnd", x, params).astype(jnp.bfloat16)
            mixed = jax.nn.dot_product_attention(
                *made, is_causal=True, implementation=implementation
            )
            return jnp.mean((mixed.astype(jnp.float32) - 1) ** 2)

        return loss

    calls = [planned(loss_by(by), init, batch) for by in ("cudnn" if GPU else "xla", "xla")]
    times, (a, b) = in_turn(calls, batch)
    off = max(abs(x - y) / y for x, y in zip(a, b, strict=True))
    fused, plain = map(statistics.median, times)
    yield (
        f"{fused:.2f} ms a step, XLA's {plain:.2f}; losses {off:.1e} apart",
        {"ms": [fused, plain]},
    )
    assert off < 2e-2


def against_jit(folder):
    """Our step against plain jit's, and the device's use."""
    for size in ("125m", "350m") if GPU else ("nano",):
        options = dataclasses.replace(load([f"model.size={size}"]).model, dropout=0.0)
        batch = text_of(options, 8 if GPU else 2)
        model = build_model(options, "bf16")

        def loss(params, batch, model=model):
            return model.loss(params, batch, None)[0]

        step, start = training(loss, model.init, jax.value_and_grad)
        plain = jax.jit(step, donate_argnums=0), jax.jit(start)(jax.random.key(0))
        mine = planned(loss, model.init, batch)
        times, (a, b) = in_turn([mine, plain], batch, 12 if GPU else 3)
        np.testing.assert_allclose(a, b, rtol=1e-2)
        ratio = statistics.median(x / y for x, y in zip(*times, strict=True))
        ms = statistics.median(times[0])
        yield f"{size}: {ms:.2f} ms, {ratio:.3f} of jit's", {"size": size, "ratio": ratio}
        assert ratio <= 1.02 or not GPU


def timed(call, *args):
    """Seconds of a call of a jitted function, the best of a few, device time included."""
    jax.block_until_ready(call(*args))
    found = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(call(*args))
        found.append(time.perf_counter() - began)
    return min(found)


def transfers(folder):
    for size in (1 << 12, 1 << 20, 1 << 28) if GPU else (1 << 12, 1 << 20):
        host = np.ones(size // 4, np.float32)
        there = jax.device_put(host, device())
        times = [
            timed(lambda x: jax.device_put(x, device()), host),
            timed(lambda x: np.asarray(x + 0), there),
            timed(jax.jit(lambda x: x + 0), there),
        ]
        words = ", ".join(f"{size / t / 1e9:.1f}" for t in times)
        yield f"{size >> 10} KiB: {words} GB/s to the device, back, inside it", {"seconds": times}


def sharing(folder):
    """Two worker processes on one device. Neither way is for that: NCCL wants a device each."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.3"
    for way in ("pull", "collective"):
        found = processes(way)
        if found["problem"]:
            yield f"{way}: not here: {found['problem'][-160:]}", {}
            continue
        pairs = zip(found["losses"], found["alone"], strict=True)
        off = max(abs(x - y) / y for x, y in pairs)
        yield f"{way}: 64 MiB in {found['ms']:.1f} ms; losses {off:.1e} from one process's", found
        assert off < 1e-3


def processes(way):
    """What the second of two processes says of `peer`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, __file__, "peer", str(i), where, way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        answers = [each.communicate(timeout=50) for each in both]
    except subprocess.TimeoutExpired:
        return {"problem": "no answer within 50 s"}
    finally:
        for each in both:
            each.kill()
    if any(each.returncode for each in both):
        return {"problem": " ".join(err.strip()[-200:] for _, err in answers)}
    return {"problem": "", **json.loads(answers[1][0].splitlines()[-1])}


def peer(index, where, way):
    """One of two: 64 MiB from the first to the second, twice, the second time timed; then the
    losses of a pipeline of two stages, beside those of one process."""
    from jax._src import distributed

    index = int(index)
    if GPU:
        jax.distributed.initialize(where, 2, index, local_device_ids=[0])
    else:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(where, 2, index)
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
        began = time.perf_counter()
        arrived = exchange(key, {0: array} if is_first else {})
        jax.block_until_ready(arrived)
        if not is_first:
            assert float(arrived[0].sum()) == array.size
        taken = 1e3 * (time.perf_counter() - began)
    return taken


def traced_small():
    model, batch = small(num_layers=2)
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
    start, batch, traced = traced_small()
    method = PipeshardParallel(2, stage_option=UniformStageOption(2))
    plan = method.plan(traced, local_shape(2, 2, device().device_kind))
    return trained(compile_step(traced, plan, jax.devices(), transport), start, batch)


def alone():
    """The same on this process's device alone."""
    start, batch, traced = traced_small()
    mine = jax.local_devices()[0]
    plan = DataParallel().plan(traced, local_shape(1, 1, mine.device_kind))
    return trained(compile_step(traced, plan, [mine]), start, batch)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
