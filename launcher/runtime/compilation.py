"""Text of every stage of compilation: the loss, layers, stages, tasks, update, instructions. Pure.

`launcher.debug` prints it; the walk through compilation in `launcher/runtime/README.md` calls these
functions one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from launcher.partition import Name, PartitionedStep, Spec, cut_stages, partition
from launcher.plan import Plan
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import (
    Emitted,
    Exchange,
    Free,
    Instruction,
    Run,
    Send,
    participants,
)
from launcher.runtime.programs.compile import compile_step
from launcher.trace import Jaxpr, Loss, TracedStep, leaf_names


def stages_of_compilation(
    step: TracedStep, plan: Plan, hlo: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every stage of a step's compilation, in order.

    Args:
        step: the traced step.
        plan: a plan for it.
        hlo: whether to compile the programs as well, for the CPU devices of this process, of which
            there have to be as many as the plan has.

    Raises:
        PlanError: the plan is for another program, or there are too few devices.
    """
    step = step.planned_as(plan.fingerprint)
    for number, (part, of_part) in enumerate(zip(step.parts, plan.parts, strict=True)):
        part = part.cut_at(of_part.layer_ends)
        prefix = f"loss_{number}_" if step.other_losses else ""
        cut = partition(part, of_part.assignment)
        yield f"{prefix}loss", loss_program_text(cut.loss)
        yield f"{prefix}layers", layers_text(part, cut.loss)
        yield f"{prefix}stages", stages_text(cut)
        for graph in cut.stages:
            yield f"{prefix}tasks_of_stage_{graph.index}", tasks_text(cut, graph.index)
        yield f"{prefix}update", update_text(cut)
    emitted = emit(step, plan)
    yield "slots", slots_text(step, emitted)
    for worker in sorted({host for stage in plan.all_stages for host in stage.hosts}):
        yield f"instructions_of_worker_{worker}", instructions_text(emitted, plan, worker)
    if hlo:
        programs = compile_step(step, plan, jax.devices()).hlo_text()
        yield from ((f"hlo_of_{name}", text) for name, text in programs.items())


def loss_program_text(loss: Loss) -> str:
    """Return the loss on one slice of the batch as a jaxpr, without its marks."""
    return str(Jaxpr(loss.invars, loss.equations, loss.outvars))


def layers_text(step: TracedStep, loss: Loss) -> str:
    """Return a jaxpr for each layer, with the operands that it reads."""
    names = step.operand_names
    graphs = cut_stages(loss, [(layer,) for layer in range(loss.num_layers)])
    texts = []
    for graph in graphs:
        reads = ", ".join(names[i] for i in graph.operands) or "none"
        text = str(Jaxpr(graph.inputs, graph.equations, graph.outs))
        texts.append(f"layer {graph.index}, operands: {reads}\n{text}")
    return "\n\n".join(texts)


def stages_text(cut: PartitionedStep) -> str:
    """Return each stage with its layers, its submesh, and the spec of what it reads and sends."""
    names, labels, texts = cut.step.operand_names, _labels(cut), []
    for graph in cut.stages:
        submesh, layout = cut.assignment.submeshes[graph.mesh], cut.layout(graph.index)
        data, model = submesh.logical_mesh
        layers = ", ".join(map(str, cut.assignment.layers[graph.index]))
        lines = [
            f"stage {graph.index}: layers {layers}; mesh {graph.mesh}, devices "
            f"{', '.join(map(str, submesh.devices))} as {data}x{model}; "
            f"remat {cut.assignment.remat[graph.index]}"
        ]
        rows = [(names[i], cut.loss.invars[i].aval, layout.operand(i)) for i in graph.operands]
        rows += [(f"in: {labels[v]}", v.aval, layout.activation(v)) for v in graph.activations_in]
        for v, to in zip(graph.activations_out, graph.consumers, strict=True):
            readers = ", ".join(map(str, to))
            rows.append((f"to stage {readers}: {labels[v]}", v.aval, layout.activation(v)))
        lines += _columns([(f"  {name}", _aval(aval), _spec(spec)) for name, aval, spec in rows])
        texts.append("\n".join(lines))
    return "\n".join(texts)


