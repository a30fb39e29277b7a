"""Declarative, config-driven training launcher for JAX: the public names.

Names are loaded on first use, so that `import launcher` (and with it the command line's answer to
a wrong setting) costs neither JAX nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import DataParallel as DataParallel
    from launcher.api import Follow as Follow
    from launcher.api import ManualLayerOption as ManualLayerOption
    from launcher.api import ManualStageOption as ManualStageOption
    from launcher.api import PipeshardParallel as PipeshardParallel
    from launcher.api import Plan as Plan
    from launcher.api import Replay as Replay
    from launcher.api import ShardParallel as ShardParallel
    from launcher.api import ThreeDParallel as ThreeDParallel
    from launcher.api import UniformStageOption as UniformStageOption
    from launcher.api import Zero2Parallel as Zero2Parallel
    from launcher.api import Zero3Parallel as Zero3Parallel
    from launcher.api import grad as grad
    from launcher.api import mark_pipeline_boundary as mark_pipeline_boundary
    from launcher.api import microbatched as microbatched
    from launcher.api import parallelize as parallelize
    from launcher.api import value_and_grad as value_and_grad

__all__ = [
    "DataParallel",
    "Follow",
    "ManualLayerOption",
    "ManualStageOption",
    "PipeshardParallel",
    "Plan",
    "Replay",
    "ShardParallel",
    "ThreeDParallel",
    "UniformStageOption",
    "Zero2Parallel",
    "Zero3Parallel",
    "grad",
    "mark_pipeline_boundary",
    "microbatched",
    "parallelize",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("launcher.api"), name)
    raise AttributeError(f"module 'launcher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
