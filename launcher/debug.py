"""Every stage of compilation as text, for maintainers and bug reports.

`python -m launcher.debug` takes a run's folder, or settings as the command line has them. The walk
through compilation in `launcher/README.md` calls the functions here from Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.config.errors import ConfigError
from launcher.output import answer
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.partition.joint_graph import Name
    from launcher.partition.partitioned import PartitionedStep
    from launcher.partition.sharding.named_dims import Spec
    from launcher.plan import Plan
    from launcher.runtime.emit import Emitted
    from launcher.runtime.instructions import Instruction
    from launcher.trace import Loss, TracedStep


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
    from launcher.partition.partitioned import partition
    from launcher.runtime.emit import emit

    whole, step = step, step.cut_at(plan.layer_ends)
    cut = partition(step, plan.assignment)
    yield "loss", loss_text(cut.loss)
    yield "layers", layers_text(step, cut.loss)
    yield "stages", stages_text(cut)
    for graph in cut.stages:
        yield f"tasks_of_stage_{graph.index}", tasks_text(cut, graph.index)
    yield "update", update_text(cut)
    emitted = emit(step, plan)
    yield "slots", slots_text(step, emitted)
    for worker in sorted({host for stage in plan.stages for host in stage.hosts}):
        yield f"instructions_of_worker_{worker}", instructions_text(emitted, plan, worker)
    if hlo:
        import jax

        from launcher.runtime import compile_step

        programs = compile_step(whole, plan, jax.devices()).hlo_text()
        yield from ((f"hlo_of_{name}", text) for name, text in programs.items())


def loss_text(loss: Loss) -> str:
    """Return the loss on one slice of the batch as a jaxpr, without its marks."""
    from launcher.trace.jaxpr import program

    return _pretty(program(loss.invars, loss.equations, loss.outvars))


def layers_text(step: TracedStep, loss: Loss) -> str:
    """Return a jaxpr for each layer, with the operands that it reads."""
    from launcher.partition.stages import cut_stages
    from launcher.trace.jaxpr import program

    names = _operand_names(step)
    graphs = cut_stages(loss, [(layer,) for layer in range(loss.num_layers)])
    texts = []
    for graph in graphs:
        reads = ", ".join(names[i] for i in graph.operands) or "none"
        text = _pretty(program(graph.inputs, graph.equations, graph.outs))
        texts.append(f"layer {graph.index}, operands: {reads}\n{text}")
    return "\n\n".join(texts)


def stages_text(cut: PartitionedStep) -> str:
    """Return each stage with its layers, its submesh, and the spec of what it reads and sends."""
    names, labels, texts = _operand_names(cut.step), _labels(cut), []
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
        for v in graph.activations_in:
            rows.append((f"in: {labels[v]}", v.aval, layout.activation(v)))
        for v, to in zip(graph.activations_out, graph.consumers, strict=True):
            readers = ", ".join(map(str, to))
            rows.append((f"to stage {readers}: {labels[v]}", v.aval, layout.activation(v)))
        lines += _columns([(f"  {name}", _aval(aval), _spec(spec)) for name, aval, spec in rows])
        texts.append("\n".join(lines))
    return "\n".join(texts)


def tasks_text(cut: PartitionedStep, stage: int) -> str:
    """Return a jaxpr for each task program of a stage, on one slice of the batch."""
    names, labels = _operand_names(cut.step), _labels(cut)
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
        texts.append(f"{kind.value}: {inputs} -> {outputs}\n{_pretty(one.closed)}")
    return "\n\n".join(texts)


def update_text(cut: PartitionedStep) -> str:
    """Return a jaxpr for each program that runs before the pipeline and after it."""
    from launcher.trace.jaxpr import program

    texts = []
    for word, segments in (("before", cut.update.before), ("update", cut.update.after)):
        for number, segment in enumerate(segments):
            text = _pretty(program(segment.inputs, segment.equations, segment.outputs))
            texts.append(f"{word}.{number}, mesh {segment.mesh}\n{text}")
    return "\n\n".join(texts)


def slots_text(step: TracedStep, emitted: Emitted) -> str:
    """Return what each slot holds, and which leaf of the step's arguments is put there."""
    from launcher.trace.leaf_names import leaf_names

    names = leaf_names(step)
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
    """Return the instruction list of one worker, the process of host number `worker`."""
    from launcher.runtime.instructions import Free, Run

    each = int(plan.cluster["devices_per_host"])
    mine = {i for i, mesh in enumerate(plan.meshes) if worker in {d // each for d in mesh}}
    lines = []
    for x in emitted.instructions:
        if isinstance(x, Free):
            here = tuple(slot for slot in x.slots if emitted.slots[slot].mesh in mine)
            meshes, x = mine if here else set(), Free(here)
        else:
            meshes = {x.mesh} if isinstance(x, Run) else {x.src, x.dst}
        if meshes & mine:
            lines.append(_instruction(x))
    return "\n".join(lines)


def _instruction(x: Instruction) -> str:
    from launcher.runtime.instructions import Run, Send

    def slots(numbers: Iterable[int]) -> str:
        return " ".join(map(str, numbers)) or "-"

    if isinstance(x, Run):
        task = f" microbatch {x.task.microbatch}" if x.task else ""
        text = f"RUN   {x.program}{task}, mesh {x.mesh}: {slots(x.inputs)} -> {slots(x.outputs)}"
        donated = slots(x.inputs[k] for k in x.donated)
        return f"{text}, donates {donated}" if x.donated else text
    if isinstance(x, Send):
        return f"SEND  mesh {x.src} to mesh {x.dst}: {slots(x.inputs)} -> {slots(x.outputs)}"
    return f"FREE  {slots(x.slots)}"


def _operand_names(step: TracedStep) -> list[str]:
    """The names of the loss's operands: leaves of the step's arguments, or what is made of them."""
    from launcher.trace.leaf_names import leaf_names

    words: dict[Any, str] = dict.fromkeys(step.constants, "a constant")
    words |= zip(step.invars, leaf_names(step), strict=True)
    return [words.get(v, f"operand {i}") for i, v in enumerate(step.loss_equation.invars)]


def _labels(cut: PartitionedStep) -> dict[Any, str]:
    """A number for every activation that is handed from a stage to another."""
    activations = [v for graph in cut.stages for v in graph.activations_out]
    return {v: f"activation {i}" for i, v in enumerate(activations)}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _pretty(closed: Any) -> str:
    return str(closed.jaxpr.pretty_print(use_color=False))


def _aval(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _spec(spec: Spec) -> str:
    """One word a dimension: the axes that cut it, or `-`."""
    if not any(spec):
        return "whole"
    return "×".join("+".join(d) if isinstance(d, tuple) else d or "-" for d in spec)


# -- the command ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"The command line is wrong: {message}",
            "Name a run's folder, or give settings as key=value; --help shows the rest.",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print every stage of compilation of a run, or of settings; return the exit code."""
    from launcher.driver.run import guarded

    with Stop() as stop:
        try:
            with stop.interruptible():
                return guarded(lambda: _run(parse(argv)))
        except KeyboardInterrupt:
            return stop.ending[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the words, `config_dir`, `out` and `hlo` of a command line; raises ConfigError."""
    parser = _Parser(
        prog="python -m launcher.debug",
        description="Print every stage of compilation: the loss, its layers, stages, task "
        "programs, the update and the instructions of each worker.",
        allow_abbrev=False,
    )
    words = "a run's folder (its config.yaml and plan.json), or settings as of `launcher`"
    parser.add_argument("words", nargs="*", metavar="FOLDER | key=value", help=words)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write a file for each of them there"
    )
    parser.add_argument(
        "--hlo", action="store_true", help="compile as well, for CPU devices, and print the HLO"
    )
    parser.add_argument(
        "-cd", "--config-dir", action="append", default=[], metavar="DIR", help="as of `launcher`"
    )
    return parser.parse_intermixed_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    folders = [word for word in arguments.words if "=" not in word]
    settings = [word for word in arguments.words if "=" in word]
    if folders:
        step, plan = _of_run(folders, settings, arguments.hlo)
    else:
        step, plan = _of_settings(settings, arguments.config_dir, arguments.hlo)
    stages = stages_of_compilation(step, plan, arguments.hlo)
    if arguments.out is None:
        return answer("\n\n".join(f"# {name}\n\n{text}" for name, text in stages))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(stages):
        path = arguments.out / f"{number:02}_{name}.txt"
        path.write_text(f"{text}\n", encoding="utf-8")
        answer(str(path))
    return 0


def _of_run(folders: Sequence[str], settings: Sequence[str], hlo: bool) -> tuple[TracedStep, Plan]:
    """The train step and the plan of a run, whose devices need not be here."""
    from launcher.config.compose import load_frozen
    from launcher.driver.replay import another_program, no_plan, read_plan
    from launcher.plan import Plan
    from launcher.train.program import build_program

    if len(folders) > 1 or not (folder := Path(folders[0])).joinpath("config.yaml").is_file():
        raise ConfigError(
            f"{' '.join(folders)} is no run's folder, with a config.yaml",
            "Name one such as outputs/<run id>, or give settings as key=value.",
        )
    config = load_frozen(folder / "config.yaml", settings)
    path = str(folder / "plan.json")
    try:
        plan = Plan.from_dict(read_plan(path))
    except ValueError as error:  # DamagedError and PlanError are one
        raise no_plan(path, str(error)) from error
    _emulate(plan.num_devices, hlo)
    step = build_program(config).train
    if plan.fingerprint != step.fingerprint:
        raise another_program(path)
    return step, plan


def _of_settings(
    settings: Sequence[str], config_dirs: Sequence[str], hlo: bool
) -> tuple[TracedStep, Plan]:
    """The train step of settings, and the plan that `task=plan` makes of them."""
    from rich.console import Console

    from launcher.config.compose import load
    from launcher.driver.check import look
    from launcher.driver.plan_from_config import plan_of
    from launcher.driver.prepare import trace

    config = load(settings, config_dirs)
    console = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    found = look(config, 0, say, plan_only=True)
    _emulate(found.pool.num_devices if found.pool else config.cluster.gpus or 1, hlo)
    traced = trace(config, console, found)
    step = traced.program.train
    plan = plan_of(config.parallel, step, traced.cluster, say=say, nothing_fits=say)
    return step, plan


def _emulate(count: int, hlo: bool) -> None:
    """Have this process see only CPU devices, and with `hlo` as many as it compiles for."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if hlo and "device_count" not in os.environ.get("XLA_FLAGS", ""):  # JAX takes one word on it
        jax.config.update("jax_num_cpu_devices", count)


if __name__ == "__main__":
    sys.exit(main())
