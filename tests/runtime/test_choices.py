"""Each of XLA's choices is made by one process, alone, and others and later starts take it.

Processes are threads here, each with a module of its own; what compiles is a stand-in.
"""

import importlib.util
import threading
from types import SimpleNamespace

import pytest

from launcher.runtime.programs import choices

UPDATES = "AUTOTUNE_CACHE_MODE_UPDATE"


class Group:
    """Processes by their programs; `start` returns (process, program, keeps) in their order."""

    def __init__(self, folders):
        self.folders, self.told, self.made = folders, {}, []
        self.is_deterministic = False
        self.at_work, self.barrier = threading.Lock(), threading.Barrier(len(folders))

    def gather(self, rank):
        def gathered(name, own):
            for other in [*self.told]:  # all below a name is read
                assert not name.startswith(f"{other}/")
            self.told.setdefault(name, {})[rank] = own
            self.barrier.wait(10)
            return [self.told[name][k] for k in sorted(self.told[name], reverse=True)]

        return gathered

    def process(self, rank, programs, found):
        spec = importlib.util.spec_from_file_location(f"process_{rank}", choices.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        device = SimpleNamespace(device_kind="T4")
        module.jax = SimpleNamespace(process_index=lambda: rank, local_devices=lambda: [device])
        module.all_gather_text = self.gather(rank)
        own = module.KernelChoices(self.folders[rank], self.is_deterministic)

        def compile_one(one, options):
            folder, mode = own._folder, options["xla_gpu_experimental_autotune_cache_mode"]
            keeps = mode == UPDATES
            if keeps:
                assert self.at_work.acquire(blocking=False), "two choose at once"
                try:
                    (folder / f"{one.digest}.textproto").write_text(f"of process {rank}")
                finally:
                    self.at_work.release()
            self.made.append((rank, one.name, keeps))
            if one.name == "broken":
                raise ValueError("it does not compile")
            kept = folder / f"{one.digest}.textproto"
            return kept.read_text() if kept.exists() else "not kept"

        compiled = own.begin(programs, compile_one)
        for one in programs:
            try:
                found[rank, one.name] = compiled(one)
            except ValueError as error:
                found[rank, one.name] = str(error)
        found[rank] = own.are_new

    def start(self, *programs):
        self.made.clear()
        self.told.clear()
        found = {}
        each = [
            threading.Thread(target=self.process, args=(rank, own, found))
            for rank, own in enumerate(programs)
        ]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join(20)
        return found


def program(name, digest=None):
    return SimpleNamespace(name=name, digest=digest or name)


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_first_process_with_a_program_chooses_for_all_and_for_later_starts(tmp_path, is_shared):
    """Also where a host does not see the others' folder."""
    group = Group([tmp_path / ("run" if is_shared else f"host_{rank}") for rank in range(3)])
    programs = [program("a")], [program("b"), program("also_a", "a")], [program("b"), program("c")]
    first = group.start(*programs)
    assert [one for one in group.made if one[2]] == [(0, "a", True), (1, "b", True), (2, "c", True)]
    whose = {"a": 0, "also_a": 0, "b": 1, "c": 2}
    for rank, own in enumerate(programs):
        assert first[rank]
        for one in own:
            assert first[rank, one.name] == f"of process {whose[one.name]}"
    later = group.start(*programs)
    assert not any(keeps for *_, keeps in group.made)
    assert [later[rank] for rank in range(3)] == [False] * 3
    assert all(later[key] == text for key, text in first.items() if isinstance(key, tuple))


def test_a_program_that_does_not_compile_says_so_and_stops_no_other(tmp_path):
    group = Group([tmp_path] * 2)
    found = group.start([program("broken"), program("a")], [program("a")])
    assert found[0, "broken"] == "it does not compile"
    assert found[0, "a"] == found[1, "a"] == "of process 0"


def test_choices_are_kept_for_each_kind_of_gpu_and_order_of_sums_apart(tmp_path):
    group = Group([tmp_path])
    for group.is_deterministic in (False, True):
        assert group.start([program("a")])[0]
    plain, fixed = sorted(path.name for path in tmp_path.iterdir())
    assert plain.startswith("T4_jaxlib_")
    assert fixed == f"{plain}_deterministic"


def test_what_cannot_be_kept_stops_no_run(tmp_path):
    """Such as on a full disk; each start then chooses anew, and knows it."""
    (tmp_path / "file").touch()
    group = Group([tmp_path / "file"] * 2)
    for _ in range(2):
        found = group.start([program("a")], [program("a")])
        assert found[0]
        assert found[0, "a"] == found[1, "a"] == "not kept"


def test_cpu_devices_have_no_choices(tmp_path):
    assert choices.choices_in(tmp_path, is_deterministic=True) is None
