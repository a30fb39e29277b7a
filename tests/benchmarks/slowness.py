"""How surely a run names what slows it.

    python tests/benchmarks/slowness.py [rounds] [--recorded 40]

In each round a small GPT trains in two stages, on two hosts of one emulated device each, all of
them processes of their own. One after another a host, the link, the data, garbage collection and
the dispatch of programs are slowed, by 10 to 50 % of a step, until the run names a cause or 100
steps have passed, as batches are read ahead; in between, all is as before. See `slowed.py`.

Then steps are recorded of a training in this process, and single spots of them made longer by 3 to
10 % of the step. Prints how many causes are named, and how often one is where nothing is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["NPROC"] = "16"  # threads of JAX's client: a device that waits takes one

import slowed
from turns import ROOT, table

sys.path += [str(ROOT / "tests" / "end_to_end"), str(ROOT / "tests" / "driver")]
from launched import Launcher, lines
from trained_here import Training

from launcher.base.spans import Clock
from launcher.driver.callback import Callbacks
from launcher.driver.record import slowness
from launcher.driver.record.slow import (
    DATA,
    DISPATCH,
    GARBAGE,
    LINK,
    STAGE,
    Monitor,
    Spot,
    StepSample,
)
from launcher.driver.record.step_log import StepLog, warm_up

MODEL = (
    *("model.num_layers=4", "model.hidden_size=16", "model.num_heads=2", "model.vocab_size=64"),
    *("model.sequence_length=16", "train.global_batch_size=8", "parallel.num_micro_batches=4"),
)
WORDS = (
    *MODEL,
    *("parallel=manual", "parallel.num_stages=2"),
    *("parallel.cost=model", "cluster=emulated", "cluster.hosts=2", "cluster.gpus=2"),
    *("dataset=custom", "dataset.module=slowed", "allow_modules=[slowed]", "report=none"),
    *("train.steps=100000", "train.eval_every=0", "train.checkpoint.every_minutes=0"),
    "train.snapshot=off",
)
KINDS = ("host", "link", "data", "garbage", "dispatch")
CAUSES = {
    STAGE: "stage {}",
    LINK: "the link of stage {}",
    DATA: "the data of {}",
    GARBAGE: "garbage collection in {}",
    DISPATCH: "the dispatch of programs in {}",
}
NORMAL, CALM, LONGEST = 60, 25, 100  # steps


class Named(NamedTuple):
    """A slowness, and what the run named.

    Attributes:
        kind: of `KINDS`.
        wanted: its cause, as the run is to name it.
        cause: what was named; "" if nothing was.
        steps: the steps until then.
        slower: the share by which steps took longer.
    """

    kind: str
    wanted: str
    cause: str
    steps: int
    slower: float


class Watched:
    """A run, and what it says of itself."""

    def __init__(self, folder: Path, name: str) -> None:
        shutil.copy(slowed.__file__, folder)
        self._folder, self._run = folder, folder / "outputs" / name
        self.tell("", 0, 0.0)
        self.launcher = Launcher(folder, *WORDS, f"run.id={name}", deadline=900)

    def tell(self, kind: str, worker: int, seconds: float) -> None:
        """Have a worker slowed from now on."""
        partial = self._folder / "now.partial"
        partial.write_text(json.dumps({"kind": kind, "worker": worker, "seconds": seconds}))
        partial.rename(self._folder / "now.json")

    @property
    def step(self) -> int:
        """The newest step."""
        return max((line["step"] for line in lines(self._run)), default=0)

    @property
    def cause(self) -> str:
        """What the run names now."""
        try:
            status = json.loads((self._run / "status.json").read_text())
        except (OSError, ValueError):
            return ""
        return (status["slow"] or "").partition(" has slowed")[0]

    def wait_for(self, step: int) -> None:
        """Wait for a step."""
        self.launcher.wait_for(lambda: self.step >= step)

    def seconds(self, count: int) -> float:
        """The median time of the newest steps."""
        return statistics.median(x["perf/step_seconds"] for x in lines(self._run)[-count:])


def watched(run: Watched, kind: str) -> Named:
    """Slow the run until it names a cause, then let it recover."""
    worker, share, base = random.randrange(2), random.uniform(0.1, 0.5), run.seconds(CALM)
    ends = f"{1 - worker} to {worker}"
    wanted, seconds = {
        "host": (f"host {worker} (stage {worker})", share * base),
        "link": (f"the link of stage {ends}", share * base / 2),  # each; some are hidden
        "data": (f"the data of worker {worker}", (1 + share) * base),
        "garbage": (f"garbage collection in worker {worker}", (1 + share) * base),
        "dispatch": (f"the dispatch of programs in worker {worker}", (1 + share) * base),
    }[kind]
    first = run.step
    run.tell(kind, worker, seconds)
    run.launcher.wait_for(lambda: run.cause or run.step >= first + LONGEST)
    cause, taken = run.cause, run.step - first
    slower = run.seconds(max(taken - 5, 5)) / base - 1
    run.tell("", 0, 0.0)
    run.launcher.wait_for(lambda: not run.cause)
    return Named(kind, wanted, cause, taken, slower)


def in_processes(folder: Path, number: int) -> tuple[list[Named], int]:
    """Train once; return what was named, and how often something was while nothing was slow."""
    run, found, alarms = Watched(folder, f"run-{number}"), [], 0
    run.wait_for(NORMAL)
    for kind in random.sample(KINDS, len(KINDS)):
        calm = run.step + CALM
        run.launcher.wait_for(lambda: run.cause or run.step >= calm)  # noqa: B023
        alarms += bool(run.cause)
        run.launcher.wait_for(lambda: not run.cause)
        found.append(watched(run, kind))
        print(f"  {found[-1]}", flush=True)
    run.launcher.process.send_signal(signal.SIGINT)
    run.launcher.end()
    return found, alarms


class Recorded(Training):
    """A training whose samples are kept."""

    def step_log_of(self, plan: Any) -> StepLog:
        watch = slowness.Slowness(plan, warm_up(0))
        watch.begin([Clock()])
        return StepLog(self._log, 1, lambda seconds: {}, callbacks=Callbacks(watch))


def recorded(folder: Path, count: int) -> tuple[list[Named], int]:
    """Make single spots slow in recorded samples; return what was named, and the alarms before."""
    samples: list[StepSample] = []
    taken, Monitor.add = Monitor.add, lambda self, sample: samples.append(sample)  # type: ignore
    words = *MODEL, "model=gpt", "train.steps=400", "train.eval_every=1000"
    slowed.hold_up()
    Recorded(folder, *words, "parallel.num_stages=4", "cluster.gpus=4").run()
    Monitor.add = taken  # type: ignore[method-assign]
    samples, found, alarms = samples[5:], [], 0
    spots = sorted(set.intersection(*(set(sample.seconds) for sample in samples)))
    for _ in range(count):
        spot, share = random.choice(spots), random.uniform(0.03, 0.1)
        begin, monitor, told = random.randrange(15, len(samples) - 10), Monitor(), []
        for k, sample in enumerate(samples[: begin + 10]):
            one = longer(sample, spot, share) if k >= begin else sample
            told.append(monitor.add(one))
        alarms += any(told[:begin])
        cause, steps = "", 0
        for sample, one in zip(samples[begin:], told[begin:], strict=False):
            if one and not cause:
                cause, steps = one.cause, sample.step - samples[begin].step
        found.append(Named(spot.kind, CAUSES[spot.kind].format(spot.name), cause, steps, share))
    return found, alarms


def longer(sample: StepSample, spot: Spot, share: float) -> StepSample:
    """Return a sample whose step takes a share longer, all of it at one spot."""
    more = share * sample.step_seconds
    seconds = {**sample.seconds, spot: sample.seconds[spot] + more}
    return replace(sample, step_seconds=sample.step_seconds + more, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=6)
    parser.add_argument("--recorded", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    found: list[Named] = []
    alarms = 0
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.rounds):
            print(f"round {number}", flush=True)
            new, false = in_processes(Path(name), number)
            found, alarms = found + new, alarms + false
        show(found, f"{alarms} of {args.rounds} runs")
        samples, alarms = recorded(Path(name) / "recorded", args.recorded)
        show(samples, f"{alarms} of {args.recorded} recorded runs")


def show(found: list[Named], alarms: str) -> None:
    """Print a table by kinds."""
    kinds = dict.fromkeys(x.kind for x in found)
    rows = [row(kind, [x for x in found if x.kind == kind]) for kind in kinds]
    heads = "named rightly", "otherwise", "most steps to it", "steps were slower by"
    table(("", *heads), [*rows, row("all", found)] if found else [])
    print(f"something was named while nothing was slow in {alarms}")


def row(kind: str, found: list[Named]) -> tuple[str, str, str, str, str]:
    right = [x for x in found if x.cause == x.wanted]
    wrong = Counter(x.cause or "nothing" for x in found if x.cause != x.wanted)
    others = ", ".join(f"{cause} ({count})" for cause, count in wrong.items())
    steps = str(max((x.steps for x in right), default=0))
    slower = f"{min(x.slower for x in found):.0%} to {max(x.slower for x in found):.0%}"
    return kind, f"{len(right)} of {len(found)}", others, steps, slower


if __name__ == "__main__":
    main()
