"""The kernels that XLA chose for a run are those of each later compilation, wherever it is made.

Choices are timed on a GPU, and here is none: a file stands for what one would have measured.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CELL = Path(__file__).parent / "cell.py"
WORDS = ("model=gpt", "model.size=nano", "model.num_layers=1", "cluster=h100_8", "cluster.gpus=1")
WORDS += ("cluster.hosts=1", "train.precision=bf16", "train.global_batch_size=8", "parallel=data")
LOGGED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "autotuner_cache=2"}
MISSED = re.compile(
    r"result file not found: (\S+)\n.*?Autotune cache miss: key = (.*?)version=", re.S
)
TILES = "triton { block_m: 16 block_n: 32 block_k: 32 num_stages: 2 num_warps: 4 num_ctas: 1 }\n"


def compiled(folder, cache, *words):
    """Compile in a process of its own; return what it found, and the choices that it missed."""
    environ = {
        **os.environ,
        **LOGGED,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XDG_CACHE_HOME": str(cache),
    }
    command = [sys.executable, CELL, "--choices", folder, *WORDS, *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), MISSED.findall(done.stderr)


def kept_in(cache):
    """The names of the step's programs that JAX keeps, by their keys."""
    found = (cache / "compiled").glob("jit_*.*-cache")
    return {path.name: path.name.split("-")[0] for path in found}


def test_kept_choices_are_those_of_each_later_compilation(tmp_path):
    """In another process, with another cache of compiled programs; without them it is not so."""
    kept, cache, another = tmp_path / "kept", tmp_path / "b", tmp_path / "c"
    before, missed = compiled(kept, tmp_path / "a")
    products = {Path(path).name for path, key in missed if " dot(" in key}
    assert before["are_new"]
    assert products
    (own,) = kept.glob("*/*")
    for name in products:
        (own / name).write_text(TILES)
    first, _ = compiled(kept, cache)
    programs = kept_in(cache)
    assert sorted(programs.values()) == ["jit_stage.0.forward_backward", "jit_update.0"]
    # Another run, which finds what was compiled; and the run, where nothing is.
    found, _ = compiled(tmp_path / "other", cache)
    assert kept_in(cache) == programs
    again, missed = compiled(tmp_path / "other", another)
    for one in (first, found, again):
        assert not one["are_new"]
        assert one["texts"] == first["texts"]
    assert not {Path(path).name for path, _ in missed} & products
    tiles = '"output_tiles":[{"sizes":["16","32"]}]'
    without, by_them = ("".join(one["texts"].values()) for one in (before, first))
    assert by_them.count(tiles) > without.count(tiles) == 0
    assert " sort(" not in without
    # A run with other choices finds nothing.
    own.rename(own.with_name("others"))
    for name in products:
        (own.with_name("others") / name).write_text(TILES.replace("32", "64"))
    others, _ = compiled(kept, cache)
    assert others["texts"] != first["texts"]
    assert sorted(kept_in(cache).values()) == sorted([*programs.values()] * 2)


def test_deterministic_programs_sort_what_they_scatter(tmp_path):
    found, _ = compiled(tmp_path / "a", tmp_path / "b", "train.deterministic=true")
    assert " sort(" in "".join(found["texts"].values())
