"""Compiled programs are kept for the next process, for equal stages too, where nobody else can put
any."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from launcher.runtime import keep_compiled
from launcher.runtime.compat import compiled, loaded_for

told, events = [], []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
keep_compiled(told.append)
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
    def start(**environ):
        environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environ
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environ, check=True, capture_output=True, text=True
        )
        told = json.loads(done.stdout)
        assert told["result"] == 7
        return told

    return start


def test_the_next_process_compiles_nothing(start, tmp_path):
    first, second = start(), start()
    assert first["misses"] > 0
    assert first["hits"] == 0
    assert second["misses"] == 0
    assert second["hits"] == first["misses"]
    (folder,) = (tmp_path / "launcher" / "compiled").iterdir()
    assert [x.stat().st_mode & 0o777 for x in (folder.parent, folder)] == [0o700, 0o700]


def test_a_damaged_program_is_compiled_again(start, tmp_path):
    start()
    kept = list((tmp_path / "launcher" / "compiled").glob("*/*-cache"))
    assert kept
    for file in kept:
        file.write_bytes(b"no program")
    assert start()["hits"] == 0


def test_a_folder_that_others_may_write_to_is_not_used(start, tmp_path):
    folder = tmp_path / "launcher" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (said,) = start()["told"]
    assert said.startswith("compiled programs are not kept for the next start: ")
    assert str(folder) in said
    assert not list(folder.glob("*/*-cache"))


def test_a_users_own_folder_stays(start, tmp_path):
    own = tmp_path / "own"
    start(JAX_COMPILATION_CACHE_DIR=str(own), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert own.is_dir()
    assert not (tmp_path / "launcher").exists()
    start(JAX_ENABLE_COMPILATION_CACHE="false")
    assert not list(tmp_path.glob("launcher/compiled/*/*-cache"))
