"""What compiling a model with scanned blocks costs in stages, beside one stage of it.

    python tests/benchmarks/scanned_compile.py [size]

Printed are the processor seconds that `compile_step` takes (tracing, lowering, compiling, loading
for other devices), each case in two processes of its own without any cache, the lesser of them; and
the ratios to one stage, a model of as many blocks as a stage has on one device, and to all blocks
in one stage.
"""

from __future__ import annotations

import subprocess
import sys
import time

from turns import table

CASES = ((12, 2), (12, 4), (96, 4))  # blocks, stages


def compiled(size: str, blocks: int, stages: int) -> None:
    """Print the processor seconds of one case."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", stages)
    jax.config.update("jax_enable_compilation_cache", False)
    from launcher.config.compose import load
    from launcher.plan import local_shape
    from launcher.plan.methods import PipeshardParallel, UniformStageOption
    from launcher.runtime import compile_step
    from launcher.train.program import build_program

    words = ["model.scan_layers=true", f"model.num_layers={blocks}", f"model.size={size}"]
    step = build_program(load(["train.eval_every=0", *words], [])).train
    method = PipeshardParallel(4, stage_option=UniformStageOption(stages))
    plan = method.plan(step, local_shape(stages, 1, "cpu"))
    began = time.process_time()
    compile_step(step, plan, jax.devices())
    print(time.process_time() - began)


def measured(*case: object) -> float:
    """Return the processor seconds of one case, the least of two processes."""
    command = [sys.executable, __file__, *map(str, case)]
    return min(float(subprocess.check_output(command).split()[-1]) for _ in range(2))


def main() -> None:
    """See the module."""
    size = sys.argv[1] if len(sys.argv) > 1 else "nano"
    if len(sys.argv) > 2:
        compiled(size, *map(int, sys.argv[2:]))
        return
    rows = []
    for blocks, stages in CASES:
        cases = ((blocks, stages), (blocks // stages, 1), (blocks, 1))
        piped, one, whole = (measured(size, *case) for case in cases)
        name = f"{blocks} blocks in {stages} stages"
        rows.append((name, piped, one, piped / one, whole, piped / whole))
    table(("processor seconds", "", "one stage", "ratio", "all in one", "ratio"), rows)


if __name__ == "__main__":
    main()
