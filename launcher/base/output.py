"""Lines for the user, apart from a run's console: printed, or logged below the logger `launcher`.

Every module logs to `logging.getLogger(__name__)`: progress and facts at level info, what failed or
is ignored at level warning. An entry point decides with `lines_to` where the lines go. In a process
without one, such as a notebook, the user's own configuration of `logging` holds; Python's default
prints warnings on standard error, and nothing else.

If nobody reads standard output or standard error any more (`| head`), nothing is printed and no
error is raised, at exit either. Standard library only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import shlex
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

# Takes how much of a phase is done, of how much, and of what; by default a share, 0 to 1.
Advance: TypeAlias = Callable[..., None]

_LAUNCHER = logging.getLogger("launcher")
LAUNCH = ("python", "-m", "launcher")
_NOT_TEXT = "null|true|false|nan|inf|infinity"  # nor what begins like a number
_PLAIN = re.compile(rf"(?!(?:{_NOT_TEXT})$)[a-z_/][\w./:-]*", re.ASCII | re.IGNORECASE)
_SPECIAL = re.compile(r'(\\*)("|\$\{|\Z)')  # with what escapes it in a quoted text of Hydra's
# Control characters, lone surrogates, and what separates lines and paragraphs.
_OBEYED = "Cc", "Cs", "Zl", "Zp"
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def to_type(*words: str | tuple[str, str | Sequence[str]]) -> str:
    """Return words of a shell that a message advises to type; a pair is a setting with its value.

    Every message that names a command, or a setting with a value of the user's, has it from here.
    """
    return shlex.join(word if isinstance(word, str) else setting_word(*word) for word in words)


def setting_word(key: str, value: str | Sequence[str]) -> str:
    """Return the word of a command line, in Hydra's grammar, that sets `key` to `value`."""
    return f"{key}={_in_grammar(value)}"


def _in_grammar(value: str | Sequence[str]) -> str:
    if not isinstance(value, str):
        return f"[{','.join(map(_in_grammar, value))}]"
    if _PLAIN.fullmatch(value):
        return value
    return '"' + _SPECIAL.sub(lambda m: m[1] * 2 + (m[2] and "\\" + m[2]), value) + '"'


def answer(text: str, end: str = "\n") -> int:
    """Print `text` at once and return the exit code.

    Returns:
        0, also if nobody reads it; 1 if it cannot be written (a full disk), which is reported on
            standard error.
    """
    if sys.stdout is None:  # closed by the parent process
        return 0
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        discard(1)
    except OSError as error:
        discard(1)
        complain(f"standard output: {error.strerror}")
        return 1
    return 0


def without_control(text: str) -> str:
    """Return a text without what a terminal would obey; lines and tabs stay."""
    return "".join("\ufffd" if _is_obeyed(c) else c for c in text)


def _is_obeyed(c: str) -> bool:
    return c not in "\n\t" and (c in _DIRECTIONS or unicodedata.category(c) in _OBEYED)


def complain(text: str) -> None:
    """Print `launcher: <text>` on standard error, if anybody reads that."""
    if sys.stderr is None:
        return
    try:
        print(f"launcher: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(output: int) -> None:
    """Send everything written to this file descriptor from now on to /dev/null.

    That includes what Python has buffered, which would fail again at exit.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, output)
    os.close(null)


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
    handler = logging.Handler()  # an error of `take` is raised where the line was logged
    handler.emit = take  # type: ignore[assignment, method-assign]
    take_over(handler)
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


def source_of(fun: Any) -> str:
    """Return a callable's name with its file and line, such as `loss (net.py:12)`."""
    inner = fun.func if isinstance(fun, functools.partial) else inspect.unwrap(fun)
    if inner is not fun:
        return source_of(inner)
    name = getattr(fun, "__qualname__", type(fun).__qualname__)
    if not inspect.isroutine(fun):
        fun = getattr(fun, "__init__" if isinstance(fun, type) else "__call__")
    code = getattr(fun, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def problem_of(error: BaseException) -> str:
    """Return an error's class and the first line of its text."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def told(error: BaseException, module: str) -> str:
    """Return an exception of a user's code in a line, with the line of code that raised it.

    Args:
        error: the exception.
        module: a module of that code. The line is the deepest one in its package.
    """
    frames = traceback.walk_tb(error.__traceback__)
    package = re.compile(rf"{module.split('.')[0]}(\.|$)")
    own = [f for f in frames if package.match(f[0].f_globals.get("__name__") or "")]
    return problem_of(error) + (f" ({own[-1][0].f_code.co_filename}:{own[-1][1]})" if own else "")


def not_run(made: Any) -> str | None:
    """Return what a call has only begun, in words: "a coroutine"; None: it has run."""
    kind = type(made).__name__
    if kind not in ("coroutine", "generator", "async_generator"):
        return None
    if kind == "coroutine":
        made.close()  # else Python warns that it was never awaited
    return f"a {kind}, of which nothing has run"
