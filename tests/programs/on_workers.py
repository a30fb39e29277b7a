"""A script that runs programs of the table on two workers, with state in a class of its own.

    python on_workers.py

Reads pairs of a program and a method as JSON; prints for each pair what is wrong, if anything.
"""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from programs.program import METHODS, assert_same, one_device, trained
from programs.table import PROGRAMS

import launcher


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """The state of any program."""

    state: Any
    note: str = dataclasses.field(default="the script's own", metadata={"static": True})


def on_workers(program, method):
    """A program with its state in `Held`, parallelized."""
    inner = program.build(launcher.value_and_grad)

    def step(held, batch):
        state, metrics = inner(held.state, batch)
        return dataclasses.replace(held, state=state), metrics

    return launcher.parallelize(step, method=METHODS[method], donate_argnums=())


def compare(name, method):
    """Hold three steps on the workers against one device."""
    program = PROGRAMS[name]
    step = on_workers(program, method)
    held = dataclasses.replace(program, init=lambda: Held(program.init()))
    got = trained(step, held)
    plan = step.last_plan
    slices = plan.num_micro_batches * plan.num_replicas
    want = one_device(program, 1 if program.reference is None else slices)
    for (a, metrics), (state, expected) in zip(got, want, strict=True):
        assert_same((a.state, metrics), (state, expected), 1e-5)


def main() -> None:
    pairs = json.loads(sys.stdin.read())
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    wrong = []
    for name, method in pairs:
        print(name, method, file=sys.stderr, flush=True)
        try:
            compare(name, method)
            wrong.append("")
        except Exception:
            wrong.append(traceback.format_exc(limit=-3))
    launcher.shutdown()
    print(json.dumps(wrong), flush=True)


main()
