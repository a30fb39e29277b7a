"""Keep which kernels XLA chose for programs on GPUs, for a run's other processes and later starts.

XLA times several kernels for a product or a fusion, and takes the fastest. Compiled once more, it
may find another one the fastest, which rounds otherwise. So a program's kernels are chosen once.
They lie in a set: a folder of XLA's files that only the process that chose adds to, by a name of
its own. A run keeps the sets that it uses. XLA reads those in the user's cache folder, since JAX's
compilation cache tells programs apart by the path: so other runs find choices there, and with them
the programs that were compiled.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import jax

from launcher.base import make_private, write_whole
from launcher.base.jax_compat import all_gather_text, autotune_options, deterministic_options
from launcher.base.measurements import cache_folder, file_name

T = TypeVar("T")
_Begun = tuple[Any, Callable[..., Any]]  # a program, and what compiles it

_DONE = ".program"  # an empty file, once a program's choices are there; its name is the digest
_CHOICES = "[!.]*.textproto", "*/[!.]*.pb"  # XLA's, up to JAX 0.11 and from 0.12 on; half-written
# ones are called otherwise
_MOST_SETS = 100  # in the cache folder, at each start


class KernelChoices:
    """The choices for the programs of a run's process.

    A process chooses for one program at a time: XLA keeps the first choice that is made for an
    operation, but compiles with its own what another thread compiles meanwhile. So do processes for
    what several of them have, in turn; then they choose for the rest, all at once.

    Args:
        folder: where the run keeps its sets, apart for each kind of GPU and version of XLA.
        is_deterministic: whether XLA may use no operation whose order of sums can vary; it takes
            kept choices that do, so these are others.

    Attributes:
        are_new: whether some program's choices were made by this start.
    """

    def __init__(self, folder: Path, is_deterministic: bool) -> None:
        kind, way = jax.local_devices()[0].device_kind, "deterministic" * is_deterministic
        name = file_name(f"{kind} jaxlib {version('jaxlib')} {way}")
        self._home, self._cache = folder / name, cache_folder() / "autotune" / name
        try:
            make_private(self._cache)
            sets = sorted(self._cache.iterdir(), key=lambda each: each.stat().st_mtime)
            for each in sets[:-_MOST_SETS]:
                shutil.rmtree(each, ignore_errors=True)
        except OSError:  # then no other run finds them
            self._cache = self._home
        self._own = self._cache / secrets.token_hex(8)
        self._extra = deterministic_options() if is_deterministic else {}
        self._sets: dict[str, str] = {}  # their names, by the digest of a program
        self._choices: dict[str, str] = {}  # all that this process compiles by, as files
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="chooser")  # the same order in all
        self._begun, self._turn = list[_Begun](), SimpleQueue[Future[dict[int, Any]]]()
        self._count, self.are_new = 0, False

    def options(self, one: Any, keeps: bool = False) -> dict[str, Any]:
        """Return the options to compile a program with, once choices are made."""
        folder = self._cache / self._sets.get(one.digest, self._own.name)
        return {**self._extra, **autotune_options(folder, keeps)}

    def begin(self, programs: Sequence[Any], compile_one: Callable[..., T]) -> Callable[[Any], T]:
        """Add a step's programs to those that `choose` will choose for.

        Args:
            programs: the programs of this process, each with a `name` and a `digest`.
            compile_one: compiles one, with some more options.

        Returns:
            What compiles each of these, by the choices: it waits until all are made.
        """
        turn = self._turn
        self._begun += [(one, compile_one) for one in programs]

        def by_choices(one: Any) -> T:
            turn.put(choosing := turn.get())  # for the other threads that wait
            made: dict[int, T] = choosing.result()
            return made[id(one)] if id(one) in made else compile_one(one, self.options(one))

        return by_choices

    def choose(self, in_turns: bool = False) -> None:
        """Begin to choose for the programs that were begun; all processes do so in one order.

        Args:
            in_turns: whether to choose for each program in turn, since the process is to share
                others later.
        """
        self._count += 1
        self._turn.put(self._turns.submit(self._choose, str(self._count), self._begun, in_turns))
        self._begun, self._turn = [], SimpleQueue()

    def _choose(self, call: str, begun: Sequence[_Begun], in_turns: bool) -> dict[int, Any]:
        """Make what choices are missing; return what was compiled for that, by its program's id."""
        me, kind, made = jax.process_index(), self._home.name, dict[int, Any]()
        self._find({one.digest for one, _ in begun})
        sets = {one.digest: self._sets.get(one.digest, "") for one, _ in begun}
        told = all_gather_text(f"launcher/choices/{call}", json.dumps([me, kind, sets]))
        holders = defaultdict[tuple[str, str], list[Any]](list)
        for rank, of, known in sorted(map(json.loads, told)):
            for digest, at in known.items():
                holders[of, digest].append((not at, rank, at))
        self.are_new |= any(min(each)[0] for each in holders.values())
        givers = {
            key: min(each)[1]  # the first process that has a set, else the first
            for key, each in holders.items()
            if len({at for *_, at in each}) > 1 or (min(each)[0] and (in_turns or len(each) > 1))
        }
        for giver in sorted(set(givers.values())):
            here = [x for x in begun if giver == me == givers.get((kind, x[0].digest))]
            made |= self._make(here)
            given = {x.digest: self._sets[x.digest] for x, _ in here if x.digest in self._sets}
            files = {at: _read(self._cache / at) for at in given.values()}
            own = json.dumps([kind, given, files])
            told = all_gather_text(f"launcher/choices/{call} of {giver}", own)
            for of, given, files in map(json.loads, told):
                for at in files if of == kind else ():
                    self._take(at, {x for x in sets if given.get(x) == at}, files[at])
        return made | self._make(begun)

    def _find(self, digests: Set[str]) -> None:
        """Take sets for programs: those of the run, and others' that have most of what is lacking.

        Together they are what one process can compile by: no two differ in a choice.
        """
        own = sorted(self._home.glob("*"))
        for folder in [*own, *sorted(self._cache.glob("*"))]:
            lacking = digests - self._sets.keys()
            there = {each for each in lacking if (folder / f"{each}{_DONE}").exists()}
            if there and (folder in own or len(there) * 2 >= len(lacking)):
                with suppress(OSError, ValueError):  # a set that cannot be read is none
                    files = _read(folder)
                    if all(self._choices.get(name, text) == text for name, text in files.items()):
                        self._take(folder.name, there, files)

    def _take(self, name: str, digests: Set[str], files: Mapping[str, str]) -> None:
        """Compile these programs by a set from now on, and keep it."""
        self._sets |= dict.fromkeys(digests, name)
        self._choices |= {x: text for x, text in files.items() if not x.endswith(_DONE)}
        for folder in (self._home, self._cache):
            _write(folder / name, files)

    def _make(self, begun: Sequence[_Begun]) -> dict[int, Any]:
        """Choose for those that have no choices; return what was compiled for that."""
        made = {}
        for one, compile_one in begun:
            if one.digest not in self._sets:
                _write(self._own, self._choices)
                with suppress(Exception):  # it is compiled again, by who tells of the error
                    made[id(one)] = compile_one(one, self.options(one, keeps=True))
                    (self._own / f"{one.digest}{_DONE}").touch()
                    self._take(self._own.name, {one.digest}, _read(self._own))
        return made


def _read(folder: Path) -> dict[str, str]:
    """Read a set. Another run may be adding to it, choices before the program that they are for."""
    paths = [path for end in (f"*{_DONE}", *_CHOICES) for path in folder.glob(end)]
    return {str(x.relative_to(folder)): x.read_bytes().decode("latin-1") for x in paths}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write what a set lacks."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(files, key=lambda name: name.endswith(_DONE)):
            if not (path := folder / name).exists():
                path.parent.mkdir(exist_ok=True)
                write_whole(path, files[name].encode("latin-1"), durable=False)


def choices_in(folder: Path, is_deterministic: bool) -> KernelChoices | None:
    """Return the choices in a folder; None on CPU devices, for which XLA makes none."""
    if jax.default_backend() != "gpu":
        return None
    return KernelChoices(folder, is_deterministic)
