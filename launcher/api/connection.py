"""How the workers of a session reach one another, which its first use decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.cluster.ray.worker import WorkerHandle
from launcher.cluster.worker_group import WorkerGroup
from launcher.plan import Plan, PlanError

_AGAIN = "call launcher.shutdown() and launcher.init() to run this one"


class Connection:
    """The workers' connection: a process group, or parameter servers alone.

    Args:
        group: the workers.
        serve: starts so many parameter servers for so many workers.
    """

    def __init__(
        self, group: WorkerGroup, serve: Callable[[int, int], Sequence[WorkerHandle]]
    ) -> None:
        self._group, self._serve = group, serve
        self._servers: int | None = None  # None before the first use

    @property
    def by_servers(self) -> bool:
        """Whether the workers reach one another through parameter servers."""
        return bool(self._servers)

    def open(self, servers: int = 0) -> None:
        """Connect the workers, by so many servers or, with none, as a group, unless they are."""
        if self._servers is not None:
            return
        self._group.check_open()  # else servers would be started for nobody
        if servers:
            self._group.use_servers(self._serve(servers, len(self._group.handles)))
        else:
            self._group.join()
        self._servers = servers

    def open_for(self, plan: Plan) -> None:
        """Connect the workers as a plan needs it, unless they are.

        Raises:
            PlanError: they are connected in another way.
        """
        wanted = plan.reduction.servers
        self.open(wanted)
        if len(self._group.handles) == 1 or self._servers == wanted:
            return
        if wanted and self._servers:
            raise PlanError(
                f"the plan has {wanted} parameter servers, and the first one of this session had "
                f"{self._servers}: give ParameterServer the same `servers`, or {_AGAIN}"
            )
        if wanted:
            raise PlanError(
                "the workers of this session are connected for collectives, since they were used "
                f"before a step was compiled for method=launcher.ParameterServer(); {_AGAIN}"
            )
        raise PlanError(
            "the workers of this session reach one another through parameter servers alone, since "
            "its first step was compiled for method=launcher.ParameterServer(), and this plan "
            f"needs collectives; an evaluation takes the train step as its method; {_AGAIN}"
        )
