"""Declarative, config-driven training launcher for JAX: the public names.

Names are loaded on first use, so that `import launcher`, and with it the command line's answer to a
wrong setting, loads neither JAX nor Ray. The parallel methods are those of `launcher.plan.methods`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher import nnx as nnx
    from launcher import testing as testing
    from launcher.api.parallelize import ParallelizedFunction as ParallelizedFunction
    from launcher.api.parallelize import parallelize as parallelize
    from launcher.api.remote_array import RemoteArray as RemoteArray
    from launcher.api.remote_array import prefetch as prefetch
    from launcher.api.session import check_replicas as check_replicas
    from launcher.api.session import foreach_replica as foreach_replica
    from launcher.api.session import foreach_worker as foreach_worker
    from launcher.api.session import init as init
    from launcher.api.session import on_first as on_first
    from launcher.api.session import shutdown as shutdown
    from launcher.api.session import workers as workers
    from launcher.arrays.stacked_array import StackedArray as StackedArray
    from launcher.checkpoint.trees import RestoreError as RestoreError
    from launcher.checkpoint.trees import restore as restore
    from launcher.checkpoint.trees import save as save
    from launcher.cluster.errors import ClusterError as ClusterError
    from launcher.cluster.errors import HungError as HungError
    from launcher.cluster.errors import WorkerError as WorkerError
    from launcher.hardware import WorkerInfo as WorkerInfo
    from launcher.plan import Plan as Plan
    from launcher.plan.methods import *  # noqa: F403
    from launcher.report.run_record import runs as runs
    from launcher.runtime import ReplicaError as ReplicaError
    from launcher.trace import grad as grad
    from launcher.trace import mark_pipeline_boundary as mark_pipeline_boundary
    from launcher.trace import microbatched as microbatched
    from launcher.trace import per_slice as per_slice
    from launcher.trace import value_and_grad as value_and_grad

_HOMES = {
    "ClusterError": "launcher.cluster.errors",
    "HungError": "launcher.cluster.errors",
    "ParallelizedFunction": "launcher.api.parallelize",
    "Plan": "launcher.plan",
    "RemoteArray": "launcher.api.remote_array",
    "ReplicaError": "launcher.runtime",
    "RestoreError": "launcher.checkpoint.trees",
    "StackedArray": "launcher.arrays.stacked_array",
    "WorkerError": "launcher.cluster.errors",
    "WorkerInfo": "launcher.hardware.cluster_shape",
    "check_replicas": "launcher.api.session",
    "foreach_replica": "launcher.api.session",
    "foreach_worker": "launcher.api.session",
    "grad": "launcher.trace.primitives",
    "init": "launcher.api.session",
    "mark_pipeline_boundary": "launcher.trace.primitives",
    "microbatched": "launcher.trace.primitives",
    "on_first": "launcher.api.session",
    "parallelize": "launcher.api.parallelize",
    "per_slice": "launcher.trace.primitives",
    "prefetch": "launcher.api.remote_array",
    "restore": "launcher.checkpoint.trees",
    "runs": "launcher.report.run_record",
    "save": "launcher.checkpoint.trees",
    "shutdown": "launcher.api.session",
    "value_and_grad": "launcher.trace.primitives",
    "workers": "launcher.api.session",
}
_MODULES = ("nnx", "testing")

_HERE = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_HERE, "recipes")):  # a checkout on a disk without links
    __path__.append(os.path.dirname(_HERE))  # noqa: F405


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _MODULES:
        return importlib.import_module(f"launcher.{name}")
    if name in _HOMES:
        from launcher.api.versions import check_versions

        check_versions()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name[0].isupper():  # a class
        methods = importlib.import_module("launcher.plan.methods")
        if name in methods.__all__:
            return getattr(methods, name)
    raise AttributeError(f"module 'launcher' has no attribute {name!r}")


def __dir__() -> list[str]:
    methods = importlib.import_module("launcher.plan.methods")
    classes = [name for name in methods.__all__ if name[0].isupper()]
    return sorted([*_HOMES, *_MODULES, *classes])
