"""All private or undocumented parts of Ray that the launcher uses, as of Ray 2.60.

Each name is given with the reason for its use. Ray's public names are used where they are needed,
but only within `launcher.cluster.ray`. Two programs of this folder run before the package can be
imported, so they keep such names of their own: `head` (`ray start`, gRPC, the address file) and
`worker_actor`.

Nothing here is imported from Ray before it is called: Ray reads its settings when it is imported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.cluster.errors import ClusterError
from launcher.cluster.ray.head import TOKEN_VARIABLE

# -- Environment variables ------------------------------------------------------------------------

PREFIX = "RAY_"  # of every setting that Ray reads, but for the one without it below

# Those in lower case are entries of Ray's `ray_config_def.h`; each of the others is read by itself.
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    # The launcher decides which GPUs a worker sees.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "DASHBOARD_METRIC_PORT": "0",  # any free port
    # A call that comes after the end would start another Ray, which nobody ends.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Ray's own limits are too short on a machine that has other work to do.
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default is 15, so that training would yield to everything else on the machine.
    "RAY_worker_niceness": "0",
    # Ray would keep what is freed for a second: the gradients of many steps.
    "RAY_free_objects_batch_size": "1",
    # Under `uv run` Ray would build a virtual environment for each worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray would kill the worker once 95 % of the machine's memory is used.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray would print a dead worker's last lines over the progress display; WorkerError has them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}


def private_settings(token: Path, nodes: bool) -> dict[str, str]:
    """Return the environment variables that set up a private Ray.

    Args:
        token: the file with the secret that Ray requires of every client.
        nodes: whether this Ray spans several machines.
    """
    return _SETTINGS | {
        TOKEN_VARIABLE: str(token),
        # Ray's own name for a cluster of one machine, on which everything listens on 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if nodes else "0",
    }


def import_ray() -> Any:
    """Return Ray under the environment as it is now, also where it was imported before.

    Raises:
        ClusterError: this process is connected to a Ray already.
    """
    before = sys.modules.get("ray")
    if before is not None and before.is_initialized():
        raise ClusterError(
            "This process is connected to a Ray already. Call ray.shutdown() first, or do not call "
            "ray.init() in code that the launcher loads (recipes, sitecustomize)."
        )
    import ray

    if before is not None and not read_settings_again():
        raise ClusterError(
            "Ray was imported before, and this version of it cannot change its settings then: "
            "import it after launcher.init, or call ray.init() first to use that Ray."
        )
    return ray


def read_settings_again() -> bool:
    """Have Ray, imported already, take its settings from the environment as it is now.

    Ray reads where it listens and how it authenticates once. With other settings than those of the
    Ray that it connects to, it would search for that one for ever.

    Returns:
        Whether this version of Ray can.
    """
    try:
        from ray import _raylet
        from ray._private import auto_init_hook, ray_constants, ray_logging

        connects = os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0"
        auto_init_hook.enable_auto_connect = connects
        variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(variable, "0") == "1"
        skipped = os.environ.get("RAY_DEDUP_LOGS_SKIP_REGEX")
        printer: Any
        for printer in (ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator):
            printer.skip_re = re.compile(skipped) if skipped else None
        compiled: Any = _raylet
        compiled.Config.initialize("")
        compiled.AuthenticationTokenLoader.instance().reset_cache()
    except (AttributeError, ImportError):
        return False
    return True


# -- Names and texts ------------------------------------------------------------------------------

# The longest path of a socket below Ray's folder, with a process number of as many digits as any.
LONGEST_SOCKET = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"

# In the text of `ActorDiedError`, which has no fields for the cause.
EXIT_CODE = re.compile(r"exit code (-?\d+)")
NODE_UNREACHABLE = "health check failed"  # the node did not answer: the worker may be alive
NODE_DIED = "node has died"
CREATION_FAILED = "creation task"  # the actor's constructor raised

# A line of Ray's C++ log at level warning or error; group 1 is the message.
_LOG_WARNING = re.compile(r"\[[^\]]+ [WE] [^\]]+\] \S+: (.*)")


# Ray's text on a cluster of other versions, in several lines: Ray's and Python's, there and here.
_VERSIONS = re.compile(
    r"Version mismatch:.*?Ray: (\S+)\s+Python: (\S+)\s.*?Ray: (\S+)\s+Python: (\S+)", re.DOTALL
)


def connection_problem(output: str) -> str:
    """Return why Ray could not connect, given the output of the process that tried.

    That is a difference of versions, the last warning of Ray's C++ code, which the Python exception
    does not repeat, or else the exception, the output's last line.
    """
    if found := _VERSIONS.search(output):
        there, here = (f"Ray {found[i]} on Python {found[i + 1]}" for i in (1, 3))
        return f"it runs {there}, and this process {here}; use the same versions in both"
    lines = output.strip().splitlines() or ["it says nothing"]
    warnings = [match[1] for line in lines if (match := _LOG_WARNING.match(line))]
    problem = warnings[-1] if warnings else lines[-1]
    if "AuthToken" in problem:  # `ray start` uses a token that it finds, and `ray.init` does not
        problem += "; set RAY_AUTH_MODE=token if it is the one in ~/.ray/auth_token"
    return problem


@dataclass(frozen=True)
class Node:
    """A living node of a Ray.

    Attributes:
        node_id: Ray's identifier of the node.
        address: the node's IP address.
        resources: the amount of every resource of the node, by name.
    """

    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def gpus(self) -> int:
        """The number of GPUs that Ray has found on the node."""
        return int(self.resources.get("GPU", 0))

    @property
    def gpu_names(self) -> list[str]:
        """The models of these GPUs, such as "A100": Ray adds a resource named after each."""
        prefix = "accelerator_type:"
        return [name.removeprefix(prefix) for name in self.resources if name.startswith(prefix)]


def nodes() -> list[Node]:
    """Return the nodes of the Ray that this process is connected to, those with most GPUs first."""
    import ray

    return nodes_of(ray.nodes())


def nodes_of(found: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the living nodes among what `ray.nodes` returned, those with most GPUs first.

    `ray.nodes` is a "developer API" whose dictionaries are not documented. The public alternative,
    `ray.util.state.list_nodes`, needs the dashboard.
    """
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in found
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (-node.gpus, node.node_id))


# -- Pickling -------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """Return `value` pickled by Ray's own copy of cloudpickle, which also takes lambdas."""
    import ray

    return bytes(ray.cloudpickle.dumps(value))


def register_by_value(module: ModuleType) -> None:
    """Have what is defined in `module` pickled as code from now on, not as a name to import.

    Such code runs in a process before, or without, the package's being importable there.
    """
    import ray

    ray.cloudpickle.register_pickle_by_value(module)


# -- Signals --------------------------------------------------------------------------------------


def restore_signals(numbers: Iterable[signal.Signals]) -> None:
    """Install Python's handlers of these signals again after Ray has connected.

    Ray replaces them below Python, where `signal.getsignal` does not see it, by a handler that has
    an alarm abort the process three seconds later.
    """
    signal.alarm(0)
    for number in (*numbers, signal.SIGALRM):
        handler = signal.getsignal(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
