"""Keep which kernels XLA chose for a run's programs on GPUs, for its other processes and starts.

XLA times several kernels for a product or a fusion, and takes the fastest. Compiled once more, it
may find another one the fastest, which rounds otherwise. So the first process that has a program
chooses for it, once; all others, and every later start, take those choices from the run's folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax

from launcher.base import write_whole
from launcher.base.jax_compat import all_gather_text, autotune_options, deterministic_options
from launcher.base.measurements import file_name

T = TypeVar("T")


class KernelChoices:
    """The choices for the programs of a run's process.

    Processes choose in turn, and each for one program at a time. XLA keeps the first choice that is
    made for an operation, but compiles with its own what another thread compiles meanwhile; and
    processes that write to one folder at once can lose each other's files.

    Args:
        folder: where the choices are kept, apart for each kind of GPU and version of XLA.
        is_deterministic: whether XLA may use no operation whose order of sums can vary; it takes
            kept choices that do, so these are others.

    Attributes:
        are_new: whether some program's choices were made by this start.
    """

    def __init__(self, folder: Path, is_deterministic: bool) -> None:
        kind, way = jax.local_devices()[0].device_kind, "deterministic" * is_deterministic
        self._folder = folder / file_name(f"{kind} jaxlib {version('jaxlib')} {way}")
        self._extra = deterministic_options() if is_deterministic else {}
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="chooser")  # the same order in all
        self._count, self.are_new = 0, False
        self.options = self._options(keeps=False)

    def _options(self, keeps: bool) -> dict[str, Any]:
        return {**self._extra, **autotune_options(self._folder, keeps)}

    def begin(self, programs: Sequence[Any], compile_one: Callable[..., T]) -> Callable[[Any], T]:
        """Begin to choose for a step's programs; all processes begin the same steps in one order.

        Args:
            programs: the programs of this process, each with a `name` and a `digest`.
            compile_one: compiles one, with some more options.

        Returns:
            What compiles each of these, by the choices: it waits until all are made.
        """
        self._count += 1
        turn = self._turns.submit(self._choose, str(self._count), programs, compile_one)

        def by_choices(one: Any) -> T:
            made = turn.result()
            return made[one.name] if one.name in made else compile_one(one, self.options)

        return by_choices

    def _choose(
        self, call: str, programs: Sequence[Any], compile_one: Callable[..., T]
    ) -> dict[str, T]:
        """Make, in turn, what choices are missing; return by name what was compiled for that."""
        me, kind, made = jax.process_index(), self._folder.name, dict[str, T]()
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        missing = {one.digest: one for one in programs if not self._done(one).exists()}
        told = all_gather_text(f"launcher/choices/{call}", json.dumps([me, kind, [*missing]]))
        first: dict[tuple[str, str], int] = {}
        for rank, of, digests in sorted(map(json.loads, told)):
            first = dict.fromkeys(((of, digest) for digest in digests), rank) | first
        for rank in sorted(set(first.values())):
            for one in missing.values() if rank == me else ():
                if first[kind, one.digest] == me:
                    with suppress(Exception):  # it is compiled again, by who tells of the error
                        made[one.name] = compile_one(one, self._options(keeps=True))
                        self._done(one).touch()
            kinds = ("[!.]*.program", "[!.]*.textproto") if rank == me else ()  # none half-written
            files = itertools.chain(*map(self._folder.glob, kinds))
            own = json.dumps({path.name: path.read_text() for path in files})
            for texts in all_gather_text(f"launcher/choices/{call} of {rank}", own):
                self._write(json.loads(texts))
        self.are_new |= bool(first)
        return made

    def _done(self, one: Any) -> Path:
        """Return the empty file that is there once all choices for a program are."""
        return self._folder / f"{one.digest}.program"

    def _write(self, texts: Mapping[str, str]) -> None:
        """Put into this host's folder what it lacks, of another host's."""
        for name in texts.keys() - {path.name for path in self._folder.glob("*.*")}:
            with suppress(OSError):
                write_whole(self._folder / name, texts[name], durable=False)


def choices_in(folder: Path, is_deterministic: bool) -> KernelChoices | None:
    """Return the choices in a folder; None on CPU devices, for which XLA makes none."""
    if jax.default_backend() != "gpu":
        return None
    return KernelChoices(folder, is_deterministic)
