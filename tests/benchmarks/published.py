"""Runs that others published, as our plans: how long they are said to take, and what they need.

    python tests/benchmarks/published.py [--fit] [--known FILE] [WORD ...]

Plans each run, or those whose names hold one of the words: 3 to 10 s of a core for each. `--known`
appends each plan's price to a file, and takes from it what is there: delete it when the planner
changes. Prints a line a row: seconds of a step, those by our plan and by the formula
6 * parameters * tokens / (peak * 0.45), the memory that the plan is said to need, the device's, and
whether it is refused. Then, by source and by group of runs that were measured together: the mean
error, the 90th percentile, the bias (predicted over measured, the median), the rank correlation,
the regret (what the plan that is said to be fastest takes over the fastest), and those of the
formula.

The share inside is that of the runs within the predictions' 80 % intervals.

`--fit` fits the rates that the planner takes GPUs to sustain, by robust least squares on the
logarithms of predicted over measured: each plan's terms are re-weighted, and what it takes once a
step stays what it is. It prints the factor of each rate, the errors with them, and those of the
runs of each model by rates fitted to all others. It fails where these, or the intervals, are beyond
the bounds below.

`published.json` holds the rows with their sources, and what of a source's framework, kernels and
network a plan has to be told; our own programs differ. Left out of the shares that are refused are
those that ran by ways that no method of ours has, ZeRO-1, and those whose microbatch is not told:
of these the fastest of several is taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from scipy.optimize import least_squares
from scipy.stats import spearmanr
from turns import table

from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import shape_of, trace
from launcher.hardware import ClusterShape
from launcher.plan import Plan
from launcher.plan.build import PlanBuilder, PlanLoads
from launcher.plan.cost.formulas import PassParts, pass_seconds
from launcher.plan.cost.stage_seconds import links_of, pass_parts
from launcher.trace import TracedStep

FILE = Path(__file__).with_suffix(".json")
_CLUSTERS = {
    "h100-sxm-80gb": ("cluster=h100_8_x16",),
    "a100-80gb": ("cluster=a100_8_x8",),
    "a100-40gb": ("cluster=p4d_24xlarge_x4",),
}
_GIB = 2**30
_FORMULA = 0.45  # of the peak
# The most mean error and 90th percentile of a source, in percent, leaving one model out.
_BOUNDS = {
    "mosaicml-mpt": (6, 12),
    "vtrain-multi": (10, 20),
    "megatron2021": (7, 12),
    "bigscience176b": (9, 18),
}
_WIDEST, _INSIDE = 15, (70, 90)  # of intervals, in percent: the median half width, the share inside


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run of a GPT.

    Attributes:
        id: its source and number.
        model: a name.
        gpu: the kind of device.
        gpus: how many of them.
        data: degree of data parallelism, as `tensor` and `pipeline` are of theirs.
        zero: what is cut over `data`: 1 the optimizer's state, 2 gradients, too, 3 parameters, too.
        micro_batch: samples of a replica's microbatch; None: not said.
        global_batch: samples of a step.
        sequence: tokens of a sample.
        precision: as its source has it.
        remat: "full" or "none".
        seconds: of a step; None: it ran out of memory.
        memory_gb: what its source says that a device holds, or None.
        group: runs that were measured together; None: alone.
        layers: of the model, as what follows.
        told: settings that say what its framework, kernels and network are.
    """

    id: str
    model: str
    gpu: str
    gpus: int
    data: int
    tensor: int
    pipeline: int
    zero: int
    micro_batch: int | None
    global_batch: int
    sequence: int
    precision: str
    remat: str
    seconds: float | None
    memory_gb: float | None
    group: str | None
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    told: tuple[str, ...]

    @property
    def source(self) -> str:
        """The name of its source."""
        return self.id.partition("/")[0]

    @property
    def is_ours(self) -> bool:
        """Whether one of our methods says what it did."""
        cut = self.tensor * self.pipeline > 1
        return self.micro_batch is not None and not (self.zero and cut) and self.zero != 1

    @property
    def formula_seconds(self) -> float:
        """What 6 operations a parameter and token take at a share of the peak."""
        parameters = 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        peak = 989e12 if self.gpu.startswith("h100") else 312e12
        done = 6 * parameters * self.global_batch * self.sequence
        return done * (4 / 3 if self.remat == "full" else 1) / (self.gpus * peak * _FORMULA)


