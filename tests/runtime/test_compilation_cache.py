"""Compiled programs are kept for the next process, for equal stages too, where nobody else can put
any."""

import json
import os
import subprocess
import sys

import jax
import pytest

from launcher.base.measurements import file_name, processor
from launcher.runtime import keep_compiled, why_not_kept

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
    halves = [folder / "killed-cache", folder / "evicted-atime"]
    for half in halves:
        half.touch()
    second, third = start(), start()
    assert second["hits"] == 0
    assert not any(half.exists() for half in halves)
    assert third["misses"] == 0
    assert third["hits"] == first["misses"]


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
