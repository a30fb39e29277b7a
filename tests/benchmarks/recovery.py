"""How long a run of the default model takes from a worker's end to the next new step.

    python tests/benchmarks/recovery.py [rounds] [--methods data zero3 manual auto]

In each round, each method trains on 2 hosts of 2 emulated devices with dropout. At a random step
after a worker of each host is likely to stand by, a random worker is killed, in every second round
with its host's memory; in every third round once more a few steps after the first new one, mostly
before others stand by. A step is new if it is after the newest one recorded before the
restart. Prints the seconds to it beside those that the same run took from its command to its first
step. A first run of each method, which nobody disturbs and whose start is not counted, says what
bytes each must come to. Ends with an error if one comes to others, or leaves a process or a folder
behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from turns import ROOT, table

from launcher.cluster.ray.scratch import memory_folder

sys.path.append(str(ROOT / "tests" / "end_to_end"))
from launched import Launcher, lines, losses, summary

STEPS, FIRST_KILL, NEXT_KILL = 150, (45, 115), (3, 20)
WORDS = (
    *("cluster=emulated", "cluster.hosts=2", "cluster.gpus=4", "model.dropout=0.1"),
    *(f"train.steps={STEPS}", "train.eval_every=0", "report=none"),
)
METHODS = {
    "data": ("parallel=data",),
    "zero3": ("parallel=zero3",),
    "manual": ("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=4"),
    "auto": ("parallel=auto",),
}


class Recovery(NamedTuple):
    """A recovery.

    Attributes:
        seconds: from a kill to the first new step.
        start: the seconds of the run's start.
        repeated: the steps that were repeated.
        source: where the state was resumed from: `memory`, or the checkpoint.
    """

    seconds: float
    start: float
    repeated: int
    source: str


def trained(folder: Path, method: str, name: str, kills: int, host: bool) -> list[Recovery]:
    """Train to the end with so many kills, each of a random worker, or with its host's memory."""
    run, found = folder / "outputs" / name, []
    launcher = Launcher(folder, *WORDS, *METHODS[method], f"run.id={name}", deadline=900)
    launcher.wait_for(lambda: newest(run) >= 1)
    memory = memory_folder(launcher.workers()[0].environ())
    due = random.randint(*FIRST_KILL)
    for _ in range(kills):
        launcher.wait_for(lambda: newest(run) >= due)  # noqa: B023
        found.append(killed(launcher, run, memory if host else None))
        due = newest(run) + random.randint(*NEXT_KILL)
    code, out, err = launcher.end()
    assert code == 0, f"{out}\n{err}"
    assert memory is None or not memory.exists(), memory
    assert summary(run)["restarts"] == kills, err
    start = summary(run)["time_to_first_step_seconds"]
    resumed = re.findall(rf"resuming run {name} at .*? from (\S+?)(?:; .*?(\d+))?\n", out)
    assert len(resumed) == kills, out
    both = zip(found, resumed, strict=True)
    return [Recovery(seconds, start, int(n or 0), source) for seconds, (source, n) in both]


def killed(launcher: Launcher, run: Path, memory: Path | None) -> float:
    """Kill a random worker, and delete the folder of its host in `memory`, if that is given.

    Returns the seconds to the first step that no attempt had recorded.
    """
    hosts = [each["process"] for each in json.loads((run / "plan.json").read_text())["workers"]]
    victim = random.choice(launcher.workers())
    victim.kill()
    if memory is not None:
        host = memory / f"host_{hosts.index(victim.pid)}"
        shutil.rmtree(host.rename(memory / "lost"))  # so that nobody writes there meanwhile
    began, before = time.monotonic(), 0

    def replaced() -> bool:
        nonlocal before
        before = max(before, newest(run))
        plan = json.loads((run / "plan.json").read_text())
        return all(worker["process"] != victim.pid for worker in plan["workers"])

    launcher.wait_for(replaced)
    launcher.wait_for(lambda: newest(run) > before)
    return time.monotonic() - began


def newest(run: Path) -> int:
    """Return the newest step of a run's metrics."""
    return max((line["step"] for line in lines(run)), default=0)


def check_equal(run: Path, undisturbed: Path) -> None:
    """Check that two runs have the same losses and final state, byte for byte."""
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    assert losses(run) == losses(undisturbed), run
    states = []
    for folder in (run, undisturbed):
        with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
            states.append(manager.restore(STEPS, args=ocp.args.StandardRestore()))
    jax.tree.map(np.testing.assert_array_equal, *states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    args = parser.parse_args()
    found: dict[str, list[Recovery]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for method in args.methods:
            trained(folder, method, method, kills=0, host=False)
        for number, method in itertools.product(range(args.rounds), args.methods):
            run, lost = f"{method}-{number}", "host" if number % 2 else "worker"
            kills = 2 if number % 3 == 2 else 1
            new = trained(folder, method, run, kills, host=lost == "host")
            check_equal(folder / "outputs" / run, folder / "outputs" / method)
            found.setdefault(f"{method}, a {lost}", []).extend(new)
            for each in new:
                line = f"{each.seconds:.2f} s of {each.start:.2f} s, from {each.source}"
                print(f"{run}, a {lost}: {line}, {each.repeated} steps repeated", flush=True)
    rows = [summed(method, each) for method, each in found.items()]
    rows.append(summed("all", [each for one in found.values() for each in one]))
    head = "kill to new step, s", "start, s", "median ratio", "p90", "most repeated", "from memory"
    table(("", *head), rows)


def summed(name: str, found: list[Recovery]) -> tuple[str, float, float, float, float, str, str]:
    """Return a row of the table: medians, the ratios' median and 90th percentile."""
    ratios = [each.seconds / each.start for each in found]
    seconds, start = (statistics.median(each[k] for each in found) for k in (0, 1))
    p90 = float(np.quantile(ratios, 0.9, method="higher"))
    repeated = str(max(each.repeated for each in found))
    in_memory = f"{sum(each.source == 'memory' for each in found)} of {len(found)}"
    return name, seconds, start, statistics.median(ratios), p90, repeated, in_memory


if __name__ == "__main__":
    main()
