"""Advice on a plan: other settings, each planned by the same planner, and what they would bring.

A piece of advice is another command line. Its gain is that of the plan which that command line
gives, so nothing is estimated apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from launcher.base import held_back, lines_to
from launcher.cluster.kinds import kind_of
from launcher.config.cluster import Described
from launcher.config.errors import ConfigError
from launcher.config.families import ModelOptions
from launcher.config.parallel import Auto, Planned
from launcher.config.schema import Config
from launcher.driver.planning.check import look
from launcher.driver.planning.fewer_hosts import loss_of_a_host
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import Prepared, Traced, trace
from launcher.plan import Advice, Plan, PlanError, describe_plan
from launcher.recipes import InputError
from launcher.report.console import Phase, status
from launcher.report.plan_table import print_advice
from launcher.trace import TraceError

Compose = Callable[[Sequence[str]], Config]

_OF_PROGRAM = ("model", "dataset", "optimizer", "train", "run")  # sections; the rest keeps a trace
_NETWORK = 25  # GB/s between hosts where none is described: one link of 200 Gbit/s
_SIZES = 3  # models planned for the largest that fits
_NEAR = 1.1  # times the parameters
_DEEPEST = 64  # layers of a model that is made larger
_STATE_BYTES = 16  # of a parameter: itself, its gradient and Adam's moments in 32 bits
_WIDTHS = ("hidden_size", "mlp_size", "expert_size", "shared_size", "width")


@dataclass(frozen=True)
class Change:
    """Other settings.

    Attributes:
        what: what they change, in words.
        words: the settings as they are typed.
        trains_otherwise: whether they change what is learned.
    """

    what: str
    words: tuple[str, ...]
    trains_otherwise: bool = False


def advised(
    ready: Prepared, config: Config, traced: Traced, compose: Compose | None, console: Console
) -> Prepared:
    """Return a plan with advice, and print that; settings that cannot be planned are left out.

    Args:
        ready: the plan.
        config: its settings, for a described cluster.
        traced: its program.
        compose: see `TaskKind`.
        console: where progress and the advice are shown.

    Raises:
        ConfigError: there is no command line to add settings to.
    """
    if compose is None:
        raise ConfigError(
            "plan.advise=true says what to add to the command line, and --frozen takes nothing "
            "from there",
            "Give the settings themselves.",
            ["plan.advise"],
        )
    given, listed = ready.plan, list(changes(config))
    total, planned = len(listed) + _SIZES, 0
    with status(console, "planning other settings", Phase.PLANNING) as show:

        def advice(change: Change) -> Advice | None:
            nonlocal planned
            show(planned, total, "settings")
            planned += 1
            found = _planned(change, config, traced, compose)
            return found and _advice(change, *found, config, given)

        with lines_to(lambda line: None):  # they are about settings that nobody gave
            found = [one for change in listed if (one := advice(change))]
            if largest := _largest(config.model, given, advice):
                found.append(replace(largest, largest=True, gain=None, gain_per_cost=None))
        show(planned, planned, "settings")
    plan = replace(given, advice=tuple(found))
    print_advice(console, plan, planned)
    if config.cluster.hosts > 1 and ready.on_fewer:
        with held_back(), status(console, "planning for a host less", Phase.PLANNING):
            line = loss_of_a_host(given, ready.on_fewer)
        console.print(line, soft_wrap=True)
    return replace(ready, plan=plan)


def changes(config: Config) -> Iterator[Change]:
    """Yield the changes that a person would consider, some 15 at most, before any is planned."""
    assert isinstance(config.cluster, Described)
    yield from _of_cluster(config.cluster)
    batch = config.train.global_batch_size
    yield Change("twice the batch", (f"train.global_batch_size={2 * batch}",), True)
    if batch % 2 == 0:
        yield Change("half the batch", (f"train.global_batch_size={batch // 2}",), True)
    if length := vars(config.model).get("sequence_length"):
        yield Change("twice the sequence", (f"model.sequence_length={2 * length}",), True)
        if length % 2 == 0:
            yield Change("half the sequence", (f"model.sequence_length={length // 2}",), True)
    if config.train.precision == "fp32":
        yield Change("16-bit products", ("train.precision=bf16",), True)
    if isinstance(config.parallel, Planned):
        yield from _of_method(config.parallel)
    if not isinstance(config.parallel, Auto):
        yield Change("a searched plan", ("parallel=auto",))


def _of_cluster(cluster: Described) -> Iterator[Change]:
    assert cluster.gpus is not None  # as its check ensures
    hosts, each, links = cluster.hosts, cluster.gpus // cluster.hosts, cluster.links
    a_host = " a host" if hosts > 1 else ""
    yield Change(f"one more GPU{a_host}", (f"cluster.gpus={hosts * (each + 1)}",))
    between = links.inter_host_gb_per_second
    network = () if between else (f"cluster.links.inter_host_gb_per_second={_NETWORK}",)
    more = f"cluster.hosts={hosts + 1}", f"cluster.gpus={(hosts + 1) * each}"
    yield Change("one more host", (*more, *network))
    memory = cluster.device.memory_gib or 0
    yield Change("one more GiB a GPU", (f"cluster.device.memory_gib={memory + 1:g}",))
    if hosts > 1 and between:
        word = f"cluster.links.inter_host_gb_per_second={2 * between:g}"
        yield Change("a network twice as fast", (word,))
    elif each > 1 and (within := links.intra_host_gb_per_second):
        word = f"cluster.links.intra_host_gb_per_second={2 * within:g}"
        yield Change("links twice as fast", (word,))


def _of_method(parallel: Planned) -> Iterator[Change]:
    """Yield what the method does not choose itself: microbatches and rematerialisation."""
    count, remat = parallel.num_micro_batches, parallel.remat
    if not isinstance(parallel, Auto):
        count = count or 1
        yield Change("twice the microbatches", (f"parallel.num_micro_batches={2 * count}",))
        if count % 2 == 0:
            yield Change("half the microbatches", (f"parallel.num_micro_batches={count // 2}",))
        other = "full" if remat == "none" else "none"
        yield Change(f"remat {other}", (f"parallel.remat={other}",))
        return
    for name in ("num_micro_batches", "num_stages", "schedule", "remat"):
        if getattr(parallel, name) not in (None, "auto"):
            yield Change(f"{name} searched for", (f"parallel.{name}=auto",))


def _planned(
    change: Change, config: Config, traced: Traced, compose: Compose
) -> tuple[Config, Plan] | None:
    """Return the changed settings and their plan; None where there is none that fits."""
    try:
        changed = compose(change.words)
        program = traced.program
        if any(getattr(changed, name) != getattr(config, name) for name in _OF_PROGRAM):
            found = look(changed, 0, plan_only=True)
            program = trace(changed, Console(quiet=True), found).program
        plan = plan_of(changed.parallel, program.train, kind_of(changed.cluster).shape(None))
    except (ConfigError, InputError, TraceError, PlanError):
        return None
    return (changed, plan) if plan.missing_bytes <= 0 else None


def _largest(
    model: ModelOptions, plan: Plan, advice: Callable[[Change], Advice | None]
) -> Advice | None:
    """Return the largest model that fits, of a coarse bisection by the number of parameters.

    The bounds are the given model, if it fits, and one whose state fills all memory, of which half
    is tried first: plans that shard the state come near it.
    """
    memory = plan.held_devices * plan.cluster["memory_bytes"]
    most = memory / (_STATE_BYTES * plan.num_parameters)
    low, high = (1.0, most) if plan.missing_bytes <= 0 else (most / 1000, min(most, 1.0))
    found = None
    for number in range(_SIZES):
        middle = math.sqrt(low * high) if number else max(high / 2, math.sqrt(low * high))
        if low * _NEAR > high or not (words := scaled(model, middle)):
            break
        if one := advice(Change("the largest model that fits", words, True)):
            found, low = one, middle
        else:
            high = middle
    return found


def scaled(model: ModelOptions, times: float) -> tuple[str, ...]:
    """Return the settings of a model of about `times` the parameters; none: it cannot grow.

    Depth and width grow alike, up to a depth. Heads keep their size, and groups of heads theirs.
    """
    depth = getattr(model, "num_layers", None)
    widths = {name: width for name in _WIDTHS if (width := getattr(model, name, None))}
    heads, groups = getattr(model, "num_heads", None), getattr(model, "num_kv_heads", None) or 1
    wider, grown = math.sqrt(times), {}
    if not widths:
        return ()
    if depth:
        deeper = round(depth * times ** (1 / 3))
        grown["num_layers"] = max(1, min(deeper, max(depth, _DEEPEST)))
        wider = math.sqrt(times * depth / grown["num_layers"])
    if heads:
        group = math.lcm(groups, min(heads & -heads, 8))  # a model axis divides them
        grown["num_heads"] = group * max(1, round(heads * wider / group))
        wider = grown["num_heads"] / heads
    for name, width in widths.items():
        step = 1 if heads else min(width & -width, 64)  # a width that kernels and groups divide
        grown[name] = step * max(1, round(width * wider / step))
    return tuple(f"model.{name}={value}" for name, value in grown.items())


def _advice(change: Change, changed: Config, plan: Plan, config: Config, given: Plan) -> Advice:
    """Return what a change would bring, by its settings and plan and those that were given."""
    samples, length = plan.predicted_samples_per_second, _length(changed)
    rate, work = samples * (length or 1), _length(config) or 1
    before = given.predicted_samples_per_second * work
    work *= config.train.steps * config.train.global_batch_size
    price, devices = config.cluster.price_per_device_hour, plan.held_devices
    gain, fits = rate / before, given.missing_bytes <= 0
    return Advice(
        what=change.what,
        change=change.words,
        trains_otherwise=change.trains_otherwise,
        gain=gain - 1 if fits else None,
        gain_per_cost=gain * given.held_devices / devices - 1 if fits else None,
        plan=describe_plan(plan),
        num_parameters=plan.num_parameters,
        devices=devices,
        predicted_step_seconds=plan.predicted_step_seconds,
        samples_per_second=samples,
        tokens_per_second=rate if length else None,
        seconds=work / rate,
        cost=None if price is None else work / rate / 3600 * devices * price,
    )


def _length(config: Config) -> int | None:
    """Return the tokens of a sample, None where samples have none."""
    length: int | None = getattr(config.model, "sequence_length", None)
    return length
