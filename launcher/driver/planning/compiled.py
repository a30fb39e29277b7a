"""Compiled plans: `plan.compile` tells what the compiler says, `parallel.verify` heeds it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import jax
from rich.console import Console

from launcher.base.jax_compat import deterministic_options
from launcher.cluster.kinds import DescribedKind, kind_of
from launcher.config.parallel import Auto
from launcher.config.schema import Config
from launcher.plan import ClusterShape, Plan, describe_plan
from launcher.report.console import Phase, status
from launcher.report.text import bytes_text
from launcher.runtime import Target, compile_for, target_of
from launcher.trace import TracedStep

_log = logging.getLogger(__name__)


def verifies(config: Config) -> bool:
    """Return whether the plan of a search is compiled before it is taken."""
    return isinstance(config.parallel, Auto) and config.parallel.verify == "compile"


def compiler_of(config: Config, cluster: ClusterShape) -> Target | None:
    """Return the devices to compile for, before the work of planning; None: nothing is compiled.

    For emulated devices this process then sees as many. JAX takes one word on that, which an
    environment may have said, and only before it first looks for devices.

    Raises:
        PlanError: there is no such compiler, or it does not know the devices.
    """
    if not (config.plan.compile or verifies(config)):
        return None
    if cluster.device_kind == "cpu" and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)
    kind = kind_of(config.cluster)
    described = kind.sheet() if isinstance(kind, DescribedKind) else cluster.device_kind
    target = target_of(described, cluster.num_devices)
    if config.train.deterministic and cluster.device_kind != "cpu":
        target = Target(target.devices, {**target.options, **deterministic_options()}, target.text)
    return target


def with_report(plan: Plan, step: TracedStep, target: Target, console: Console) -> Plan:
    """Return a plan with what the compiler of these devices says of its programs."""
    name = target.devices[0].device_kind
    with status(console, f"compiling for {name}", Phase.COMPILING) as advance:
        found = compile_for(
            step, plan, target, lambda done, total: advance(done, total, "programs")
        )
    return replace(plan, compiled=found)


def verified(
    plans: Sequence[Plan], step: TracedStep, target: Target, console: Console
) -> tuple[list[Plan], str]:
    """Return the plans from the first one on that fits as it is compiled, and why others do not.

    That one has the compiler's memory in place of the predicted. If there is none, all are returned
    as they were.
    """
    why = ""
    for number, plan in enumerate(plans):
        found = with_report(plan, step, target, console).with_compiled_memory()
        if not (reason := compiled_problem(found)):
            return [found, *plans[number + 1 :]], ""
        why = why or f"of {len(plans)} plans none fits as it is compiled; the best: {reason}"
        _log.info(f"{describe_plan(plan)} gives way to the next plan: {reason}")
    return list(plans), why


def compiled_problem(plan: Plan) -> str:
    """Return what the compiler finds wrong with a plan, in words; "" if nothing is."""
    assert plan.compiled is not None
    if errors := plan.compiled.errors:
        first = errors[0]
        return (
            f"{len(errors)} of its programs do not compile for {plan.compiled.device}; "
            f"{first.program}: {first.message}"
        )
    capacity = plan.cluster["memory_bytes"]
    if missing := plan.compiled.missing_bytes(capacity):
        return (
            f"as compiled, it needs {bytes_text(capacity + missing)} a device, "
            f"{bytes_text(missing)} more than its {bytes_text(capacity)}"
        )
    return ""
