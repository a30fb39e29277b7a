"""Lines for the user: logged below the logger `launcher`, and printed by the entry point.

Every module logs to `logging.getLogger(__name__)`: progress and facts at level info, what failed or
is ignored at level warning. An entry point decides with `lines_to` where the lines go. In a process
without one, such as a notebook, the user's own configuration of `logging` holds; Python's default
prints warnings on standard error, and nothing else. Standard library only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LAUNCHER = logging.getLogger("launcher")


class _Handler(logging.Handler):
    """Passes each record on; an error on the way is raised where the line was logged."""

    def __init__(self, take: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


def take_over(*handlers: logging.Handler) -> None:
    """Hand all that is logged below `launcher` to these handlers, and to no others.

    In particular not to those of the root logger: a library or a user's module may configure it,
    and each line would be printed twice.
    """
    for handler in tuple(_LAUNCHER.handlers):
        _LAUNCHER.removeHandler(handler)
    for handler in handlers:
        _LAUNCHER.addHandler(handler)
    _LAUNCHER.setLevel(logging.INFO)
    _LAUNCHER.propagate = False


@contextmanager
def lines_to(print_line: Callable[[str], object]) -> Iterator[None]:
    """Print the text of each record by `print_line` within the context, and nowhere else."""
    with _taken(lambda record: print_line(record.getMessage())):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back what is logged within the context until its end."""
    records: list[logging.LogRecord] = []
    try:
        with _taken(records.append):
            yield
    finally:
        for record in records:
            _LAUNCHER.callHandlers(record)  # as what is logged below it, even if it is disabled


@contextmanager
def _taken(take: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    handlers, level, propagate = tuple(_LAUNCHER.handlers), _LAUNCHER.level, _LAUNCHER.propagate
    take_over(_Handler(take))
    try:
        yield
    finally:
        take_over(*handlers)
        _LAUNCHER.setLevel(level)
        _LAUNCHER.propagate = propagate


@functools.cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning that this process has not logged yet."""
    logger.warning(text)
