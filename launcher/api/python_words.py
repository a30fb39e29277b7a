"""Errors of the planner in the words of the Python API: they are written for settings in YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.plan import PlanError
from launcher.plan.errors import TooLargeError
from launcher.trace import TraceError

_WORDS = (
    (r" \(cluster\.\w+(, cluster\.\w+)*\)", ""),
    (r"\bor use parallel=manual\b", "or a stage_option"),
    (r"\bparallel=(\w+)", r'method "\1"'),
    (r"\bparallel\.(num_stages|num_micro_batches)=auto\b", r"\1=None"),
    (r"\bparallel\.(\w+)", r"\1"),
    (r"\btrain\.global_batch_size\b", "batch size"),
    (r"\bcluster\.gpus\b", "devices"),
    (r"\bcluster\.(\w+\.)*(\w+)", r"\2"),
)


def in_python(text: str) -> str:
    """Return a message with the names that Python has for what it names by settings."""
    for setting, word in _WORDS:
        text = re.sub(setting, word, text)
    return text


@contextmanager
def python_words() -> Iterator[None]:
    """Have errors of the planner raised with the words of the Python API."""
    try:
        yield
    except TooLargeError as error:
        error.reword(in_python)
        raise
    except (PlanError, TraceError) as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
