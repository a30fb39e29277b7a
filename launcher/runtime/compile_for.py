"""Compile a plan's programs for devices that need not be here, and report what the compiler says.

XLA compiles for a GPU by its description alone (`hardware.target_config`). All programs are
compiled in this process, as if one host had all the devices. What was compiled before is read from
the cache of measurements: JAX's own cache holds programs that only a GPU can read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from launcher.base.jax_compat import compiled, described_devices
from launcher.base.measurements import cache_folder, file_name, read_cached, write
from launcher.base.reading import read
from launcher.hardware import find_datasheet, target_config
from launcher.plan import CompiledPlan, CompiledProgram, Plan, PlanError
from launcher.runtime.compiled_report import compiled_report, read_compiled
from launcher.runtime.emit.emit import emit
from launcher.runtime.programs.compile import Compilation, Lowered, wait_for_more
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.trace import TracedStep

# Which of XLA's own kernels for matrix products suits is tried out on a GPU. Without one it may
# take one that does not fit at all, where the libraries' kernels always do.
_UNTRIED = {"xla_gpu_enable_triton_gemm": False}
_ADDRESS = re.compile(r'(?<=@CustomSPMDPartitioning)(\(.*?backend_config = )"\d+"')
EXTRA = "jax-plan-launcher[plan-cuda]"


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
        devices: numbered as the plan numbers them.
        options: the compiler's, beside those of each program.
        text: tells them from all others that the compiler knows.
    """

    devices: Sequence[jax.Device]
    options: Mapping[str, Any]
    text: str


def target_of(device_kind: str, count: int) -> Target:
    """Return devices to compile for.

    Args:
        device_kind: a GPU's name, as `find_datasheet` takes it, or "cpu": emulated devices here.
        count: their number.

    Raises:
        PlanError: they are not known well enough, or their compiler is not installed.
    """
    if device_kind == "cpu":
        here = jax.devices("cpu")
        if len(here) < count:
            raise PlanError(
                f"compiling for {count} CPU devices needs as many here, and there are {len(here)}; "
                f'jax.config.update("jax_num_cpu_devices", {count}) before JAX is first used makes '
                "them"
            )
        return Target(here[:count], {}, "cpu")
    if (sheet := find_datasheet(device_kind)) is None:
        raise PlanError(
            f"no file in conf/device/ describes the GPU {device_kind!r}, which the compiler has to "
            "know; write one"
        )
    try:
        text = target_config(sheet)
        return Target(described_devices(text, count), _UNTRIED, text)
    except ValueError as error:
        raise PlanError(f"programs for {sheet.name} cannot be compiled: {error}") from error
    except NotImplementedError as error:
        raise PlanError(
            f"programs for {sheet.name} are compiled by XLA's compiler for NVIDIA GPUs, which is "
            f"not installed; pip install '{EXTRA}' brings it"
        ) from error


def compile_for(
    step: TracedStep,
    plan: Plan,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
    texts: dict[str, str] | None = None,
) -> CompiledPlan:
    """Compile each distinct program of a plan once; return what the compiler says.

    Args:
        step: the traced step that the plan is for.
        plan: the plan; with parameter servers, the first worker's share is compiled.
        target: the devices.
        progress: called with the number of programs that are done, and of all.
        texts: takes the text of each compiled program by its name. If it is not None, nothing is
            read from the cache.
    """
    began = time.perf_counter()
    step = step.planned_as(plan.fingerprint).cut_at(plan.layer_ends)
    pool = ThreadPoolExecutor(os.cpu_count(), "launcher-compile")
    try:
        with jax.transfer_guard("allow"):  # of the programs' constants
            emitted = emit(step, plan)
            placement = place_on_devices(plan, target.devices, emitted.slots)
            ask = functools.partial(_compiled, target, plan.fingerprint, texts)
            compilation = Compilation(emitted, placement, pool, ask)
        futures, done = compilation.programs, 0
        while done < len(futures):
            done = wait_for_more(futures, done)
            progress(done, len(futures))
    finally:
        pool.shutdown(cancel_futures=True)
    distinct = {
        names: future.exception() or future.result()
        for names, future in compilation.by_names.items()
    }
    if texts is not None:
        for names in distinct:
            known = [texts[name] for name in names if name in texts]
            texts.update(dict.fromkeys(names, known[0]) if known else {})
    return compiled_report(plan, emitted, placement, distinct, time.perf_counter() - began)


def _compiled(
    target: Target, fingerprint: str, texts: dict[str, str] | None, one: Lowered
) -> CompiledProgram:
    """Return what the compiler says of a program, now or before."""
    path = _kept(target, fingerprint, one)
    if texts is None and (known := read_cached(path, _read, "compiled again")) is not None:
        return known
    made, _ = compiled(one.whole, {**one.options, **target.options})
    found = read_compiled(made, one.mesh)
    if texts is not None:
        texts[one.name] = made.as_text() or ""
    write(path, {"program": dataclasses.asdict(found)})
    return found


def _kept(target: Target, fingerprint: str, one: Lowered) -> Path:
    """Return the file for what the compiler says of a program.

    Its text holds addresses of Python's functions that partition custom calls, as of fused
    attention. What these functions do follows from the step.
    """
    text = _ADDRESS.sub(r"\1", one.whole.as_text())
    options = {**one.options, **target.options}
    said = repr((text, fingerprint, options, target.text, os.environ.get("XLA_FLAGS")))
    kind, digest = target.devices[0].device_kind, hashlib.sha256(said.encode()).hexdigest()[:24]
    return cache_folder() / "compiled_reports" / f"{file_name(kind)}-{digest}.json"


def _read(tree: dict[str, Any]) -> CompiledProgram:
    return read(CompiledProgram, tree["program"])