def rows() -> Iterator[Row]:
    """Yield the published rows."""
    known: dict[str, Any] = json.loads(FILE.read_text())
    for values in known["rows"]:
        row = dict(zip(known["columns"], values, strict=True))
        shape = zip(known["model_columns"], known["models"][row["model"]], strict=True)
        source = known["sources"][row["id"].partition("/")[0]]
        told = *source["settings"], *source.get("settings_by_gpu", {}).get(row["gpu"], ())
        yield Row(**row, **dict(shape), told=told)


def of_program(row: Row) -> tuple[str, ...]:
    """Return what a row's program follows from, as the words of a command line."""
    return (
        *("task=plan", "dataset=synthetic", "train.eval_every=0", "wandb.mode=disabled"),
        *("model=gpt", f"model.num_layers={row.layers}", f"model.hidden_size={row.hidden}"),
        *(f"model.num_heads={row.heads}", f"model.sequence_length={row.sequence}"),
        f"model.vocab_size={row.vocabulary}",
        *("train.precision=bf16", f"train.global_batch_size={row.global_batch}"),
        *_CLUSTERS[row.gpu],
        *(f"cluster.gpus={row.gpus}", f"cluster.hosts={-(-row.gpus // 8)}"),
        *(word for word in row.told if word.startswith("model.")),
    )


def settings(row: Row) -> list[str]:
    """Return a row as the words of a command line."""
    micro_batches = row.global_batch // (row.data * (row.micro_batch or 1))
    words = [
        *of_program(row),
        *(f"parallel.remat={row.remat}", f"parallel.num_micro_batches={micro_batches}"),
        *(word for word in row.told if word.startswith("cluster.device.")),
        *(word for word in row.told if row.gpus > 8 and word.startswith("cluster.links.")),
    ]
    if row.precision.startswith("pure"):
        words.append("parallel.reduce_dtype=bf16")
    if row.tensor * row.pipeline > 1:
        axes = {"data": row.data, "model": row.tensor, "pipeline": row.pipeline}
        return [*words, "parallel=three_d", *(f"parallel.{k}={n}" for k, n in axes.items())]
    return [*words, f"parallel={f'zero{row.zero}' if row.zero > 1 else 'data'}"]


@functools.lru_cache(maxsize=1)
def traced(words: tuple[str, ...]) -> TracedStep:
    """Return the train step of a command line."""
    config = load(words)
    return trace(config, Console(quiet=True), look(config, 0, plan_only=True)).program.train


def plan(row: Row) -> tuple[Plan, PlanLoads]:
    """Return our plan of a row, whether it fits or not, and what its stages do."""
    found: list[PlanLoads] = []

    def seen(of: PlanBuilder, *given: Any) -> PlanLoads:
        found.append(loads(of, *given))
        return found[-1]

    config, loads = load(settings(row)), PlanBuilder.loads
    with mock.patch.object(PlanBuilder, "loads", seen):  # they are found once, as it plans
        made = plan_of(config.parallel, traced(of_program(row)), shape_of(config, None, None))
    return made, found[-1]


