"""Checks of the settings on this machine that need no tracing.

`task=check` does these and no more, in a fraction of a second and without JAX, Ray or a user's
module. A run begins with the same checks, in `look`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base import hub, lines_to
from launcher.base.measurements import cache_file, read_cached
from launcher.cluster.devices import DevicePool
from launcher.cluster.kinds import kind_of
from launcher.config.hub import naming
from launcher.config.optimizer import Optimizer, Scheduled
from launcher.config.parallel import Planned, Replay
from launcher.config.schema import Config, CustomDataset, CustomModel
from launcher.driver.callback import no_callback
from launcher.driver.folder import folder
from launcher.driver.folder.mirrored import look_at_mirror
from launcher.driver.planning.downloads import hub_needs
from launcher.driver.planning.init_from import find_start
from launcher.driver.planning.replay import check_program, check_replay_devices, read_plan
from launcher.hardware import threads_at_work
from launcher.recipes import check_dataset, find_module, needs_preparing
from launcher.report.trackers.tracker import openers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a run starts with.

    Attributes:
        pool: the devices there are, or None if the run is only planned.
        init_from: the checkpoint that the first parameters come from.
        others: how many threads of other processes want a core, if devices are to share these.
    """

    pool: DevicePool | None
    init_from: Path | None
    others: float = 0.0


def look(config: Config, finished: int, plan_only: bool = False) -> Inputs:
    """Look at the data, the devices and the checkpoint to start from, cheapest first.

    A line about each is logged.

    Args:
        config: the settings.
        finished: how many steps the run has finished.
        plan_only: whether the cluster may be a described one, which is not here.

    Raises:
        ConfigError: a setting does not fit this machine.
        ClusterError: the Ray of `cluster=ray` cannot be reached, or has not these devices.
        launcher.recipes.InputError: the data does not fit the model.
        OSError: a file cannot be read.
    """
    openers(config.report.trackers or (), users=not plan_only)
    check_dataset(config.dataset, config.model, validation=config.train.eval_every > 0)
    pool = find_pool(config, plan_only)
    shares = not plan_only and pool is not None and pool.kind == "cpu" and measures_first(config)
    return Inputs(pool, find_start(config, finished), threads_at_work() if shares else 0.0)


def check(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Do the fast checks of a run, all those before it traces.

    Returns:
        Lines: what the run would report of this machine, and at the end what was not checked.

    Raises:
        ConfigError: a setting does not fit this machine.
        launcher.recipes.InputError: the data does not fit the model.
        OSError: a file cannot be read.
    """
    return [*_lines(config, environ)]


def os_error_text(error: OSError) -> str:
    """Return the file, if the error names one, and the reason."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _lines(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    said: list[str] = []
    config = folder.pinned(config)
    with lines_to(said.append):
        if (found := look_at_mirror(config)) is not None:
            _log.info(f"step {found[2][0].step} is to be fetched from {config.run.mirror}")
        finished = folder.check(config, thorough=False)
    if finished >= config.train.steps:
        yield f"run {config.run.id} is complete, {finished} of {config.train.steps} steps"
    for section in ("model", "dataset", "optimizer"):
        if module := getattr(getattr(config, section), "module", None):
            find_module(f"{section}.module", module)
    for hook in config.hooks:
        if "." not in hook:
            raise no_callback(hook)
        find_module("hooks", hook.rpartition(".")[0])
    openers(config.report.trackers or (), users=False)
    is_here = True
    for key, text, fits in hub_needs(config, finished):
        with naming(key, text):
            said.append(f"{key}: {hub.described(text, fits)}")
            is_here = is_here and not (key == "dataset.path" and hub.missing(text, fits))
    if is_here and not isinstance(config.dataset, CustomDataset):
        check_dataset(config.dataset, config.model, validation=config.train.eval_every > 0)
    with lines_to(said.append):
        find_pool(config, plan_only=True)
        init_from = find_start(config, finished, thorough=False)
    yield from said
    goes_on = bool(finished or init_from)
    yield f"not checked: {'; '.join(_not_checked(config, goes_on, environ))}"


def find_pool(config: Config, plan_only: bool) -> DevicePool | None:
    """Return the devices there are; None if a described cluster is only planned for.

    Args:
        config: the settings.
        plan_only: whether the cluster may be a described one.

    Raises:
        ConfigError: the devices asked for are not here, or do not fit the parallel method.
        ClusterError: the Ray of `cluster=ray` cannot be reached, or has not these devices.
    """
    cluster = config.cluster
    pool = kind_of(cluster).pool(planning=plan_only)
    if pool:
        for line in kind_of(cluster).ignored(os.environ):
            _log.warning(line)
        if pool.note:
            _log.info(pool.note)
        cluster = replace(cluster, gpus=pool.num_devices)
    for note in config.dataset.notes(config.model):
        _log.info(note)
    batch, layers = config.train.global_batch_size, config.model.layers
    for error in config.parallel.check(cluster, batch, layers):
        raise error
    if isinstance(config.parallel, Replay):
        assert cluster.gpus is not None
        path, each = config.parallel.plan, cluster.gpus // cluster.hosts
        plan = read_plan(path)
        check_program(config, path)
        check_replay_devices(path, plan, cluster.hosts, each)
    return pool


def _not_checked(config: Config, goes_on: bool, environ: Mapping[str, str]) -> Iterator[str]:
    custom = [
        o for o in (config.model, config.dataset) if isinstance(o, CustomModel | CustomDataset)
    ]
    if custom:
        yield f"the contents of {' and '.join(dict.fromkeys(o.module for o in custom))}"
    elif needs_preparing(config.dataset):
        yield "what the training first makes of its data (task=prepare_data does that alone)"
    if patterns := list(_patterns(config.optimizer)):
        yield f"whether a parameter fits {' and '.join(patterns)}"
    if goes_on:
        yield "the arrays of the checkpoint"
    yield from kind_of(config.cluster).unchecked(environ)
    if isinstance(config.parallel, Replay):
        yield "whether the plan fits the model's program"
    else:
        yield "the plan and the memory that it needs (task=plan)"


def _patterns(options: Optimizer) -> Iterator[str]:
    """Yield the settings whose patterns are compared with the names of the model's parameters."""
    if isinstance(options, Scheduled) and options.groups:
        yield "optimizer.groups"
    if options.train_only is not None:
        yield "optimizer.train_only"
    if options.lora.rank:
        yield "optimizer.lora.pattern"


def measures_first(config: Config) -> bool:
    """Return whether a training by these settings measures devices that no calibration is kept of.

    The devices are this machine's, and the plan rests on what they can do.
    """
    parallel = config.parallel
    is_here = kind_of(config.cluster).is_here
    return is_here and isinstance(parallel, Planned) and parallel.cost != "model"


def is_kept(pool: DevicePool) -> bool:
    """Return whether a calibration of these devices is kept, by these versions, if it is intact."""
    path = cache_file("calibration", pool.device_kind, pool.num_devices)
    return read_cached(path, lambda tree: tree) is not None
