"""Seconds to compile a plan for GPUs that are not here: `plan.compile`, plain JAX, and once more.

    python tests/benchmarks/compiled_plan.py [setting=value ...]

Plain JAX is the sum of `jax.jit(...).lower().compile()` over the same distinct programs, one after
the other. The compiler's wheels are needed: `pip install '.[plan-cuda]'`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from turns import table

from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import trace
from launcher.report.console import make_console
from launcher.runtime import compile_for, target_for
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Run
from launcher.runtime.programs.device_meshes import place_on_devices

WORDS = ("model=gpt", "model.size=125m", "model.num_layers=4", "train.global_batch_size=64")
WORDS += ("train.precision=bf16", "cluster=h100_8", "parallel=manual", "parallel.num_stages=4")


def plain(step, plan, target, names) -> float:
    """Seconds of plain JAX over some of a plan's programs."""
    emitted = emit(step.cut_at(plan.layer_ends), plan)
    placement = place_on_devices(plan, target.devices, emitted.slots)
    runs = {x.program: x for x in reversed(emitted.instructions) if isinstance(x, Run)}
    began = time.perf_counter()
    for name in names:
        run, fun = runs[name], emitted.programs[name].fun
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=placement.sharding(slot))
            for slot in run.inputs
            for aval in [emitted.slots[slot].aval]
        ]
        jitted = jax.jit(
            lambda *flat, fun=fun: tuple(fun(*flat)),
            donate_argnums=run.donated,
            out_shardings=tuple(map(placement.sharding, run.outputs)),
            keep_unused=True,
        )
        jitted.lower(*arguments).compile(compiler_options=dict(target.options))
    return time.perf_counter() - began


def main() -> None:
    config = load([*WORDS, "dataset=synthetic", "train.eval_every=0", "task=plan", *sys.argv[1:]])
    traced = trace(config, make_console(sys.stderr), look(config, 0, plan_only=True))
    step = traced.program.train
    plan = plan_of(config.parallel, step, traced.cluster, nothing_fits=print)
    target, step = target_for(plan), step.planned_as(plan.fingerprint)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        first = compile_for(step, plan, target)
        again = compile_for(step, plan, target)
    serial = plain(step, plan, target, [program.names[0] for program in first.programs])
    heads = "programs", "plain JAX, s", "first, s", "ratio", "again, s", "ratio"
    ratios = first.seconds / serial, again.seconds / first.seconds
    row = (serial, first.seconds, ratios[0], again.seconds, ratios[1])
    table(heads, [(f"{len(first.programs)} distinct", *row)])


if __name__ == "__main__":
    main()
