"""Result of compiling a plan's programs: memory, collectives, and what does not compile.

Pure data: `compiled` in a `plan.json`. `launcher.runtime.compiled_report` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompiledCollectives:
    """Collectives of one kind in a compiled program, of one run of it.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        axis: the axes of the logical mesh along which its groups lie: "data", "model" or "data and
            model".
        group_size: the devices of a group.
        count: their number. Those in a loop count once for each of its turns, if it says how many.
        bytes: bytes of their arrays on one device, where they are not sharded along the axis.
        exposed_bytes: of these bytes, those beside which nothing is scheduled to compute.
    """

    kind: str
    axis: str
    group_size: int
    count: int
    bytes: int
    exposed_bytes: int


@dataclass(frozen=True)
class CompiledProgram:
    """A program as it was compiled, with its bytes on one device.

    Attributes:
        names: the programs that it stands for, which are equal.
        argument_bytes: of its arguments.
        result_bytes: of its results.
        aliased_bytes: of the results that take the place of arguments.
        temporary_bytes: of what it needs beside these while it runs.
        collectives: its collectives.
    """

    names: tuple[str, ...]
    argument_bytes: int
    result_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    collectives: tuple[CompiledCollectives, ...] = ()


@dataclass(frozen=True)
class CompiledStage:
    """The most that a device of a stage holds during a step, as compiled.

    Attributes:
        predicted_bytes: the peak as the plan predicted it.
        memory_bytes: the peak, with all stages on its mesh; None: a program does not compile, or
            does not say what it needs.
        state_bytes: of the step's arguments but for the batch, such as parameters.
        temporary_bytes: what the program that runs at the peak needs beside arguments and results.
        program: the program that runs at the peak.
    """

    predicted_bytes: int
    memory_bytes: int | None
    state_bytes: int
    temporary_bytes: int = 0
    program: str = ""


@dataclass(frozen=True)
class CompileError:
    """A program that does not compile.

    Attributes:
        program: its name.
        stages: the stages of its mesh.
        message: the compiler's sentence.
    """

    program: str
    stages: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class CompiledPlan:
    """What a compiler makes of a plan's programs.

    Attributes:
        device: the kind of device that they are compiled for.
        stages: the stages' memory, in the order of `Plan.all_stages`.
        programs: the distinct programs.
        errors: what does not compile.
        seconds: how long it took.
    """

    device: str
    stages: tuple[CompiledStage, ...]
    programs: tuple[CompiledProgram, ...]
    errors: tuple[CompileError, ...]
    seconds: float

    def missing_bytes(self, capacity: int | None) -> int:
        """Return the bytes that the fullest stage has over a device's capacity, if it is known."""
        known = [stage.memory_bytes for stage in self.stages if stage.memory_bytes is not None]
        return 0 if capacity is None else max(0, max(known, default=0) - capacity)
