"""A plan as a table on the console and as plain tables for trackers, and its shardings in words."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.console import table_of
from launcher.report.summary import Summary
from launcher.report.text import (
    bytes_text,
    count_text,
    days_text,
    percent_text,
    ranges_text,
    rate_text,
    seconds_text,
)

if TYPE_CHECKING:
    from launcher.plan import Advice, CompiledPlan, Plan, StagePlan


class Rows(NamedTuple):
    """The columns' names and the rows of a table."""

    columns: list[str]
    rows: list[list[Any]]


def plan_tables(plan: Plan) -> dict[str, Rows]:
    """Return a plan's tables by name, without empty ones.

    They hold the stages, their shardings, the runners-up and the measured layers.
    """
    stages = [
        {
            "stage": index,
            "layers": ranges_text(stage.layers),
            "hosts": len(stage.hosts),
            "devices": len(stage.devices),
            "data": stage.logical_mesh[0],
            "model": stage.logical_mesh[1],
            "parameters": stage.num_parameters,
            "remat": stage.remat,
            "forward_seconds": stage.forward_seconds,
            "backward_seconds": stage.backward_seconds,
            "update_seconds": stage.update_seconds,
            "memory_bytes": stage.memory_bytes,
        }
        for index, stage in enumerate(plan.stages)
    ]
    others = [[one.plan, one.predicted_step_seconds, one.why] for one in plan.runners_up]
    profiled = [[ranges_text(p.layers), *dataclasses.astuple(p)[1:]] for p in plan.profiled]
    tables = {
        "plan/stages": Rows(list(stages[0]), [list(stage.values()) for stage in stages]),
        "plan/shardings": Rows(["what"], [[words] for words in shardings_in_words(plan)]),
        **({} if plan.compiled is None else _compiled_tables(plan.compiled)),
        "plan/runners_up": Rows(["plan", "predicted_step_seconds", "why"], others),
        "plan/profiled_layers": Rows(
            ["layers", "model", "examples", "forward_seconds", "backward_seconds", "failure"],
            profiled,
        ),
    }
    return {name: table for name, table in tables.items() if table.rows}


def _compiled_tables(found: CompiledPlan) -> dict[str, Rows]:
    stages = [[index, *dataclasses.astuple(own)] for index, own in enumerate(found.stages)]
    errors = [[e.program, ranges_text(e.stages), e.message] for e in found.errors]
    return {
        "plan/compiled_stages": Rows(
            [
                "stage",
                *(f"{x}_bytes" for x in ("predicted", "compiled", "state", "temporary")),
                "at_the_peak",
            ],
            stages,
        ),
        "plan/compiled_collectives": Rows(
            ["program", "kind", "axis", "group_size", "count", "bytes", "exposed_bytes"],
            [[_equals(names), *rest] for names, *rest in _collectives(found)],
        ),
        "plan/compile_errors": Rows(["program", "stages", "message"], errors),
    }


def beside_measured(plan: Plan, summary: Summary, last: Mapping[str, Any]) -> Rows:
    """Return predicted and measured values and their relative difference, where both are known.

    Args:
        plan: the plan of the run.
        summary: the summary of the run.
        last: the last logged step, for the stages' seconds.
    """
    pairs = [
        ("step_seconds", summary.predicted_step_seconds, summary.step_seconds_median),
        ("peak_memory_bytes", summary.predicted_peak_memory_bytes, summary.peak_memory_bytes),
        ("bubble_fraction", summary.predicted_bubble_fraction, summary.bubble_fraction),
    ]
    for index, stage in enumerate(plan.stages):
        seconds = plan.num_micro_batches * (stage.forward_seconds + stage.backward_seconds)
        pairs.append(
            (f"stage_{index}_seconds", seconds, last.get(f"pipeline/stage_{index}_seconds"))
        )
    rows: list[list[Any]] = [
        [name, a, b, a / b - 1 if b else None]
        for name, a, b in pairs
        if a is not None and b is not None
    ]
    return Rows(["what", "predicted", "measured", "off"], rows)


