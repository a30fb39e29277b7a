"""What each worker demands of a Ray that is there, and whether its nodes can ever give that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.cluster.devices import DevicePool
from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.ray_compat import Node
from launcher.config.machines import RayCluster

_RAYS_OWN = "CPU", "GPU", "memory", "object_store_memory"  # resources of every node


@dataclass(frozen=True)
class Demand:
    """What each worker demands of Ray beside its GPUs.

    Attributes:
        num_cpus: the CPUs, as Ray counts them; a worker may use more.
        resources: the amount of each custom resource, by name, such as {"my_node": 1} or
            {"accelerator_type:H100": 0.001}.
    """

    num_cpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self, gpus: int) -> dict[str, float]:
        """Return all that a worker with so many GPUs demands, by Ray's names; without zeros."""
        amounts = {"CPU": self.num_cpus, "GPU": gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


NOTHING = Demand()


def demand_of(cluster: RayCluster) -> Demand:
    """Return what the settings say that each worker demands."""
    return Demand(cluster.num_cpus, cluster.resources)


def check_demand(bundle: Mapping[str, float], pool: DevicePool, nodes: Sequence[Node]) -> None:
    """Check that the nodes have what the workers demand, if nothing else ran there.

    Args:
        bundle: what each worker demands.
        pool: the devices; workers with GPUs need a node each.
        nodes: the nodes of the Ray.

    Raises:
        ClusterError: they have not; the message names what is missing, and what there is.
    """
    workers, spread = pool.hosts, pool.kind == "gpu"

    def room(names: Sequence[str]) -> int:
        each = (min(int(n.resources.get(k, 0) / bundle[k] + 1e-9) for k in names) for n in nodes)
        return sum(min(count, 1) if spread else count for count in each)

    if not bundle or room([*bundle]) >= workers:
        return
    missing = [name for name in bundle if room([name]) < workers] or [*bundle]
    demands = ", ".join(f"{name}: {bundle[name]:g}" for name in missing)
    there = "; ".join(_has(node, missing) for node in nodes)
    each = "each of " if workers > 1 else ""
    own = " on a node of its own" if spread and workers > 1 else ""
    raise ClusterError(
        f"{each}{workers} worker{'s' if workers > 1 else ''} demands {demands}{own}, which this "
        f"Ray can never give: {there}"
    )


def _has(node: Node, names: Sequence[str]) -> str:
    amounts = ", ".join(f"{name}: {node.resources.get(name, 0):g}" for name in names)
    others = [
        name for name in node.resources if name not in (*_RAYS_OWN, *names) and "node:" not in name
    ]
    return f"{node.address} has {amounts}" + (f" (and {', '.join(others)})" if others else "")
