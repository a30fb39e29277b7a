"""Compile the programs of settings for H100s that are not here, and print what they need as JSON.

usage: python tests/gpu_compile/cell.py [--choices FOLDER] [WORDS OF THE COMMAND LINE]

With a folder of XLA's choices, the programs' texts are printed; without words, a table of the
kernels of each family's programs.
"""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parent))
from cells import cells
from kernels import MOVING, kernels, waits_for_sums

from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plans_of
from launcher.driver.planning.prepare import trace
from launcher.hardware import ClusterShape
from launcher.plan.cost.formulas import all_reduce_seconds
from launcher.report.console import make_console
from launcher.runtime.emit.emit import emit
from launcher.runtime.programs.choices import KernelChoices
from launcher.runtime.programs.compile import Compilation
from launcher.runtime.programs.device_meshes import place_on_devices


def compiled(words, choices=None):
    config = load([*words, "task=plan"])
    traced = trace(config, make_console(sys.stderr), look(config, 0, plan_only=True))
    step = traced.program.train
    plan = plans_of(config.parallel, step, traced.cluster, nothing_fits=print)[0]
    target = (Path(__file__).parent / "h100.txtpb").read_text()
    topology = f"1x1x{plan.num_devices}"
    described = topologies.get_topology_desc("gpu", "cuda", target_config=target, topology=topology)
    emitted = emit(step.cut_at(plan.layer_ends), plan)
    placement = place_on_devices(plan, described.devices, emitted.slots)
    with ThreadPoolExecutor(1) as pool:
        compilation = Compilation(emitted, placement, pool, choices=choices)
        if choices:
            choices.choose()
        return plan, compilation.result()


def main(words):
    if words[0] == "--choices":
        choices = KernelChoices(Path(words[1]), "train.deterministic=true" in words)
        _, made = compiled(words[2:], choices)
        texts = {name: program.as_text() for name, program in made.items()}
        print(json.dumps({"are_new": choices.are_new, "texts": texts}))
        return
    plan, programs = compiled(words)

    first, cluster = plan.stages[0], ClusterShape(**plan.cluster)
    about = 8, cluster.intra_host, cluster.start_seconds(8)
    summing = sum(all_reduce_seconds(one.bytes, *about) for one in first.buckets)
    found = {"exposed": summing - first.hidden_seconds}
    for name, program in programs.items():
        text = program.as_text()
        sums = re.findall(r" (all-reduce|reduce-scatter|async)-start\(", text)
        temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
        found[name] = {
            "temporaries": temporaries,
            "sums": len(sums),
            "kernels": kernels(text),
            "waits": waits_for_sums(text),
        }
    print(json.dumps(found))


def table():
    """Print the kernels of each family's programs under data parallelism in bf16."""
    cells_of = {}
    for one in cells():
        if one.gpu == "h100" and {"parallel=data", "train.precision=bf16"} <= {*one.words}:
            cells_of.setdefault(one.words[0], one.words)
    print("family program", *MOVING, "all")
    for family, words in cells_of.items():
        for name, program in compiled([*words, "dataset=synthetic", "train.eval_every=0"])[
            1
        ].items():
            found = kernels(program.as_text())
            print(family, name, *(found.get(kind, 0) for kind in (*MOVING, "all")))


if __name__ == "__main__":
    main(sys.argv[1:]) if sys.argv[1:] else table()