def predicted_memory(plan: Plan) -> int:
    """Return the predicted peak of the fullest device, in bytes."""
    return max(stage.memory_bytes for stage in plan.stages)


_NAMES = 3  # listed of each kind


def shardings_in_words(plan: Plan) -> list[str]:
    """Return one line for each distinct sharding, with its stages; none on single devices.

    For example `stages 0-1: 12 arrays cut along model: mlp.linear_fc1.kernel, …`.
    """
    stages_of: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for words in _stage_in_words(stage):
            stages_of.setdefault(words, []).append(index)
    return [f"{_stages(stages)}: {words}" for words, stages in stages_of.items()]


def _stage_in_words(stage: StagePlan) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, spec in stage.shardings.items():
        axes = sorted({axis for dim in spec for axis in _axes(dim)})
        groups.setdefault(" and ".join(axes), []).append(name)
    lines = []
    data, model = stage.logical_mesh
    if data > 1:
        lines.append(f"the batch cut in {data} along data")
    rows = [n for n in stage.shardings if _is_batch(n) and "model" in stage.shardings[n]]
    if rows:
        lines.append(f"each example cut in {model} along model: {_examples(rows)}")
    for along, names in groups.items():
        kept = [name for name in names if not _is_batch(name)]
        if along and kept:
            lines.append(f"{len(kept)} arrays cut along {along}: {_examples(kept)}")
    if model > 1 and not any("model" in along for along in groups):
        lines.append(f"nothing cut along model: {model} devices do the same")
    return lines


def _is_batch(name: str) -> bool:
    return name.partition(".")[0] == "1"


