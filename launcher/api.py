"""The front door for Python code: what `import launcher` offers. Holds no logic of its own."""

from __future__ import annotations

from launcher.trace.primitives import grad, mark_pipeline_boundary, microbatched, value_and_grad

__all__ = ["grad", "mark_pipeline_boundary", "microbatched", "value_and_grad"]
