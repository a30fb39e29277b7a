"""The programs of equal stages, of which one is traced."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.partition.gradient_sync import Bucket
from launcher.partition.joint_graph import Name
from launcher.partition.partitioned import PartitionedStep
from launcher.partition.stages import StageGraph
from launcher.runtime.programs.stage_programs import StageProgram, stage_programs
from launcher.schedule import Kind
from launcher.trace.ir.jaxpr import captured


@dataclass(frozen=True, eq=False)
class SharedPrograms:
    """The programs of the stages of a step.

    Attributes:
        cut: the step.
        names: what the names of each stage's programs begin with.
    """

    cut: PartitionedStep
    names: tuple[str, ...]
    _made: dict[str, tuple[StageGraph, dict[Kind, StageProgram]]] = field(default_factory=dict)

    def programs(self, stage: int) -> dict[Kind, StageProgram]:
        """Return the program that a stage runs for each kind of task; see `stage_programs`."""
        graph, key, name = self.cut.stages[stage], self.key(stage), self.names[stage]
        if key not in self._made:
            self._made[key] = graph, stage_programs(self.cut, stage, name)
        first, programs = self._made[key]
        if first is graph:
            return programs
        rename, was = _renamed(first, graph), self.names[first.index]
        return {
            kind: _as_of(program, rename, lambda word: name + word.removeprefix(was))
            for kind, program in programs.items()
        }

    def key(self, stage: int) -> str:
        """Return a key that is equal for stages whose programs are the same functions."""
        cut, layout, apart = self.cut, self.cut.layout(stage), self.cut.leaving
        graph = cut.stages[stage]
        how = [
            (
                layout.is_gathered(i),
                i in apart,
                layout.gradient(i) if (i, stage) in cut.update.grad_parts else None,
                cut.update.operands[i].stacked,
                cut.loss.slice_axes[i],
            )
            for i in graph.operands
        ]
        held = [id(x) for x in captured(graph.equations)]
        words = [cut.loss.reduce[i] for i in graph.results]
        text = repr((cut.likeness(stage), how, words, held))
        return hashlib.sha256(text.encode()).hexdigest()


def _as_of(
    program: StageProgram, rename: Callable[[Name], Name], named: Callable[[str], str]
) -> StageProgram:
    def buckets(given: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        return tuple(
            dataclasses.replace(
                b, operands=tuple(rename(Name("operand", i)).of for i in b.operands)
            )
            for b in given
        )

    return dataclasses.replace(
        program,
        name=named(program.name),
        inputs=tuple(map(rename, program.inputs)),
        outputs=tuple(map(rename, program.outputs)),
        sync=dataclasses.replace(
            program.sync, every=buckets(program.sync.every), once=buckets(program.sync.once)
        ),
        buckets=buckets(program.buckets),
        last=program.last and _as_of(program.last, rename, named),
    )


def _renamed(a: StageGraph, b: StageGraph) -> Callable[[Name], Name]:
    """Return what renames the values of a stage to those of an equal one."""
    operands = dict(zip(a.operands, b.operands, strict=True))
    results = dict(zip(a.results, b.results, strict=True))
    crossing = dict(
        zip(
            (*a.activations_in, *a.activations_out),
            (*b.activations_in, *b.activations_out),
            strict=True,
        )
    )
    back = {(v, a.index): (crossing[v], b.index) for v in a.activations_in}
    for v, mine, others in zip(a.activations_out, a.consumers, b.consumers, strict=True):
        back |= {(v, s): (crossing[v], t) for s, t in zip(mine, others, strict=True)}

    def rename(name: Name) -> Name:
        if name.kind in ("operand", "grad", "per_replica"):
            return Name(name.kind, operands[name.of])
        if name.kind == "result":
            return Name(name.kind, results[name.of])
        if name.kind == "activation":
            return Name(name.kind, crossing[name.of])
        if name.kind == "cotangent":
            return Name(name.kind, back[name.of])
        return name

    return rename
