"""A function's results on many arguments, from several processes that end with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def results_of(
    function: Callable[..., T], given: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[T]:
    """Yield what a function returns for each of the arguments, in the order in which it does.

    Args:
        function: one of a module, called in a process of its own unless there is only one.
        given: the arguments of each call.
        processes: how many processes, at most.
    """
    if processes == 1 or len(given) <= 1:
        yield from (function(*each) for each in given)
        return
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(processes, len(given)), context, _begin, (theirs,))
    try:
        for future in as_completed([pool.submit(function, *each) for each in given]):
            yield future.result()
    except KeyboardInterrupt:
        ours.close()  # nobody waits for what is half done
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        theirs.close()
        ours.close()


def _begin(parents: Connection) -> None:
    """Prepare a process of the pool: Ctrl-C is the parent's.

    Args:
        parents: ends when the parent does, or no longer wants anything.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def watch() -> None:
        with suppress(EOFError, OSError):
            parents.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
