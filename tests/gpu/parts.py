"""The parts of `tests/gpu/run`, in the order of what they teach a minute.

`parts.py NAME FOLDER` runs one.
A part is a generator of (sentence, figures); each pair is printed as a line of JSON as it comes.
"""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """A part: the function `name` of the module `home`, and the seconds that it takes."""

    home: str
    name: str
    about: str
    on_gpu: int
    on_cpu: int

    @property
    def seconds(self):
        return {"gpu": self.on_gpu, "cpu": self.on_cpu}


# Where it stands, its name, the seconds it takes on a GPU and on CPUs, what it is about.
_TABLE = """
runs     default      60  45  the card's default command: step, memory, first step, recorded step
engine   sizes        75  25  six sizes of GPT in bf16: memory and step, predicted and measured
engine   parity       45  60  ten methods beside one device, of 2 and 4 stages on one GPU, too
engine   families     80  50  each family in bf16; fused, packed and windowed attention
engine   attention    20  12  cuDNN's attention inside a step, beside XLA's
engine   remat        40  40  memory of none, selective and full at 8 and 16 blocks
engine   scan         30  35  scanned blocks beside unrolled ones
engine   against_jit  45  20  the step of GPT-125M and 350M beside plain jax.jit's
engine   transfers    15   8  between host and device, and inside the device
engine   donation     15  12  state is donated, and memory stays as it is from step to step
runs     life        110 100  Ctrl-C saves, two resumes give the same bits, text is generated
runs     killed       60  50  a killed worker is replaced
runs     watchdog     60  60  a stopped worker is noticed and named
runs     traced       60  25  a recorded step with the device tracer
runs     calibrate    90  90  predictions by nominal, measured and profiled rates
engine   sharing      40  45  two processes that share the GPU, by pulls and by collectives
runs     precision    60  50  losses in bf16 beside fp32
runs     recipes     200  50  every recipe beside a CPU device
runs     all_gpus    120  70  methods on all GPUs
runs     hidden       30   5  a GPU that the user hides is not used
"""
PARTS = [
    Part(home, name, about, int(on_gpu), int(on_cpu))
    for home, name, on_gpu, on_cpu, about in (
        row.split(maxsplit=4) for row in _TABLE.strip().splitlines()
    )
]


def main(name, folder):
    os.environ["GPU_TESTS_PART"] = str(os.getpid())  # whoever bears it later was left behind
    (part,) = (part for part in PARTS if part.name == name)
    found = getattr(importlib.import_module(part.home), name)(Path(folder))
    for figure, told in found:
        print(json.dumps({"figure": figure, **told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
