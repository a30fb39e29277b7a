"""What compiling a model with scanned blocks costs in stages, beside one stage of it.

    python tests/benchmarks/scanned_compile.py [--size nano] [--detail]

Printed are the processor seconds that `compile_step` takes (tracing, lowering, compiling, loading
for other devices), each case in a process of its own without any cache, and the ratio to that of
one stage: a model of as many blocks as a stage has, on one device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

CASES = ((12, 2), (12, 4), (96, 4))  # blocks, stages


def compiled(blocks: int, stages: int, size: str, detail: bool) -> None:
    """Print the processor seconds of one case."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", stages)
    jax.config.update("jax_enable_compilation_cache", False)
    from launcher.config.compose import load
    from launcher.plan import local_shape
    from launcher.plan.methods import PipeshardParallel, UniformStageOption
    from launcher.runtime.programs import compile
    from launcher.train.program import build_program

    words = ["model.scan_layers=true", f"model.num_layers={blocks}", f"model.size={size}"]
    step = build_program(load(["train.eval_every=0", *words], [])).train
    method = PipeshardParallel(4, stage_option=UniformStageOption(stages))
    plan = method.plan(step, local_shape(stages, 1, "cpu"))
    spent: dict[str, list[float]] = {}

    def timed(module: Any, name: str) -> None:
        fun = getattr(module, name)

        def run(*args: Any) -> Any:
            began = time.process_time()
            found = fun(*args)
            spent.setdefault(name, []).append(time.process_time() - began)
            return found

        setattr(module, name, run)

    if detail:  # one program at a time: threads share the processor time of the process
        compile.os.cpu_count = lambda: 1  # type: ignore[attr-defined]
        for name in ("emit", "_lower", "compiled", "loaded_for"):
            timed(compile, name)
    began = time.process_time()
    compile.compile_step(step, plan, jax.devices())
    print(time.process_time() - began)
    for name, each in spent.items():
        print(f"    {name}: {sum(each):.2f} s in {len(each)} calls", file=sys.stderr)


def measured(blocks: int, stages: int, size: str, detail: bool) -> float:
    """Return the processor seconds of one case, the least of two processes."""
    command = [sys.executable, __file__, "--case", f"{blocks},{stages}", "--size", size]
    command += ["--detail"] if detail else []
    least = float("inf")
    for _ in range(1 if detail else 2):
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        least = min(least, float(ended.stdout.split()[-1]))
    return least


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="nano")
    parser.add_argument("--detail", action="store_true", help="where the time goes")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        blocks, stages = map(int, given.case.split(","))
        compiled(blocks, stages, given.size, given.detail)
        return
    for blocks, stages in CASES:
        one = measured(blocks // stages, 1, given.size, given.detail)
        whole = measured(blocks, 1, given.size, given.detail)
        piped = measured(blocks, stages, given.size, given.detail)
        print(
            f"{blocks} blocks in {stages} stages: {piped:.2f} s; one stage of "
            f"{blocks // stages}: {one:.2f} s, ratio {piped / one:.2f}; all {blocks} in one stage: "
            f"{whole:.2f} s, ratio {piped / whole:.2f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