def tasks_text(cut: PartitionedStep, stage: int) -> str:
    """Return a jaxpr for each task program of a stage, on one slice of the batch."""
    names, labels = cut.step.operand_names, _labels(cut)
    made, _ = cut.programs(stage)
    residuals: dict[Any, int] = {}

    def named(name: Name) -> str:
        if name.kind in ("operand", "grad"):
            return f"{'gradient of ' if name.kind == 'grad' else ''}{names[name.of]}"
        if name.kind == "activation":
            return labels[name.of]
        if name.kind == "cotangent":
            return f"gradient of {labels[name.of[0]]}"
        if name.kind == "residual":
            return f"residual {residuals.setdefault(name.of, len(residuals))}"
        return "gradient of the loss" if name.kind == "seed" else f"result {name.of}"

    texts = []
    for kind, one in made.programs.items():
        outputs = ", ".join(map(named, one.outputs))
        inputs = ", ".join(map(named, one.inputs))
        texts.append(f"{kind.value}: {inputs} -> {outputs}\n{one.closed!s}")
    return "\n\n".join(texts)


def update_text(cut: PartitionedStep) -> str:
    """Return a jaxpr for each program that runs before the pipeline and after it."""
    texts = []
    for word, segments in (("before", cut.update.before), ("update", cut.update.after)):
        for number, segment in enumerate(segments):
            text = str(Jaxpr(segment.inputs, segment.equations, segment.outputs))
            texts.append(f"{word}.{number}, mesh {segment.mesh}\n{text}")
    return "\n\n".join(texts)


def slots_text(step: TracedStep, emitted: Emitted) -> str:
    """Return what each slot holds, and which leaf of the step's arguments is put there."""
    names = leaf_names(step.whole)
    given = {slot: names[i] for i, slot in emitted.arguments}
    given |= {slot: f"{names[i]}, stacked" for i, slot, axis in emitted.batches if axis is not None}
    given |= {slot: names[i] for i, slot, axis in emitted.batches if axis is None}
    given |= {slot: f"constant {value}" for value, slot in emitted.constants if value.ndim == 0}
    rows = [
        (f"{number}:", f"mesh {x.mesh}", _aval(x.aval), _spec(x.spec), given.get(number, ""))
        for number, x in enumerate(emitted.slots)
    ]
    return "\n".join(_columns(rows))


def instructions_text(emitted: Emitted, plan: Plan, worker: int) -> str:
    """Return the instruction list of one worker, the process of host number `worker`.

    Args:
        emitted: the instructions of all workers, by whose slots it is described.
        plan: the plan.
        worker: the number of the worker.
    """
    each = int(plan.cluster["devices_per_host"])
    mine = {i for i, mesh in enumerate(plan.all_meshes) if worker in {d // each for d in mesh}}
    lines = []
    for x in emitted.instructions:
        if isinstance(x, Free):
            here = tuple(slot for slot in x.slots if emitted.slots[slot].mesh in mine)
            if here:
                lines.append(_instruction(Free(here)))
        elif not mine.isdisjoint(participants(x)):
            lines.append(_instruction(x))
    return "\n".join(lines)


def _instruction(x: Instruction) -> str:

    def slots(numbers: Iterable[int]) -> str:
        return " ".join(map(str, numbers)) or "-"

    if isinstance(x, Run):
        task = f" microbatch {x.task.microbatch}" if x.task else ""
        text = f"RUN   {x.program}{task}, mesh {x.mesh}: {slots(x.inputs)} -> {slots(x.outputs)}"
        donated = slots(x.inputs[k] for k in x.donated)
        return f"{text}, donates {donated}" if x.donated else text
    if isinstance(x, Send):
        return f"SEND  mesh {x.src} to mesh {x.dst}: {slots(x.inputs)} -> {slots(x.outputs)}"
    if isinstance(x, Exchange):
        what = ", ".join(f"{spec.name} by server {spec.server}" for spec in x.specs)
        return f"EXCHANGE  {what}, mesh {x.mesh}: {slots(x.inputs)} -> {slots(x.outputs)}"
    return f"FREE  {slots(x.slots)}"


def _labels(cut: PartitionedStep) -> dict[Any, str]:
    """A number for every activation that is handed from a stage to another."""
    activations = [v for graph in cut.stages for v in graph.activations_out]
    return {v: f"activation {i}" for i, v in enumerate(activations)}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _aval(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _spec(spec: Spec) -> str:
    """One word a dimension: the axes that cut it, or `-`."""
    if not any(spec):
        return "whole"
    return "×".join("+".join(d) if isinstance(d, tuple) else d or "-" for d in spec)
