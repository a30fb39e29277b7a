"""A cell of the sweep as the command line would plan it, compiled for its kind of GPU.

    python tests/gpu_compile/sweep.py FILE [NAME ...]

compiles the cells, or those whose names contain one of the words, and adds a line of JSON a cell to
the file: predicted and compiled memory of each stage, and what the compiler says. Cells that the
file has are left out.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from cells import Cell, cells

from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plans_of
from launcher.driver.planning.prepare import trace
from launcher.plan import CompiledPlan, Plan
from launcher.report.console import make_console
from launcher.runtime import compile_for, target_for

FIXED = ("task=plan", "dataset=synthetic", "train.eval_every=0", "wandb.mode=disabled")


class Compiled(NamedTuple):
    """A cell's plan, and what the compiler says of it."""

    plan: Plan
    report: CompiledPlan

    @property
    def ratios(self) -> list[float]:
        """Predicted over compiled memory, of each stage."""
        pairs = zip(self.plan.all_stages, self.report.stages, strict=True)
        return [planned.memory_bytes / stage.memory_bytes for planned, stage in pairs]


def name_of(cell: Cell) -> str:
    """The cell in one word."""
    short = (word.rpartition(".")[2].removeprefix("name=") for word in cell.words)
    return "-".join((cell.gpu, *short)).replace("=", "_")


def compile_cell(cell: Cell) -> Compiled:
    """Plan a cell and compile its programs, or read what the compiler said of them before."""
    config = load([*FIXED, *cell.words])
    traced = trace(config, make_console(sys.stderr), look(config, 0, plan_only=True))
    step = traced.program.train
    plan, *_ = plans_of(config.parallel, step, traced.cluster, nothing_fits=lambda why: None)
    return Compiled(plan, compile_for(step, plan, target_for(plan, cell.gpu)))


def main(file: str, *words: str) -> None:
    """Compile cells and add a line each to a file."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    known = {json.loads(line)["name"] for line in lines}
    for cell in cells():
        name = name_of(cell)
        if name in known or not all(word in name for word in words):
            continue
        try:
            found = compile_cell(cell)
        except Exception as error:
            row = {"name": name, "failure": f"{type(error).__name__}: {error}"}
        else:
            stages = [stage.memory_bytes for stage in found.plan.all_stages]
            row = {"name": name, "predicted": stages, "report": dataclasses.asdict(found.report)}
        with path.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