def _axes(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def _examples(names: Sequence[str]) -> str:
    """Return the last parts of the names; those that differ only in numbers are listed once."""
    kinds = [re.sub(r"\d+", "*", re.sub(r"\.\d+$", "", name)) for name in names]  # of any row
    ends = list(dict.fromkeys(".".join(kind.split(".")[-2:]) for kind in kinds))
    listed = ", ".join(ends[:_NAMES])
    return listed if len(ends) <= _NAMES else f"{listed} and {len(ends) - _NAMES} more kinds"


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {ranges_text(stages)}"


def print_plan(console: Console, plan: Plan, tokens: int | None = None) -> None:
    """Print a plan: headline, stages, predictions, measured layers and runners-up.

    Args:
        console: the console to print to.
        plan: the plan.
        tokens: tokens of a sample, None where samples have none.
    """
    console.print()
    console.print(headline(plan), style="bold", soft_wrap=True)
    console.print(plan_table(plan))
    for words in (*shardings_in_words(plan), *plan.notes):
        console.print(words, soft_wrap=True)
    console.print(predictions(plan, tokens), soft_wrap=True)
    console.print(bottleneck(plan), soft_wrap=True)
    beside = _reserve(plan), _bucket_line(plan), server_line(plan), _certificate(plan)
    for line in (rates_line(plan), *beside):
        if line:
            console.print(line, soft_wrap=True)
    if plan.profiled:
        console.print("\nmeasured layers, by the number of examples:", soft_wrap=True)
        console.print(_profile_table(plan))
    if plan.runners_up:
        console.print("runners-up:", soft_wrap=True)
    if plan.alike:
        console.print(alike(plan), soft_wrap=True)
    for other in plan.runners_up:
        slower = other.predicted_step_seconds / plan.predicted_step_seconds - 1
        console.print(
            f"  {seconds_text(other.predicted_step_seconds)} ({slower:+.1%}): {other.plan}; "
            f"{other.why}",
            soft_wrap=True,
        )


def print_compiled(console: Console, plan: Plan) -> None:
    """Print what the compiler says of a plan's programs: memory, collectives, errors."""
    assert plan.compiled is not None
    found = plan.compiled
    count, taken = _plural(len(found.programs), "distinct program"), seconds_text(found.seconds)
    console.print(f"\n{count} compiled for {found.device} in {taken}", style="bold", soft_wrap=True)
    capacity = plan.cluster.get("memory_bytes")
    rows = [
        (
            str(index),
            bytes_text(own.predicted_bytes),
            "-" if own.memory_bytes is None else _memory(own.memory_bytes, capacity),
            f"{own.predicted_bytes / own.memory_bytes:.2f}" if own.memory_bytes else "-",
            bytes_text(own.state_bytes),
            bytes_text(own.temporary_bytes),
            own.program,
        )
        for index, own in enumerate(found.stages)
    ]
    headers = "stage", "predicted", "compiled", "ratio", "state", "temporaries", "at the peak"
    console.print(table_of(headers, rows, headers[-1:]))
    collectives = [
        (
            _equals(names),
            kind,
            f"{axis} ({size})",
            str(number),
            bytes_text(total),
            percent_text(exposed / total) if total else "-",
        )
        for names, kind, axis, size, number, total, exposed in _collectives(found)
    ]
    if collectives:
        words = ("program", "collectives", "along"), ("number", "bytes", "exposed")
        console.print(table_of(words[0] + words[1], collectives[:_COLLECTIVES], words[0]))
        if (left := len(collectives) - _COLLECTIVES) > 0:
            console.print(f"and {left} more, in plan.json")
    for error in found.errors:
        what = f"{error.program} ({_stages(error.stages)})"
        console.print(f"{what} does not compile: {error.message}", soft_wrap=True)


_COLLECTIVES = 24  # rows on the console


def _collectives(found: CompiledPlan) -> list[tuple[Any, ...]]:
    """Return the names of a program, and all about its collectives of a kind, for each kind."""
    return [
        (program.names, *dataclasses.astuple(one))
        for program in found.programs
        for one in program.collectives
    ]


def _equals(names: Sequence[str]) -> str:
    """Return the name of a program, and how many others are equal to it."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} equal"


MOST_ADVICE = 5  # of improvements on the console
_LEAST_GAIN = 0.005  # smaller ones are none
UNCERTAIN = "~"  # the mark of a gain that predictions may be off by


def improvements(plan: Plan) -> list[Advice]:
    """Return the advice that is worth it, that with the least cost of a token first.

    Where the plan itself does not fit, that is all that does.
    """
    worth = [
        one
        for one in plan.advice
        if not one.largest and (one.gain is None or one.gain > _LEAST_GAIN)
    ]
    return sorted(worth, key=lambda one: one.devices / _rate(one))


def gain_text(plan: Plan, gain: float | None) -> str:
    """Format a gain in throughput: `+3.1% ~` where it is within the predictions' interval."""
    if gain is None:
        return "-"
    return f"{gain:+.1%}{f' {UNCERTAIN}' if abs(gain) <= plan.predicted_within else ''}"


def uncertainty(plan: Plan, shown: Iterable[Advice]) -> str:
    """Return what the mark of gains means, in one line; "" if none of those shown has it."""
    gains = (gain for one in shown for gain in (one.gain, one.gain_per_cost))
    if not any(gain_text(plan, gain).endswith(UNCERTAIN) for gain in gains):
        return ""
    return f"{UNCERTAIN} within the predictions' ± {plan.predicted_within:.0%}: perhaps none"


def advice_aim(plan: Plan) -> str:
    """Return what the times and costs of the advice are for, such as "6.55 M tokens"."""
    one = plan.advice[0]
    unit = "samples" if one.tokens_per_second is None else "tokens"
    return f"{count_text(one.seconds * _rate(one))} {unit}"


def as_planned(plan: Plan) -> tuple[float, float | None] | None:
    """Return the seconds and the cost of the same by the plan itself; None: it does not fit."""
    for one in plan.advice:
        if one.gain is not None and one.gain_per_cost is not None:
            cost = None if one.cost is None else one.cost * (1 + one.gain_per_cost)
            return one.seconds * (1 + one.gain), cost
    return None


def _rate(advice: Advice) -> float:
    tokens = advice.tokens_per_second
    return advice.samples_per_second if tokens is None else tokens


def print_advice(console: Console, plan: Plan, planned: int) -> None:
    """Print what other settings would bring.

    Args:
        console: the console to print to.
        plan: the plan, with its advice.
        planned: number of settings that were planned.
    """
    fit = sum(not one.largest for one in plan.advice)
    what = f"{_plural(planned, 'change')} planned, of which {fit} fit"
    console.print(f"\nadvice: {what}", style="bold", soft_wrap=True)
    best = improvements(plan)
    if best[:MOST_ADVICE]:
        priced = best[0].cost is not None
        rows = [_advice_row(plan, one, priced) for one in best[:MOST_ADVICE]]
        if now := as_planned(plan):
            cost = [] if now[1] is None else [f"{now[1]:,.2f}"]
            rows.insert(0, ["as planned", "", "", "", days_text(now[0]), *cost])
        time = f"time to {advice_aim(plan)}"
        headers = ("", "add", "gain", "per cost", time, *(("cost",) if priced else ()))
        console.print(table_of(headers, rows, headers[:2]))
        if any(one.trains_otherwise for one in best[:MOST_ADVICE]):
            console.print("* changes what is learned, too", soft_wrap=True)
        console.print("per cost: of throughput, at the same price of a device", soft_wrap=True)
        if line := uncertainty(plan, best[:MOST_ADVICE]):
            console.print(line, soft_wrap=True)
        if not priced:
            console.print(
                "cluster.price_per_device_hour is not set: no costs are shown", soft_wrap=True
            )
    else:
        console.print("none of them improves on the plan", soft_wrap=True)
    others = [one for one in plan.advice if not one.largest and one not in best]
    words = ", ".join(f"{one.what} {one.gain:+.1%}" for one in others if one.gain is not None)
    if words:
        console.print(f"little or no gain: {words}", soft_wrap=True)
    for one in (one for one in plan.advice if one.largest):
        console.print(
            f"{one.what}, of those planned: {count_text(one.num_parameters)} parameters, "
            f"{seconds_text(one.predicted_step_seconds)} a step: {' '.join(one.change)}",
            soft_wrap=True,
        )


def _advice_row(plan: Plan, one: Advice, priced: bool) -> list[str]:
    gains = [gain_text(plan, gain) for gain in (one.gain, one.gain_per_cost)]
    cost = [] if one.cost is None or not priced else [f"{one.cost:,.2f}"]
    mark = " *" if one.trains_otherwise else ""
    return [one.what + mark, "\n".join(one.change), *gains, days_text(one.seconds), *cost]


def bottleneck(plan: Plan) -> str:
    """Return which stage limits the step, in one line, and which link does if one takes longer."""
    from launcher.plan.pipeline import link_seconds  # imports JAX, which is loaded by now

    each = plan.mesh_seconds
    slowest = max(range(len(each)), key=each.__getitem__)
    busy = plan.num_micro_batches * each[slowest]
    stages = [index for index, mesh in enumerate(plan.mesh_of) if mesh == slowest]
    once = max(stage.update_seconds for stage in plan.stages)
    # Devices that share a machine are faster than these seconds while others wait.
    share = percent_text(min(1.0, busy / plan.predicted_step_seconds))
    link, occupied = max(link_seconds(plan).items(), key=lambda one: one[1], default=("", 0.0))
    slower = f"; the link {link} is occupied {seconds_text(occupied)}"
    return (
        f"bottleneck: {_stages(stages)}, busy {share} of the step; "
        f"gradient sums and update {seconds_text(once)}{slower if occupied > busy + once else ''}"
    )


def rates_line(plan: Plan) -> str:
    """Return which of the rates that predictions rest on were measured, in one line."""
    from launcher.hardware import ClusterShape  # imports NumPy, which is loaded by now

    shape = ClusterShape(**plan.cluster)
    known, others = (", ".join(shape.rates(measured)) for measured in (True, False))
    if not known:
        return "rates: as stated, none measured"
    return f"rates measured: {known}" + (f"; as stated: {others}" if others else "")


def _reserve(plan: Plan) -> str:
    """Return what the table's memory is a share of, in one line; "" where that is not known."""
    capacity = plan.cluster["memory_bytes"]
    if capacity is None:
        return ""
    room = bytes_text(capacity)
    return f"memory: plans may fill {room} a device; the rest is left to CUDA, NCCL and cuDNN"


def _certificate(plan: Plan) -> str:
    """Return how near the plan is to the best one, in one line; "" where that is not known."""
    if plan.least_step_seconds is None:
        return ""
    short = plan.predicted_step_seconds / plan.least_step_seconds - 1
    within = max(1, math.ceil(1000 * short - 1e-6)) / 1000
    return f"within {within:.1%} of the best possible under this cost model"


def alike(plan: Plan) -> str:
    """Return which runners-up are as good as the plan as far as predictions tell, in one line."""
    count, within = len(plan.alike), f"± {plan.predicted_within:.0%}"
    are = f"{count} {'is' if count == 1 else 'are'} equal to it"
    return f"{are} by predictions of {within}: parallel.try={count + 1} runs them"


def _bucket_line(plan: Plan) -> str:
    """Return how gradients are summed over the replicas, in one line; "" if in one bucket a stage.

    The share is that of the sums once a step.
    """
    buckets = [bucket for stage in plan.stages for bucket in stage.buckets]
    if len(buckets) <= len(plan.stages):
        return ""
    size = sum(bucket.bytes for bucket in buckets)
    hidden = seconds_text(max(stage.hidden_seconds for stage in plan.stages) or None)
    under = f", up to {hidden} a stage under its backward pass" if hidden != "-" else ""
    return f"gradient sums: {bytes_text(size)} in {len(buckets)} buckets{under}"


def server_line(plan: Plan) -> str:
    """Return the traffic of parameter servers in a step, in one line; "" if there are none."""
    servers, workers = plan.reduction.servers, plan.reduction.workers
    exchanges = [x for part in plan.parts for x in part.exchanges]
    if not exchanges:
        return ""
    put = sum(x.bytes for x in exchanges)
    got = sum(x.whole_bytes(workers) for x in exchanges)
    seconds = sum(stage.exchange_seconds for stage in plan.all_stages)
    held = [0] * servers
    for x in exchanges:
        held[x.server] += x.whole_bytes(workers)
    return (
        f"{_plural(servers, 'parameter server')} ({', '.join(map(bytes_text, held))}): each of "
        f"{workers} workers gives {bytes_text(put)} a step in {len(exchanges)} parts and gets "
        f"{bytes_text(got)}, {seconds_text(seconds)}, none of it under the backward pass"
    )


def headline(plan: Plan) -> str:
    """Return the plan in one line: method, stages, schedule, microbatches, devices."""
    hosts = {host for stage in plan.stages for host in stage.hosts}
    remat = {_remat_in_words(stage) for stage in plan.stages}
    parts = [
        f"plan: {plan.method}",
        _plural(len(plan.stages), "stage"),
        plan.schedule,
        _plural(plan.num_micro_batches, "microbatch", "es"),
        *([f"remat {remat.pop()}"] if len(remat) == 1 and remat != {"none"} else []),
        f"{_plural(plan.num_devices, 'device')} on {_plural(len(hosts), 'host')}",
    ]
    return f"{', '.join(parts)} ({plan.cluster['name']})"


def _remat_in_words(stage: StagePlan) -> str:
    """Return a stage's rematerialisation, by the plan and by the model itself."""
    own = stage.own_checkpoints
    if own == len(stage.layers) and own:
        return "the model's"
    return f"{stage.remat}, {own} the model's" if own else stage.remat


def plan_table(plan: Plan) -> Table:
    """Return the stages as a table that fits 80 columns.

    `submesh` is hosts × devices on each (`<=`: at most), `mesh` the logical mesh as data × model.
    Times are for one microbatch; `transfer` is the time to send its activations to a later stage,
    the slowest where there are several. `memory` is the peak of one device, with its share of the
    device's capacity where that is known. `remat` has a column where the stages differ in it;
    layers that the model checkpoints itself are counted there.
    """
    capacity = plan.cluster.get("memory_bytes")
    columns: dict[str, list[str | Text]] = {
        "stage": [str(index) for index in range(len(plan.stages))],
        "layers": [ranges_text(stage.layers) for stage in plan.stages],
        "submesh": [_submesh(stage, plan.cluster["devices_per_host"]) for stage in plan.stages],
        "mesh": ["x".join(map(str, stage.logical_mesh)) for stage in plan.stages],
        "params": [count_text(stage.num_parameters) for stage in plan.stages],
        "remat": [_remat_in_words(stage) for stage in plan.stages],
        "forward": [seconds_text(stage.forward_seconds) for stage in plan.stages],
        "backward": [seconds_text(stage.backward_seconds) for stage in plan.stages],
        "transfer": [*_transfers(plan)],
        "memory": [_memory(stage.memory_bytes, capacity) for stage in plan.stages],
    }
    if len(set(columns["remat"])) == 1:
        del columns["remat"]
    return table_of(columns, zip(*columns.values(), strict=True))


def _submesh(stage: StagePlan, devices_per_host: int) -> str:
    on_each = Counter(device // devices_per_host for device in stage.devices).values()
    return f"{len(on_each)}x{'<=' if len(set(on_each)) > 1 else ''}{max(on_each)}"


def _profile_table(plan: Plan) -> Table:
    """Return the measurements (`parallel.cost=profile`): a row a distinct layer, mesh and size."""
    rows = []
    for one in plan.profiled:
        seconds = seconds_text(one.forward_seconds), seconds_text(one.backward_seconds)
        known = (str(one.rows), *seconds) if not one.failure else ("-", "-", "-")
        rows.append((ranges_text(one.layers), str(one.model), *known, one.failure))
    return table_of(("layers", "model", "examples", "forward", "backward", ""), rows, ("",))


def predictions(plan: Plan, tokens: int | None = None) -> str:
    """Return the predictions for the whole plan in one line.

    Args:
        plan: the plan.
        tokens: tokens of a sample, None where samples have none.
    """
    samples = plan.predicted_samples_per_second
    peak = plan.cluster.get("peak_flops")
    mfu = plan.predicted_tflops_per_device * 1e12 / peak if peak else None
    within = f" ± {plan.predicted_within:.0%}" if plan.predicted_within else ""
    parts = [
        f"{seconds_text(plan.predicted_step_seconds)}{within} a step",
        rate_text(samples, "samples"),
        *([rate_text(samples * tokens, "tokens")] if tokens else []),
        *([f"{plan.predicted_tflops_per_device:.1f} TFLOP/s a device"] if peak else []),
        *([f"{percent_text(mfu)} MFU"] if mfu is not None else []),
        f"{percent_text(plan.predicted_bubble_fraction)} bubble",
    ]
    return f"{count_text(plan.num_parameters)} parameters; predicted: {', '.join(parts)}"


def _transfers(plan: Plan) -> list[str]:
    """Return the slowest transfer of each stage; "-" where it sends nothing on."""
    from launcher.plan import microbatch_transfer_seconds  # imports JAX, which is loaded by now

    slowest: dict[int, float] = {}
    for (src, dst), seconds in microbatch_transfer_seconds(plan).items():
        if src < dst:
            slowest[src] = max(seconds, slowest.get(src, 0.0))
    stages = range(len(plan.stages))
    return [seconds_text(slowest[stage]) if stage in slowest else "-" for stage in stages]


def _memory(used: int, capacity: int | None) -> Text:
    if capacity is None:
        return Text(bytes_text(used))
    style = "bold red" if used > capacity else ""
    return Text(f"{bytes_text(used)} {used / capacity:4.0%}", style=style)


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending if count != 1 else ''}"
