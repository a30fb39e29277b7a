"""Placement of the arguments of a step with several losses, by the plans of its parts. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from launcher.partition import Spec, partition, parts
from launcher.plan.build import KeptShardings
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import StagePlan
from launcher.trace import TracedStep, Var, free_vars, is_var, leaf_names, nbytes, source_line

Devices = tuple[int, ...]  # of a submesh


def successors(step: TracedStep) -> dict[Var, Var]:
    """Return for results of the step that take an argument's place that argument."""
    whole, arguments = step.whole, set(step.whole.invars)
    found: dict[Var, Var] = {}
    for result, argument in whole.aliases.items():
        v = whole.outvars[result]
        if is_var(v) and v not in arguments:
            found.setdefault(v, whole.invars[argument])
    return found


@dataclass(eq=False)
class Places:
    """Where the arguments of a step and what its parts hand on live, by the plans made so far.

    A result that takes an argument's place lives where that does.

    Attributes:
        step: the step.
        homes: the submesh of each value.
        specs: the specs that were chosen for it there.
    """

    step: TracedStep
    homes: dict[Var, Devices] = field(default_factory=dict)
    specs: dict[tuple[Var, Devices], Spec] = field(default_factory=dict)
    _same: dict[Var, Var] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._same = successors(self.step)

    def home(self, var: Var) -> Devices | None:
        """Return the submesh where a value lives, if that is known."""
        return self.homes.get(self._same.get(var, var))

    def add(self, part: TracedStep, plan: Plan) -> None:
        """Add what a part's plan says."""
        for v, devices in _lying(part, plan):
            self.homes.setdefault(self._same.get(v, v), devices)
        var_of = dict(zip(leaf_names(part), part.invars, strict=True))
        for stage in plan.stages:
            for name, spec in stage.shardings.items():
                var = var_of[name]
                self.specs.setdefault((self._same.get(var, var), stage.devices), spec)

    def with_note(self, part: TracedStep, plan: Plan) -> Plan:
        """Return a part's plan with a note on what has to be moved for it, if arrays have."""
        lying = dict(_lying(part, plan))
        arrays = [v for v in lying if v.aval.size > 1]
        away = sum(nbytes(v.aval) for v in arrays if self.home(v) != lying[v])
        if not away:
            return plan
        note = (
            f"{away} bytes move between stages each step, which the loss at "
            f"{source_line(part.loss_equation)} needs elsewhere than other losses do"
        )
        return dataclasses.replace(plan, notes=(note, *plan.notes))

    def with_the_rest(self, part: TracedStep, plan: Plan) -> Plan:
        """Return a part's plan with the memory of arguments that only other parts read."""
        own = {self._same.get(v, v) for v in part.invars}
        rest = [(v, self.homes[v]) for v in self.step.whole.invars if v in self.homes]

        def bytes_beside(stage: StagePlan) -> int:
            sizes = dict(zip(("data", "model"), stage.logical_mesh, strict=True))
            return sum(
                nbytes(v.aval) // parts(self.specs.get((v, home), ()), sizes)
                for v, home in rest
                if v not in own and home == stage.devices
            )

        stages = [
            dataclasses.replace(stage, memory_bytes=stage.memory_bytes + bytes_beside(stage))
            for stage in plan.stages
        ]
        return dataclasses.replace(plan, stages=tuple(stages))

    def kept(self, part: TracedStep) -> KeptShardings:
        """Return the specs of a part's arguments that are known, where they live."""
        found: dict[Devices, dict[str, Spec]] = {}
        for name, var, is_batch in zip(leaf_names(part), part.invars, part.batch, strict=True):
            home = self.home(var)
            spec = self.specs.get((self._same.get(var, var), home)) if home else None
            if home and spec is not None and not is_batch:
                found.setdefault(home, {})[name] = spec
        return found


def _lying(part: TracedStep, plan: Plan) -> list[tuple[Var, Devices]]:
    """Return the submeshes of what a part reads and of its results, by its plan."""
    update = partition(part.cut_at(plan.layer_ends), plan.assignment).update
    read = set(free_vars([*part.before, part.loss_equation, *part.after]))
    found = [(v, m) for v, m in update.homes.items() if v in read]
    found += [(v, m) for v, m in zip(update.outvars, update.out_homes, strict=True) if is_var(v)]
    return [(v, plan.meshes[m]) for v, m in found]
