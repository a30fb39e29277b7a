"""Step and compile time of our pipeline beside plain `jax.jit`, interleaved in one process.

    python tests/benchmarks/step_time.py            # GPT: vocab 512, hidden 256, 8 layers, seq 128
    python tests/benchmarks/step_time.py --tiny     # hidden 16, seq 8: what dispatch alone costs

Every step function trains the same model on the same batches; the table gives medians, ratios to
plain `jax.jit` on one device, and the losses at the end, which must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax

import launcher
from launcher.config.schema import GPT
from launcher.plan import local_shape, make_plan
from launcher.runtime import compile_step
from launcher.trace import trace_step
from recipes import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    options = GPT(
        vocab_size=512,
        hidden_size=256,
        num_layers=8,
        num_heads=4,
        sequence_length=128,
        tie_embeddings=False,
    )
    if args.tiny:
        options = dataclasses.replace(options, hidden_size=16, sequence_length=8)
    model = build_model(options, "fp32")
    optimizer = optax.adamw(1e-3)

    def init(key):
        params = model.init(key)
        return params, optimizer.init(params)

    def step_with(value_and_grad):
        def step(state, batch):
            params, opt_state = state
            (loss, _), grads = value_and_grad(lambda p, b: model.loss(p, b, None), has_aux=True)(
                params, batch
            )
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return step

    rng = np.random.default_rng(0)
    text = rng.integers(0, options.vocab_size, (32, options.sequence_length + 1), dtype=np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    key = jax.random.key(0)

    def scanned(state, batch):
        params, opt_state = state
        split = jax.tree.map(lambda x: x.reshape(args.micro_batches, -1, *x.shape[1:]), batch)

        def body(grads, part):
            (loss, _), new = jax.value_and_grad(lambda p: model.loss(p, part, None), has_aux=True)(
                params
            )
            return jax.tree.map(lambda a, b: a + b / args.micro_batches, grads, new), loss

        zeros = jax.tree.map(lambda x: x * 0, params)
        grads, losses = jax.lax.scan(body, zeros, split)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses.mean()

    contestants = {}
    for name, fun in (("plain jit", step_with(jax.value_and_grad)), ("jit + scan", scanned)):
        start = time.perf_counter()
        state = jax.jit(init)(key)
        compiled = jax.jit(fun, donate_argnums=0).lower(state, batch).compile()
        contestants[name] = [compiled, state, time.perf_counter() - start, []]
    traced = trace_step(step_with(launcher.value_and_grad), (jax.eval_shape(init, key), batch))
    for stages in args.stages:
        plan = make_plan(
            traced,
            method="manual",
            num_stages=stages,
            num_micro_batches=args.micro_batches,
            schedule=args.schedule,
            cluster=local_shape(stages, 1, "cpu"),
        )
        executable = compile_step(traced, plan, jax.devices()[:stages])
        state = executable.create(init, key)
        contestants[f"{stages} stages"] = [executable, state, executable.compile_seconds, []]

    for _ in range(args.rounds + 1):
        for entry in contestants.values():
            start = time.perf_counter()
            entry[1], loss = entry[0](entry[1], batch)
            dispatched = time.perf_counter() - start
            loss = float(jax.block_until_ready((entry[1], loss))[1])
            entry[3].append((time.perf_counter() - start, dispatched, loss))

    base = statistics.median(t for t, _, _ in contestants["plain jit"][3][1:])
    base_compile = contestants["plain jit"][2]
    heads = ("step ms", "÷ jit", "dispatch ms", "compile s", "÷ jit", "loss")
    print(" " * 12, *(f"{h:>11}" for h in heads))
    for name, (_, _, compile_seconds, times) in contestants.items():
        step = statistics.median(t for t, _, _ in times[1:])
        dispatch = statistics.median(d for _, d, _ in times[1:])
        print(
            f"{name:12} {step * 1e3:9.1f} {step / base:7.2f} {dispatch * 1e3:12.2f} "
            f"{compile_seconds:10.2f} {compile_seconds / base_compile:6.2f} {times[-1][2]:9.5f}"
        )


if __name__ == "__main__":
    main()