# What is fitted: the fields of `ClusterShape` that take no time in the second of two clusters.
_RATES = {
    "products": {"flops": np.inf, "flops_fp32": np.inf},
    "attention": {"attention_flops": np.inf},
    "elements": {"memory_bandwidth": np.inf},
    "latency": {"latency": 0.0},
    "launch": {"launch_seconds": 0.0},
}
_PARTS = [field.name for field in dataclasses.fields(PassParts)]


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a plan's stages take for a microbatch, by what it follows from.

    Attributes:
        cluster: the devices.
        micro_batches: number of microbatches.
        stages: of stages that do the same: their number, whether both passes are one program,
            whether they are the first, and seconds `[part, rate]` of `PassParts`; the last column
            follows from no rate that is fitted.
        rest: the plan's seconds beside those of microbatches.
    """

    cluster: ClusterShape
    micro_batches: int
    stages: tuple[tuple[int, bool, bool, np.ndarray], ...]
    rest: float

    def seconds(self, factors: Mapping[str, float]) -> float:
        """Return the seconds of a step with the time of each of `_RATES` times a factor.

        A pipeline takes each microbatch's seconds on its slowest stage, and those of a microbatch
        on each of the others.
        """
        by = np.array([*(factors[name] for name in _RATES), 1.0])
        counts = np.array([count for count, *_ in self.stages])
        found = np.array(
            [self._stage(as_one, first, of @ by) for _, as_one, first, of in self.stages]
        )
        each = self.micro_batches * found.max() + (counts @ found) * (1 - 1 / counts.sum())
        return float(each + self.rest)

    def _stage(self, as_one: bool, is_first: bool, parts: np.ndarray) -> float:
        given = PassParts(*map(float, parts))
        made = pass_seconds(given, self.cluster, as_one, is_first, splits=False)
        return float(made.forward + made.backward)


def terms(found: Plan, loads: PlanLoads) -> Terms:
    """Return the terms of a plan's price."""
    cluster = ClusterShape(**found.cluster)
    without = [dataclasses.replace(cluster, **free) for free in _RATES.values()]
    counts = Counter(map(id, loads.stages))
    stages = []
    for graph, does in zip(loads.cut.stages, loads.stages, strict=True):
        if count := counts.pop(id(does), 0):
            links = links_of(loads.cut.assignment.own_submesh(graph.mesh), cluster)
            whole, *less = (
                np.array(dataclasses.astuple(pass_parts(does, each, links)), float)
                for each in (cluster, *without)
            )
            by = [whole - one for one in less]
            stages.append((count, does.as_one, does.is_first, np.array([*by, whole - sum(by)]).T))
    given = Terms(cluster, found.num_micro_batches, tuple(stages), 0.0)
    rest = found.predicted_step_seconds - given.seconds(dict.fromkeys(_RATES, 1.0))
    return dataclasses.replace(given, rest=rest)


@dataclasses.dataclass(frozen=True)
class Priced:
    """A row with what our plan says of it.

    Attributes:
        row: the row.
        predicted: seconds of a step.
        within: half the width of its interval.
        needed: bytes of the device that needs most.
        usable: bytes of a device that a plan may fill.
        terms: what its seconds follow from.
    """

    row: Row
    predicted: float
    within: float
    needed: int
    usable: int
    terms: Terms


def priced(row: Row) -> Priced:
    """Return a row with its plan; where its microbatch is not told, with the fastest."""
    most = row.global_batch // row.data
    sizes = [row.micro_batch] if row.micro_batch else [n for n in (1, 2, 4, 8) if most % n == 0]
    every = [plan(dataclasses.replace(row, micro_batch=n)) for n in sizes]
    found, does = min(every, key=lambda one: one[0].predicted_step_seconds)
    needed = max(stage.memory_bytes for stage in found.all_stages)
    said = found.predicted_step_seconds, found.predicted_within, needed
    return Priced(row, *said, found.cluster["memory_bytes"], terms(found, does))


def to_json(one: Priced) -> str:
    tree = dataclasses.asdict(one) | {"row": one.row.id}
    return json.dumps(tree, default=np.ndarray.tolist)


def from_json(line: str, of: Mapping[str, Row]) -> Priced:
    tree = json.loads(line)
    known = tree.pop("terms")
    stages = tuple((*does, np.array(parts)) for *does, parts in known["stages"])
    found = Terms(ClusterShape(**known["cluster"]), known["micro_batches"], stages, known["rest"])
    return Priced(**tree | {"row": of[tree["row"]], "terms": found})


