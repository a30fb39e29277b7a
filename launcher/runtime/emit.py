"""From a placed step to instructions: what runs, in which order, on which slots. Pure.

The order is the one of the simulated timeline, so a single thread can issue it and every stage
finds its work early enough. Imported by `runtime.executable`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from launcher.plan import Plan, timeline
from launcher.plan.outer import OuterProgram, Slicing, place_outer
from launcher.plan.place import Segment
from launcher.plan.schedule import SCHEDULES, Kind, Task
from launcher.plan.stages import StageGraph, cut_stages
from launcher.runtime.instructions import Instruction, Run, Send, Slot, with_frees
from launcher.runtime.stage_programs import StageProgram, StagePrograms
from launcher.trace.graph import Var, is_var, program
from launcher.trace.step import Loss, TracedStep


@dataclass(frozen=True, eq=False)
class Emitted:
    """A step ready to be compiled.

    Attributes:
        programs: the function of every program, by name.
        arguments: `(argument leaf, slot)`: where each is put before the step.
        batches: `(argument leaf, slot, stacked along axis | None)`: copies of batch leaves.
        constants: `(array, slot)`, put once.
        results: a slot for each result leaf, or the literal's value.
    """

    slots: tuple[Slot, ...]
    programs: dict[str, Callable[..., tuple[Any, ...]]]
    instructions: tuple[Instruction, ...]
    arguments: tuple[tuple[int, int], ...]
    batches: tuple[tuple[int, int, int | None], ...]
    constants: tuple[tuple[Any, int], ...]
    results: tuple[tuple[int | None, Any, int], ...]
    slicing: Slicing


def emit(step: TracedStep, plan: Plan) -> Emitted:
    """The instruction list of `plan`."""
    slicing = Slicing(plan.num_micro_batches, plan.num_replicas)
    loss = step.loss(slicing.num_slices)
    graphs = cut_stages(loss, [stage.layers for stage in plan.stages])
    outer = place_outer(step, loss, graphs, slicing)
    return _Emitter(step, plan, loss, graphs, outer, slicing).emit()


@dataclass(eq=False)
class _Emitter:
    step: TracedStep
    plan: Plan
    loss: Loss
    graphs: Sequence[StageGraph]
    outer: OuterProgram
    slicing: Slicing
    slots: list[Slot] = field(default_factory=list)
    names: dict[Any, int] = field(default_factory=dict)
    programs: dict[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    listed: list[Run | Send] = field(default_factory=list)
    constants: list[tuple[Any, int]] = field(default_factory=list)
    batches: list[tuple[int, int, int | None]] = field(default_factory=list)

    def emit(self) -> Emitted:
        arguments = [
            (i, self.outer_slot(v, self.outer.homes[v]))
            for i, v in enumerate(self.step.invars)
            if not self.step.batch[i]
        ]
        self.give()
        self.sends(self.outer.argument_sends)
        for i, segment in enumerate(self.outer.before):
            self.segment(f"before.{i}", segment)
        self.pipeline()
        self.sends(self.outer.part_sends)
        for i, segment in enumerate(self.outer.after):
            self.segment(f"update.{i}", segment)
        results = []
        for atom, stage in zip(self.outer.outvars, self.outer.out_homes, strict=True):
            slot = self.outer_slot(atom, stage) if is_var(atom) else None
            results.append((slot, None if is_var(atom) else atom, stage))
        kept = {slot for slot, _, _ in results if slot is not None}
        kept |= {slot for _, slot in self.constants}
        kept |= {slot for i, slot in arguments if not self.step.donated[i]}
        protected = frozenset(kept)
        donating = self.donate(frozenset(slot for _, slot in arguments), protected)
        return Emitted(
            slots=tuple(self.slots),
            programs=self.programs,
            instructions=tuple(with_frees(donating, protected)),
            arguments=tuple(arguments),
            batches=tuple(self.batches),
            constants=tuple(self.constants),
            results=tuple(results),
            slicing=self.slicing,
        )

    # -- slots -----------------------------------------------------------------------------------

    def slot(self, name: Any, stage: int, aval: Any, layout: str) -> int:
        if name not in self.names:
            self.names[name] = len(self.slots)
            plain = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self.slots.append(Slot(stage, plain, layout))
        return self.names[name]

    def outer_slot(self, var: Var, stage: int, layout: str = "whole") -> int:
        return self.slot(("outer", var, stage), stage, var.aval, layout)

    def part_slot(self, kind: str, index: int, stage: int, microbatch: int) -> int:
        parts = self.outer.result_parts if kind == "result" else self.outer.grad_parts
        variables = parts[index, stage]
        var = variables[microbatch if len(variables) > 1 else 0]
        return self.outer_slot(var, stage, self.per_replica)

    @property
    def per_replica(self) -> str:
        return "replicas" if self.slicing.replicas > 1 else "whole"

    def pipeline_slot(self, name: Any, stage: int, aval: Any) -> int:
        """A value of one microbatch, of which each replica has its own."""
        replicas = self.slicing.replicas
        shape = (replicas, *aval.shape) if replicas > 1 else aval.shape
        return self.slot(name, stage, jax.ShapeDtypeStruct(shape, aval.dtype), self.per_replica)

    def operand_slot(self, index: int, stage: int) -> int:
        operand = self.outer.operands[index]
        if not operand.host:
            return self.outer_slot(operand.value, stage, "stacked" if operand.stacked else "whole")
        axis = self.loss.slice_axes[index]
        leaf = self.step.invars.index(operand.value)
        name = ("batch", leaf, axis, stage)
        if name not in self.names:
            aval = operand.value.aval
            if axis is not None:
                aval = jax.eval_shape(
                    lambda x: self.slicing.stack(x, axis),
                    jax.ShapeDtypeStruct(aval.shape, aval.dtype),
                )
            slot = self.slot(name, stage, aval, "whole" if axis is None else "stacked")
            self.batches.append((leaf, slot, axis))
        return self.names[name]

    def number_slot(self, microbatch: int, stage: int) -> int:
        name = ("number", microbatch, stage)
        if name not in self.names:
            aval = jax.ShapeDtypeStruct((), jnp.int32)
            self.constants.append((jnp.int32(microbatch), self.slot(name, stage, aval, "whole")))
        return self.names[name]

    # -- around the pipeline ---------------------------------------------------------------------

    def give(self) -> None:
        """Batch leaves and constants that the outer program reads whole."""
        for var, stage in self.outer.given:
            slot = self.outer_slot(var, stage)
            if var in self.step.constants:
                self.constants.append((self.step.constants[var], slot))
            else:
                self.batches.append((self.step.invars.index(var), slot, None))

    def sends(self, sends: Sequence[tuple[Var, int, int]]) -> None:
        links: dict[tuple[int, int], list[Var]] = {}
        for var, src, dst in sends:
            links.setdefault((src, dst), []).append(var)
        for (src, dst), variables in links.items():
            inputs = [self.outer_slot(v, src) for v in variables]
            outputs = [
                self.outer_slot(v, dst, self.slots[i].layout)
                for v, i in zip(variables, inputs, strict=True)
            ]
            self.listed.append(Send(src, dst, tuple(inputs), tuple(outputs)))

    def segment(self, name: str, segment: Segment) -> None:
        stacked = {o.value for o in self.outer.operands if o.stacked}

        def slots(variables: Sequence[Var]) -> tuple[int, ...]:
            return tuple(
                self.outer_slot(v, segment.stage, "stacked" if v in stacked else "whole")
                for v in variables
            )

        self.programs[name] = jex.jaxpr_as_fun(
            program(segment.inputs, segment.equations, segment.outputs)
        )
        self.listed.append(Run(segment.stage, name, slots(segment.inputs), slots(segment.outputs)))
        self.sends([(v, segment.stage, to) for v, to in segment.sends])

    # -- the pipeline ----------------------------------------------------------------------------

    def pipeline(self) -> None:
        schedule = SCHEDULES[self.plan.schedule](len(self.graphs), self.slicing.micro_batches)
        roles = [
            self.roles(graph, tasks) for graph, tasks in zip(self.graphs, schedule, strict=True)
        ]
        for graph, role in zip(self.graphs, roles, strict=True):
            self.zeros(graph, role)
        for timed in timeline(self.plan):
            kind = timed.task.kind
            made = roles[timed.task.stage].get(kind)
            if made is not None:
                self.task(timed.task, *made)

    def roles(
        self, graph: StageGraph, tasks: Sequence[Task]
    ) -> dict[Kind, tuple[str, StageProgram]]:
        """Which program a stage runs for a forward and for a backward task."""
        s = graph.index
        builder = StagePrograms(
            graph,
            self.loss,
            self.outer.operands,
            self.slicing,
            self.plan.stages[s].remat,
            [i for i, stage in self.outer.result_parts if stage == s],
            [i for i, stage in self.outer.grad_parts if stage == s],
        )
        fused = not graph.activations_out and all(
            a[1:] == (b.microbatch, Kind.FORWARD) and b.kind is Kind.BACKWARD
            for a, b in zip(tasks[::2], tasks[1::2], strict=False)
        )
        found: dict[Kind, tuple[str, StageProgram]]
        if not builder.wrt or not any(t.kind is Kind.BACKWARD for t in tasks):
            found = {Kind.FORWARD: (f"stage.{s}.forward", builder.forward())}
        elif fused:
            name = f"stage.{s}.forward_backward"
            found = {Kind.BACKWARD: (name, builder.forward_backward())}
        else:
            forward, backward = builder.forward_and_backward()
            found = {
                Kind.FORWARD: (f"stage.{s}.forward", forward),
                Kind.BACKWARD: (f"stage.{s}.backward", backward),
            }
        self.programs.update((name, made.fun) for name, made in found.values())
        return found

    def zeros(self, graph: StageGraph, roles: dict[Kind, tuple[str, StageProgram]]) -> None:
        s = graph.index
        names = [n for _, made in roles.values() for n in made.accumulators]
        slots = tuple(self.part_slot(kind, i, s, 0) for kind, i in names)
        if slots:
            avals = [self.slots[slot].aval for slot in slots]
            self.programs[f"stage.{s}.zeros"] = lambda: tuple(
                jnp.zeros(a.shape, a.dtype) for a in avals
            )
            self.listed.append(Run(s, f"stage.{s}.zeros", (), slots))

    def task(self, task: Task, name: str, made: StageProgram) -> None:
        s, m, _ = task
        graph = self.graphs[s]
        parts = [self.part_slot(kind, i, s, m) for kind, i in made.accumulators]
        residuals_in = [self.names["residual", k, m, s] for k in range(made.residuals_in)]
        inputs = [
            self.number_slot(m, s),
            *(self.operand_slot(i, s) for i in made.operands),
            *(self.pipeline_slot(("activation", v, m, s), s, v.aval) for v in made.activations),
            *residuals_in,
            *(
                self.pipeline_slot(("cotangent", v, to, m, s), s, v.aval)
                for v, to in made.cotangents
            ),
            *parts,
        ]
        outputs = [
            *(self.pipeline_slot(("activation", v, m, s), s, v.aval) for v in made.activations_out),
            *(
                self.slot(("residual", k, m, s), s, aval, self.per_replica)
                for k, aval in enumerate(made.residual_avals)
            ),
            *(self.pipeline_slot(("cotangent", v, s, m, s), s, v.aval) for v in made.sends_back),
            *parts,
            *(self.part_slot(kind, i, s, m) for kind, i in made.fresh),
        ]
        donated = tuple(range(len(inputs) - len(parts), len(inputs)))
        self.listed.append(Run(s, name, tuple(inputs), tuple(outputs), donated, task))
        self.send_on(graph, made, m)

    def send_on(self, graph: StageGraph, made: StageProgram, m: int) -> None:
        """Activations to the stages that read them, cotangents to the stages that made them."""
        s = graph.index
        links: dict[int, list[tuple[int, int]]] = {}

        def copy(src_name: Any, dst_name: Any, to: int, var: Var) -> None:
            src = self.pipeline_slot(src_name, s, var.aval)
            dst = self.pipeline_slot(dst_name, to, var.aval)
            links.setdefault(to, []).append((src, dst))

        if made.activations_out:
            for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
                for to in consumers:
                    copy(("activation", v, m, s), ("activation", v, m, to), to, v)
        for v in made.sends_back:
            to = next(g.index for g in self.graphs if v in g.activations_out)
            copy(("cotangent", v, s, m, s), ("cotangent", v, s, m, to), to, v)
        for to, pairs in links.items():
            src, dst = zip(*pairs, strict=True)
            self.listed.append(Send(s, to, src, dst))

    # -- donation --------------------------------------------------------------------------------

    def donate(self, arguments: frozenset[int], protected: frozenset[int]) -> list[Run | Send]:
        """Let the update reuse the buffers it reads last, the step's `arguments` first, where a
        result of the same shape is made; so parameters and optimizer state change in place."""
        last = {s: i for i, x in enumerate(self.listed) for s in x.inputs}
        listed: list[Run | Send] = []
        for i, x in enumerate(self.listed):
            if isinstance(x, Run) and x.task is None and x.inputs:
                free = [k for k, s in enumerate(x.inputs) if last[s] == i and s not in protected]
                spare = [self.signature(s) for s in x.outputs]
                donated = []
                for k in sorted(free, key=lambda k: x.inputs[k] not in arguments):
                    if self.signature(x.inputs[k]) in spare:
                        spare.remove(self.signature(x.inputs[k]))
                        donated.append(k)
                x = dataclasses.replace(x, donated=tuple(sorted(donated)))
            listed.append(x)
        return listed

    def signature(self, slot: int) -> tuple[Any, ...]:
        held = self.slots[slot]
        return held.aval.shape, held.aval.dtype, held.layout
