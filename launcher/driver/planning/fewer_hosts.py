"""Plans for fewer hosts than a run has: the same training on what is left when a host is lost.

The global batch and the order of the data stay as they are; the number of microbatches and the data
axis give way. What the settings say of stages, of the model axis and of memory is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from launcher.config.cluster import Emulated
from launcher.config.parallel import Parallel
from launcher.driver.planning.plan_from_config import plan_of, too_large, what_fits
from launcher.plan import ClusterShape, Plan, PlanError, describe_plan
from launcher.trace import BatchError, TracedStep


def plan_on_fewer(parallel: Parallel, step: TracedStep, cluster: ClusterShape, hosts: int) -> Plan:
    """Return the plan for the most hosts, at most `hosts`, for which there is one that fits.

    Args:
        parallel: the settings for the whole cluster.
        step: the traced train step.
        cluster: the whole cluster.
        hosts: the number of hosts that are left.

    Raises:
        PlanError: there is none. The text says why not for `hosts`, and what would fit.
    """
    problem = ""
    for count in [hosts] if parallel.idles else range(hosts, 0, -1):  # a search takes long
        left, batch = _part(cluster, count), step.batch_size
        devices = Emulated(gpus=left.num_devices, hosts=count)
        for settings in parallel.on_fewer_devices(batch):
            if contradictions := list(settings.check(devices, batch, None)):
                problem = problem or str(contradictions[0])
                continue
            try:
                plan = plan_of(settings, step, left)
            except (PlanError, BatchError) as error:
                problem = problem or " ".join(str(error).split())
                continue
            missing = too_large(plan)
            if not missing or parallel.allow_over_memory:
                return plan
            problem = problem or f"{missing}. {what_fits(settings, step, left, plan)}"
    problem = problem or f"parallel={parallel.method} is a plan for all of them alone"
    raise PlanError(f"on {_hosts(hosts)} there is no plan: {problem}")


def loss_of_a_host(plan: Plan, on_fewer: Callable[[int], Plan]) -> str:
    """Return a line about a run that loses one of its hosts for good.

    Args:
        plan: the plan for all hosts, of which there are several.
        on_fewer: returns the plan for at most so many hosts; raises PlanError if there is none.
    """
    left = int(plan.cluster["hosts"]) - 1
    try:
        found = on_fewer(left)
    except PlanError as error:
        return f"if a host is lost, the run waits for it and then ends: {error}"
    return f"if a host is lost: {on_what_is_left(found, plan, left)}"


def on_what_is_left(plan: Plan, whole: Plan, hosts: int) -> str:
    """Return a plan for fewer hosts in words, with its step beside that of the whole cluster.

    Args:
        plan: the plan.
        whole: the plan for the whole cluster.
        hosts: the number of hosts that are left, of which the plan may take fewer.
    """
    used, times = int(plan.cluster["hosts"]), plan.predicted_step_seconds
    on = f" on {used} of {_hosts(hosts)}" if used < hosts else ""
    ratio = times / whole.predicted_step_seconds
    fits = too_large(plan) or "it fits"  # as `parallel.allow_over_memory` may have it
    return f"{describe_plan(plan)}{on}; {fits}, {ratio:.2g} times the step of all hosts"


def _part(cluster: ClusterShape, hosts: int) -> ClusterShape:
    """Return so many hosts of a cluster."""
    part = replace(cluster, hosts=hosts)

    def at_most_all(parallelism: float | None) -> float | None:
        return None if parallelism is None else min(parallelism, float(part.num_devices))

    return replace(
        part,
        effective_parallelism=at_most_all(part.effective_parallelism),
        product_parallelism=at_most_all(part.product_parallelism),
    )


def _hosts(number: int) -> str:
    return f"{number} host{'s' if number > 1 else ''}"
