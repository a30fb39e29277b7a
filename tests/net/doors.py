"""The only file of the net that imports what it watches: where that moves, this file follows.

`main` is the command line, and the names of steps and methods are public ones; the functions are
the inner doors. What they return names no class or module of the package, which may be renamed.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

import launcher
from launcher.__main__ import main as main
from launcher.plan import local_shape
from launcher.runtime import compile_step
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Exchange, Free, Run, Send
from launcher.trace import trace_step

boundary = launcher.mark_pipeline_boundary
value_and_grad = launcher.value_and_grad
DataParallel = launcher.DataParallel
ManualStageOption = launcher.ManualStageOption
ParameterServer = launcher.ParameterServer
PipeshardParallel = launcher.PipeshardParallel
ShardParallel = launcher.ShardParallel
ThreeDParallel = launcher.ThreeDParallel
UniformStageOption = launcher.UniformStageOption
Zero2Parallel = launcher.Zero2Parallel
Zero3Parallel = launcher.Zero3Parallel
KINDS = {Run: "run", Send: "send", Exchange: "exchange", Free: "free"}


def planned(step: Any, arguments: Any, method: Any, devices: int, hosts: int = 1) -> Any:
    """Return the traced step and its plan on this machine's emulated devices."""
    traced = trace_step(step, arguments)
    plan = method.plan(traced, local_shape(devices, hosts, "cpu"))
    return traced.planned_as(plan.fingerprint), plan


def instructions(traced: Any, plan: Any, rank: int = 0) -> tuple[list[str], list[str]]:
    """Return what each slot of a worker holds, and its instructions: a kind, then its fields."""
    emitted = emit(traced, plan, rank=rank)
    held = [f"{s.mesh} {s.aval.dtype}{list(s.aval.shape)} {_told(s.spec)}" for s in emitted.slots]
    return held, [f"{KINDS[type(x)]} {_told(x)}" for x in emitted.instructions]


def _told(value: Any) -> Any:
    """Return a value without the names of classes."""
    if dataclasses.is_dataclass(value):
        return {f.name: _told(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_told(one) for one in value]
    return value


def compiled_texts(traced: Any, plan: Any, devices: int) -> dict[str, str]:
    """Return the optimised text of each program of a plan."""
    return compile_step(traced, plan, jax.devices()[:devices]).hlo_text()
