"""Finds the places for runs that go on side by side, so that no two have the same GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.cluster.devices import find_gpus, local_pool
from launcher.cluster.kinds import kind_of
from launcher.config.errors import ConfigError
from launcher.config.schema import Config

_WITHOUT_DEVICES = ("plan", "check")


def find_slots(configs: Sequence[Config], environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return for each of `sweep.jobs` runs at a time the variables that show it its devices.

    Emulated devices are there for every run. GPUs are divided: each run has as many as the largest
    asks for.

    Raises:
        ConfigError: there are not as many GPUs, or it is not known which each run would take.
    """
    jobs = max(config.sweep.jobs for config in configs)
    using = [config.cluster for config in configs if config.task not in _WITHOUT_DEVICES]
    exclusive = [cluster for cluster in using if not kind_of(cluster).is_emulated]
    if jobs == 1 or not exclusive:
        return [{} for _ in range(jobs)]
    for cluster in exclusive:
        if not kind_of(cluster).is_here:
            raise ConfigError(
                f"sweep.jobs={jobs}, but cluster={cluster.title} has one set of devices",
                "Leave sweep.jobs out: the runs then go one after another.",
                ["sweep.jobs", "cluster.kind"],
            )
    gpus = find_gpus(environ)
    there = 0 if gpus.problem else len(gpus.names)
    if not there:
        return [{} for _ in range(jobs)]
    if any(cluster.gpus is None for cluster in exclusive):
        raise ConfigError(
            f"sweep.jobs={jobs}, but each run takes all {there} GPUs of this machine",
            f"Say how many each run is to have: cluster.gpus={max(there // jobs, 1)}.",
            ["sweep.jobs", "cluster.gpus"],
        )
    each = max(cluster.gpus or 0 for cluster in exclusive)
    if each * jobs > there:
        raise ConfigError(
            f"sweep.jobs={jobs} runs with cluster.gpus={each} need {each * jobs} GPUs, but this "
            f"machine has {there}",
            f"Set sweep.jobs={max(there // each, 1)} or less, or fewer cluster.gpus.",
            ["sweep.jobs", "cluster.gpus"],
        )
    pool = local_pool(replace(exclusive[0], gpus=there), gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    ids = pool.gpu_ids
    return [{"CUDA_VISIBLE_DEVICES": ",".join(ids[each * n : each * (n + 1)])} for n in range(jobs)]
