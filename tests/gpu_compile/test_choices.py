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
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    command = [sys.executable, CELL, "--choices", folder, *WORDS, *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), MISSED.findall(done.stderr)


def test_kept_choices_are_those_of_each_later_compilation(tmp_path):
    """In another process, with another cache of compiled programs; without them it is not so."""
    kept = tmp_path / "kept"
    before, missed = compiled(kept, tmp_path / "a")
    products = [Path(path) for path, key in missed if " dot(" in key]
    assert before["are_new"]
    assert products
    assert {path.parent.parent for path in products} == {kept}
    for path in products:
        path.write_text(TILES)
    (first, _), (again, missed) = (compiled(kept, tmp_path / name) for name in "bc")
    assert not first["are_new"]
    assert not again["are_new"]
    assert first["texts"] == again["texts"]
    assert not {path for path, _ in missed} & set(map(str, products))
    tiles = '"output_tiles":[{"sizes":["16","32"]}]'
    without, by_them = ("".join(one["texts"].values()) for one in (before, first))
    assert by_them.count(tiles) > without.count(tiles) == 0
    assert " sort(" not in without


def test_deterministic_programs_sort_what_they_scatter(tmp_path):
    found, _ = compiled(tmp_path / "a", tmp_path / "b", "train.deterministic=true")
    assert " sort(" in "".join(found["texts"].values())