def all_priced(wanted: Sequence[Row], known: Path | None) -> list[Priced]:
    """Return rows with their plans, those that a file has from there; others are appended to it."""
    of = {row.id: row for row in rows()}
    found: dict[str, Priced] = {}
    if known and known.exists():
        every = (from_json(line, of) for line in known.read_text().splitlines())
        found = {one.row.id: one for one in every}
    for row in sorted(wanted, key=of_program):  # those of one program share its trace
        if row.id not in found:
            one = found[row.id] = priced(row)
            print(row.id, row.seconds, one.predicted, file=sys.stderr, flush=True)
            if known:
                with known.open("a") as file:
                    print(to_json(one), file=file)
    return [found[row.id] for row in wanted]


Measure = Callable[[Priced], float]


def scores(of: Sequence[Priced], predicted: Measure) -> tuple[Any, ...]:
    """Return the mean error, the 90th percentile and the bias of a way to predict, in percent."""
    ratios = np.array([predicted(one) / (one.row.seconds or np.nan) for one in of])
    errors = 100 * np.abs(ratios - 1)
    return errors.mean(), np.percentile(errors, 90), 100 * (np.median(ratios) - 1)


def inside(of: Sequence[Priced], predicted: Measure) -> tuple[float, float]:
    """Return the share of runs inside the intervals, and their median half width, in percent."""
    logs = np.array([np.log(predicted(one) / (one.row.seconds or np.nan)) for one in of])
    widths = np.array([one.within for one in of])
    return 100 * float((np.abs(logs) <= np.log1p(widths)).mean()), 100 * float(np.median(widths))


def ranks(of: Sequence[Priced], predicted: Measure) -> tuple[Any, ...]:
    """Return the rank correlation and the regret of a way to predict runs measured together.

    Runs of several lengths are compared by their seconds over those of the formula.
    """
    said = np.array([predicted(one) / one.row.formula_seconds for one in of])
    took = np.array([(one.row.seconds or np.nan) / one.row.formula_seconds for one in of])
    spread = len({*said.round(9)}) > 1
    return spearmanr(said, took).statistic if spread else "-", took[said.argmin()] / took.min()


def by(of: Iterable[Priced], key: Callable[[Row], str | None]) -> dict[str, list[Priced]]:
    """Return the runs that were measured, by a key; those without one are left out."""
    found = defaultdict(list)
    for one in of:
        if one.row.seconds and (name := key(one.row)):
            found[name].append(one)
    return found


def say(title: str, of: Sequence[Priced], predicted: Measure) -> None:
    """Print the errors of a way to predict, by source and group, beside the formula's."""
    formula = lambda one: one.row.formula_seconds  # noqa: E731
    print(f"\n{title}")
    heads = "", "runs", "mean %", "p90 %", "bias %", "inside %", "± %", "formula: mean %"
    sources = by(of, lambda row: row.source)
    table(
        (*heads, "p90 %", "bias %"),
        [
            (name, len(x), *scores(x, predicted), *inside(x, predicted), *scores(x, formula))
            for name, x in sources.items()
        ],
    )
    groups = {name: some for name, some in by(of, lambda row: row.group).items() if len(some) > 2}
    heads = ("", "runs", "rank", "regret", "formula: rank", "regret")
    table(
        heads,
        [
            (name, len(some), *ranks(some, predicted), *ranks(some, formula))
            for name, some in groups.items()
        ],
    )


def fitted_names(row: Row) -> dict[str, str]:
    """Return the name of the factor that each rate of a run has: some are a kind of device's."""
    gpu, eager = row.gpu.partition("-")[0], "mosaicml" if "mosaicml" in row.id else "others"
    own = {"products": gpu, "attention": gpu, "launch": eager}
    return {rate: f"{rate} {own[rate]}" if rate in own else rate for rate in _RATES}


