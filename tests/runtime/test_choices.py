"""Each of XLA's choices is made by one process, and others, later starts and other runs take it.

Processes are threads here, each with a module and an XLA of its own: a stand-in that keeps in
memory what it has chosen or read for an operation.
"""

import importlib.util
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.runtime.programs import choices

UPDATES = "AUTOTUNE_CACHE_MODE_UPDATE"


class Group:
    """Processes, by the folders of their run and of their user's cache."""

    numbers = itertools.count()

    def __init__(self, homes, caches):
        self.homes, self.caches, self.told = homes, caches, {}
        self.is_deterministic, self.meeting = False, None
        self.barrier = threading.Barrier(len(homes))

    def gather(self, rank):
        def gathered(name, own):
            for other in [*self.told]:  # all below a name is read
                assert not name.startswith(f"{other}/")
            self.told.setdefault(name, {})[rank] = own
            self.barrier.wait(10)
            return [self.told[name][k] for k in sorted(self.told[name], reverse=True)]

        return gathered

    def process(self, rank, steps):
        spec = importlib.util.spec_from_file_location(f"process_{rank}", choices.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        device = SimpleNamespace(device_kind="T4")
        module.jax = SimpleNamespace(process_index=lambda: rank, local_devices=lambda: [device])
        module.all_gather_text = self.gather(rank)
        module.cache_folder = lambda: self.caches[rank]
        own, memory = module.KernelChoices(self.homes[rank], self.is_deterministic), {}

        def compile_one(one, options):
            keeps = options["xla_gpu_experimental_autotune_cache_mode"] == UPDATES
            folder = Path(options["xla_gpu_per_fusion_autotune_cache_dir"])
            self.chosen += [(rank, one.name)] if keeps else []
            if keeps and self.meeting:
                self.meeting.wait(10)
            for operation in one.operations:
                path = folder / f"{operation}.textproto"
                if operation not in memory and not path.exists():
                    memory[operation] = f"choice {next(self.numbers)}"
                    if keeps:
                        path.write_text(memory[operation])
                memory.setdefault(operation, path.read_text() if path.exists() else None)
            if one.name == "broken":
                raise ValueError("it does not compile")
            self.folders[rank, one.name] = folder
            return [memory[operation] for operation in one.operations]

        for number, programs in enumerate(steps, 1):
            compiled = own.begin(programs, compile_one)
            own.choose(in_turns=number < len(steps))
            for one in programs:
                try:
                    self.found[rank, one.name] = compiled(one)
                except ValueError as error:
                    self.found[rank, one.name] = str(error)
        self.are_new[rank] = own.are_new

    def start(self, *programs):
        """Start processes, each with the programs of its steps; return what they are by."""
        self.told.clear()
        self.chosen, self.found, self.folders, self.are_new = [], {}, {}, {}
        each = [threading.Thread(target=self.process, args=one) for one in enumerate(programs)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join(20)
        assert len(self.are_new) == len(each)
        return self.found


def program(name, operations="x", digest=None):
    return SimpleNamespace(name=name, operations=operations, digest=digest or name)


A, B, C = program("a", "xy"), program("b", "yz"), program("c", "xz")
PROGRAMS = [[A]], [[B, program("also_a", "xy", "a"), program("own")]], [[B, C]]


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_first_process_with_a_program_chooses_for_all_and_for_later_starts(tmp_path, is_shared):
    """Also where a host does not see the others' folders."""
    caches = [tmp_path / ("cache" if is_shared else f"cache_{rank}") for rank in range(3)]
    homes = [tmp_path / ("run" if is_shared else f"run_{rank}") for rank in range(3)]
    group = Group(homes, caches)
    first = group.start(*PROGRAMS)
    assert sorted(group.chosen) == [(0, "a"), (1, "b"), (1, "own"), (2, "c")]
    assert first[0, "a"] == first[1, "also_a"]
    assert first[1, "b"] == first[2, "b"]
    assert len({first[0, "a"][1], first[1, "b"][0]}) == 1
    assert group.are_new == dict.fromkeys(range(3), True)
    folders = group.folders
    # The run again, another run, and the run where the cache is another.
    other = [tmp_path / f"other_{rank}" for rank in range(3)]
    for group.homes, group.caches in ((homes, caches), (other, caches), (homes, other)):
        assert group.start(*PROGRAMS) == first
        assert group.chosen == []
        assert group.are_new == dict.fromkeys(range(3), False)
        assert (group.folders == folders) == (group.caches == caches)  # the keys of JAX's cache


def test_processes_choose_at_once_for_what_no_others_have(tmp_path):
    group = Group([tmp_path / "run"] * 2, [tmp_path / "cache"] * 2)
    group.meeting = threading.Barrier(2)
    first = group.start([[A]], [[B]])
    assert first[0, "a"][1] != first[1, "b"][0]
    assert group.start([[A]], [[B]]) == first
    assert not any(group.are_new.values())
    # One process with both can take the choices of one alone.
    both = Group([tmp_path / "run"], [tmp_path / "cache"])
    found = both.start([[A, B]])
    assert both.are_new == {0: True}
    assert found[0, "a"][1] == found[0, "b"][0]
    assert both.start([[A, B]]) == found
    assert both.are_new == {0: False}


def test_processes_choose_in_turn_where_they_will_share_programs(tmp_path):
    """As in trials of plans, before the plan that is trained by."""
    group = Group([tmp_path / "run"] * 2, [tmp_path / "cache"] * 2)
    steps = [[A], [C]], [[B], [C]]
    first = group.start(*steps)
    assert first[0, "c"] == first[1, "c"]
    assert group.start(*steps) == first
    assert not any(group.are_new.values())


def test_another_training_takes_what_is_alike(tmp_path):
    group = Group([tmp_path / "run"], [tmp_path / "cache"])
    first, folders = group.start([[A, B]]), group.folders
    group.homes = [tmp_path / "other"]
    found = group.start([[A, B, C]])
    assert group.chosen == [(0, "c")]
    assert found.items() > first.items()
    assert found[0, "c"] == [first[0, "a"][0], first[0, "b"][1]]
    assert group.folders.items() > folders.items()
    # Of what is largely another one it takes nothing, since sets would only grow.
    group.homes = [tmp_path / "third"]
    group.start([[A, program("d"), program("e")]])
    assert len(group.chosen) == 3


def test_a_program_that_does_not_compile_says_so_and_stops_no_other(tmp_path):
    group = Group([tmp_path / "run"] * 2, [tmp_path / "cache"] * 2)
    found = group.start([[program("broken"), A]], [[A]])
    assert found[0, "broken"] == "it does not compile"
    assert found[0, "a"] == found[1, "a"]


def test_choices_are_kept_for_each_kind_of_gpu_and_order_of_sums_apart(tmp_path):
    group = Group([tmp_path / "run"], [tmp_path / "cache"])
    for group.is_deterministic in (False, True):
        group.start([[A]])
        assert group.are_new == {0: True}
    plain, fixed = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert plain.startswith("T4_jaxlib_")
    assert fixed == f"{plain}_deterministic"


def test_files_of_each_version_of_xla_are_kept_and_no_half_written_ones(tmp_path):
    files = {"a.textproto": b"a", "device/b.pb": b"\xff", "c.program": b""}
    for name in (*files, "tmp/d.textproto", "device/.tmp_e.pb"):
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_bytes(files.get(name, b"half"))
    choices._write(tmp_path / "two", choices._read(tmp_path / "one"))
    written = [path for path in (tmp_path / "two").rglob("*") if path.is_file()]
    assert {str(x.relative_to(tmp_path / "two")): x.read_bytes() for x in written} == files


def test_the_sets_in_the_cache_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "_MOST_SETS", 2)
    monkeypatch.setattr(choices, "cache_folder", lambda: tmp_path)
    name = choices.KernelChoices(tmp_path, is_deterministic=False)._cache
    for k in range(4):
        (name / f"set_{k}").mkdir()
        os.utime(name / f"set_{k}", (k, k))
    choices.KernelChoices(tmp_path, is_deterministic=False)
    assert sorted(path.name for path in name.iterdir()) == ["set_2", "set_3"]


def test_what_cannot_be_kept_stops_no_run(tmp_path):
    """Such as on a full disk; each start then chooses anew, and knows it."""
    (tmp_path / "file").touch()
    nowhere, cache = tmp_path / "file", tmp_path / "cache"
    group = Group([nowhere] * 2, [nowhere] * 2)
    for _ in range(2):
        group.start([[A]], [[A]])
        assert group.are_new == {0: True, 1: True}
    group = Group([tmp_path / "run"] * 2, [nowhere] * 2)  # in the run alone
    assert group.start([[A]], [[A]]) == group.start([[A]], [[A]])
    assert group.are_new == {0: False, 1: False}
    group = Group([nowhere] * 2, [cache] * 2)
    assert group.start([[A]], [[A]]) == group.start([[A]], [[A]])
    assert group.are_new == {0: False, 1: False}


def test_cpu_devices_have_no_choices(tmp_path):
    assert choices.choices_in(tmp_path, is_deterministic=True) is None
