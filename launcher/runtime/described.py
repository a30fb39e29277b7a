"""Compile a plan's programs for devices that need not be here, and report what the compiler says.

XLA compiles for a GPU by its description alone (`hardware.target_config`). All programs are
compiled in this process, which the compiler takes to have all the devices. What the compiler said
before is kept with the measurements: of JAX's own cache only a process with a GPU can read these
programs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import jax

from launcher.base.jax_compat import compiled, described_devices
from launcher.base.measurements import cache_folder, file_name, read_cached, write
from launcher.base.reading import read
from launcher.hardware import Datasheet, find_datasheet, target_config
from launcher.plan import CompiledPlan, CompiledProgram, Plan, PlanError, timeline
from launcher.runtime.compiled_report import CompiledStep, compiled_report, read_compiled
from launcher.runtime.emit.emit import emit
from launcher.runtime.programs.compile import Compilation, Lowered, wait_for_more
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.trace import TracedStep

# Which of XLA's own kernels for matrix products suits is tried out on a GPU. Without one it may
# take one that does not fit at all, where the libraries' kernels always do.
_UNTRIED = {"xla_gpu_enable_triton_gemm": False}


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


def target_of(device: str | Datasheet, count: int) -> Target:
    """Return devices to compile for.

    Args:
        device: a GPU, or its name as `find_datasheet` takes it; "cpu": emulated devices here.
        count: their number.

    Raises:
        PlanError: they are not known well enough, or their compiler is not installed.
    """
    if device == "cpu":
        here = jax.devices("cpu")
        if len(here) < count:
            raise PlanError(
                f"compiling for {count} CPU devices needs as many here, and there are {len(here)}; "
                f'jax.config.update("jax_num_cpu_devices", {count}) before JAX is first used makes '
                "them"
            )
        return Target(here[:count], {}, "cpu")
    sheet = find_datasheet(device) if isinstance(device, str) else device
    if sheet is None:
        raise PlanError(
            f"no file in conf/device/ describes the GPU {device!r}, which the compiler has to "
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
            "not installed; pip install 'jax[cuda12-local]' nvidia-cuda-nvcc-cu12"
        ) from error


def target_for(plan: Plan, device_kind: str | None = None) -> Target:
    """Return devices to compile a plan for, by default of the kind that it was made for.

    Raises:
        PlanError: as `target_of` does.
    """
    count = 1 + max(device for mesh in plan.all_meshes for device in mesh)
    kind = plan.cluster["device_kind"] if device_kind is None else device_kind
    return target_of(kind, count // plan.reduction.workers)


def compile_for(
    step: TracedStep,
    plan: Plan,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CompiledPlan:
    """Return what the compiler says of a plan's programs, now or before.

    Args:
        step: the traced step that the plan is for.
        plan: the plan; with parameter servers, the first worker's share is compiled.
        target: the devices.
        progress: called with the number of programs that are done, and of all.
    """
    began = time.perf_counter()
    path = _kept(plan, target)
    known = read_cached(path, lambda tree: read(CompiledPlan, tree["report"]), "compiled again")
    if known is not None:
        return dataclasses.replace(known, seconds=time.perf_counter() - began)
    found = compile_now(step, plan, target, progress).report
    if not found.errors:  # a tool that the compiler misses may come
        write(path, {"report": dataclasses.asdict(found)})
    return found


def compile_now(
    step: TracedStep,
    plan: Plan,
    target: Target,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CompiledStep:
    """Compile each distinct program of a plan once.

    Args:
        step: as for `compile_for`, like the rest.
        plan: the plan.
        target: the devices.
        progress: called with the number of programs that are done, and of all.
    """
    began = time.perf_counter()
    step = step.planned_as(plan.fingerprint).cut_at(plan.layer_ends)
    pool = ThreadPoolExecutor(os.cpu_count(), "launcher-compile")
    try:
        with jax.transfer_guard("allow"):  # of the programs' constants
            emitted = emit(step, plan)
            placement = place_on_devices(plan, target.devices, emitted.slots)
            placement = dataclasses.replace(placement, owners=_hosts(plan))
            one = functools.partial(_compiled, target.options)
            compilation = Compilation(emitted, placement, pool, one)
        futures, done = compilation.programs, 0
        while done < len(futures):
            done = wait_for_more(futures, done)
            progress(done, len(futures))
    finally:
        pool.shutdown(cancel_futures=True)
    failed = {n: error for n, f in compilation.by_names.items() if (error := f.exception())}
    made = {n: f.result() for n, f in compilation.by_names.items() if n not in failed}
    distinct = {n: program for n, (program, _) in made.items()}
    taken = time.perf_counter() - began
    report = compiled_report(plan, emitted, placement, distinct | failed, taken)
    text = {name: text for names, (_, text) in made.items() for name in names}
    return CompiledStep(report, text)


def _hosts(plan: Plan) -> tuple[frozenset[int], ...]:
    """Return the hosts of every mesh, each of which has a process; with parameter servers, one."""
    each = plan.num_devices if plan.reduction.workers > 1 else plan.cluster["devices_per_host"]
    return tuple(frozenset(device // each for device in mesh) for mesh in plan.all_meshes)


def _compiled(options: Mapping[str, Any], one: Lowered) -> tuple[CompiledProgram, str]:
    """Compile a program; return what the compiler says of it, and its text."""
    made, _ = compiled(one.whole, {**one.options, **options})
    text = made.as_text() or ""
    return read_compiled(made, text, one.mesh), text


def _kept(plan: Plan, target: Target) -> Path:
    """Return the file for what the compiler says of a plan.

    The programs follow from the step, the plan's decisions and this package; what is there at once,
    from the order of the tasks and from the hosts, too. `read_cached` compares the version of JAX.
    """
    decisions = [
        (part.assignment, part.layer_ends, part.exchanges, [x.task for x in timeline(part)])
        for part in plan.parts
    ]
    plugins = [each.dist and each.dist.version for each in entry_points(group="jax_plugins")]
    compiler = target.options, target.text, plugins, os.environ.get("XLA_FLAGS")
    said = plan.fingerprint, decisions, _hosts(plan), compiler
    digest = hashlib.sha256(repr(said).encode() + _sources()).hexdigest()[:24]
    kind = file_name(target.devices[0].device_kind)
    return cache_folder() / "compiled_reports" / f"{kind}-{digest}.json"


@functools.cache
def _sources() -> bytes:
    """Return a digest of this package's modules."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.digest()