def fit(of: Sequence[Priced]) -> dict[str, float]:
    """Return the factors of the rates' times that fit runs best, near 1 where they say nothing."""
    ran = [one for one in of if one.row.seconds]
    names = sorted({name for one in ran for name in fitted_names(one.row).values()})

    def left(logs: np.ndarray) -> np.ndarray:
        factors = dict(zip(names, np.exp(logs), strict=True))
        errors = [np.log(reweighted(one, factors) / one.row.seconds) for one in ran]
        return np.array([*errors, *(0.05 * logs)])

    found = least_squares(left, np.zeros(len(names)), loss="soft_l1", f_scale=0.08)
    return dict(zip(names, map(float, np.exp(found.x)), strict=True))


def reweighted(one: Priced, factors: Mapping[str, float]) -> float:
    """Return the seconds of a run by its terms, each times its factor, or 1."""
    own = {rate: factors.get(name, 1.0) for rate, name in fitted_names(one.row).items()}
    return one.terms.seconds(own)


def beyond(of: Sequence[Priced], predicted: Measure) -> list[str]:
    """Return which bounds a way to predict does not keep, in words."""
    found = []
    for name, some in by(of, lambda row: row.source).items():
        if name in _BOUNDS:
            mean, p90, _ = scores(some, predicted)
            formula, *_ = scores(some, lambda one: one.row.formula_seconds)
            if mean > min(_BOUNDS[name][0], formula) or p90 > _BOUNDS[name][1]:
                found.append(f"{name}: {mean:.1f} / {p90:.1f} %, the formula {formula:.1f} %")
    measured = [one for one in of if one.row.seconds and one.row.source in _BOUNDS]
    share, width = inside(measured, predicted)
    if width > _WIDEST or not _INSIDE[0] <= share <= _INSIDE[1]:
        found.append(f"intervals: {share:.0f} % inside, ± {width:.0f} % in the median")
    return found


def say_fit(of: Sequence[Priced]) -> list[str]:
    """Print the factors that fit best, and the errors of each model by those of the others.

    Returns which bounds the latter do not keep.
    """
    factors = fit(of)
    table(("time of", "factor"), [*factors.items()])
    say("fitted", of, lambda one: reweighted(one, factors))
    without = {
        model: fit([one for one in of if one.row.model != model])
        for model in {one.row.model for one in of}
    }
    left_out: Measure = lambda one: reweighted(one, without[one.row.model])  # noqa: E731
    say("leaving one model out", of, left_out)
    return beyond(of, left_out)


def share(refused: list[bool]) -> str:
    return f"{sum(refused)} of {len(refused)} refused"


def say_memory(of: Sequence[Priced]) -> None:
    """Print which plans are refused of runs that ran, and of those that ran out of memory."""
    lines = []
    for one in of:
        row, refused = one.row, one.needed > one.usable
        sizes = f"{one.needed / _GIB:.1f}", f"{one.usable / _GIB:.1f}", str(row.memory_gb or "")
        times = f"{row.seconds or np.nan:.3f}", f"{one.predicted:.3f}", f"{row.formula_seconds:.3f}"
        ends = "ran" if row.seconds else "out of memory"
        counted = "" if row.is_ours else "not ours"
        lines.append((row.id, *times, *sizes, "refused" if refused else "", ends, counted))
    heads = ("row", "seconds", "plan's", "formula's", "GiB needed", "usable", "GB said")
    table((*heads, "plan", "run", ""), lines)
    ours = [one.needed > one.usable for one in of if one.row.seconds and one.row.is_ours]
    did_not = [one.needed > one.usable for one in of if not one.row.seconds]
    print(f"of those that ran: {share(ours)}; of those that ran out of memory: {share(did_not)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--known", type=Path)
    given = parser.parse_args()
    wanted = [r for r in rows() if not given.words or any(word in r.id for word in given.words)]
    found = all_priced(wanted, given.known)
    say_memory(found)
    say("as planned", found, lambda one: one.predicted)
    if given.fit and (failed := say_fit(found)):
        raise SystemExit("beyond its bounds: " + "; ".join(failed))


if __name__ == "__main__":
    main()
