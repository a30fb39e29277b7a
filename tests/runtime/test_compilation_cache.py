"""Compiled programs are kept for the next process, for equal stages too, where nobody else can put
any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from launcher.base.measurements import file_name, processor
from launcher.runtime import keep_compiled, why_not_kept
from launcher.runtime.programs import compilation_cache
from launcher.runtime.programs.compilation_cache import _prune

PROGRAM = """
import json
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from launcher.base.output import lines_to
from launcher.runtime import keep_compiled
from launcher.base.jax_compat import compiled, loaded_for

told, events = [], []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
with lines_to(told.append):
    keep_compiled()
mesh = lambda d: jax.sharding.NamedSharding(jax.make_mesh((1,), ("a",), devices=[d]), P())
here, there = map(mesh, jax.devices()[:2])
step = jax.jit(lambda x: jax.numpy.sin(x * 0) + 2 * x + 1, out_shardings=here)
made, kept = compiled(step.lower(jax.ShapeDtypeStruct((), "float32", sharding=here)))
twin = loaded_for(made, [there], [there], kept)
result = float(made(jax.device_put(np.float32(3), here)))
assert result == float(twin(jax.device_put(np.float32(3), there)))
hits, misses = (events.count(f"/jax/compilation_cache/cache_{x}") for x in ("hits", "misses"))
print(json.dumps({"result": result, "hits": hits, "misses": misses, "told": told}))
"""


@pytest.fixture
def start(tmp_path):
    def start():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
            umask=0o002,  # as where each user has a group of their own
        )
        told = json.loads(done.stdout)
        assert told["result"] == 7
        assert told["told"] == []
        return told

    return start


@pytest.mark.slow
def test_the_next_process_compiles_nothing_whatever_a_kill_left(start, tmp_path):
    first = start()
    assert first["misses"] > 0
    assert first["hits"] == 0
    folder = tmp_path / "launcher" / "compiled" / file_name(processor())
    for made in (folder, folder.parent, folder.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700

    for torn in folder.glob("*-cache"):
        torn.write_bytes(torn.read_bytes()[:100])
    second = start()
    assert second["hits"] == 0
    programs = list(folder.glob("*-cache"))
    for program in programs:
        os.utime(program, (0, 0))
    third = start()
    assert third["misses"] == 0
    assert third["hits"] == first["misses"]
    assert all(program.stat().st_mtime > 0 for program in programs)  # their use is noted
    assert sorted(filter(Path.is_file, folder.iterdir())) == sorted(programs)  # JAX notes nothing


@pytest.fixture
def bounded(tmp_path, monkeypatch):
    """Fill the folder with programs of some sizes, the first one used last; bound it to 100."""
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 100)

    def fill(sizes):
        for age, size in enumerate(sizes):
            path = tmp_path / f"jit_{len(sizes) - age}-cache"
            path.write_bytes(b"x" * size)
            os.utime(path, (0, 1000 - age))
        return lambda: len(list(tmp_path.glob("*-cache")))

    return fill


@pytest.mark.parametrize("seed", range(10))
def test_as_many_programs_as_fit_are_kept_those_used_last(bounded, tmp_path, seed):
    sizes = np.random.default_rng(seed).integers(1, 60, size=2 * seed)
    other = tmp_path / "xla_autotuning"
    other.mkdir()
    kept = bounded(sizes)
    _prune(tmp_path)
    fitting = int((np.cumsum(sizes) <= 100).sum())
    assert kept() == fitting
    ages = [1000 - path.stat().st_mtime for path in tmp_path.glob("*-cache")]
    assert sorted(ages) == list(range(fitting))
    assert other.exists()


@pytest.mark.parametrize("step", ["stat", "unlink"])
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_another_process_may_prune_at_any_moment(bounded, tmp_path, monkeypatch, step, turn):
    kept = bounded([40, 60, 20, 5, 30, 7])
    do, calls = getattr(Path, step), []

    def interrupted(path, **named):
        calls.append(path)
        if len(calls) == turn:
            _prune(tmp_path)
        return do(path, **named)

    monkeypatch.setattr(Path, step, interrupted)
    _prune(tmp_path)
    assert len(calls) > turn
    assert kept() == 2


CROWD = """
import sys
from pathlib import Path
from launcher.runtime.programs import compilation_cache
compilation_cache.MOST_BYTES = 100
print("ready", flush=True)
input()
compilation_cache._prune(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_two_processes_prune_one_folder(bounded, tmp_path):
    kept = bounded([1] * 3000)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert kept() == 100


@pytest.fixture
def kept_by_default():
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.usefixtures("kept_by_default")
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert why_not_kept() == ""
    (tmp_path / "cache").chmod(0o775)
    before = jax.config.jax_compilation_cache_dir
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == before
    [line] = caplog.messages
    assert line == why_not_kept()
    assert line.startswith("compiled programs are not kept for the next start: ")
    assert f"chmod go-w {tmp_path / 'cache'} closes it" in line


@pytest.mark.usefixtures("kept_by_default")
def test_what_the_user_says_of_the_cache_stays(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    before = jax.config.jax_compilation_cache_dir
    keep_compiled()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_enable_compilation_cache", False)
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == before
    assert caplog.messages == []
    assert not (tmp_path / "cache").exists()
