"""Data parallel in two worker processes: each makes its own rows, and both start alike."""

import re
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from launched import Launcher, lines, losses, summary, train, typed

# A model whose first parameters, on request, come from a generator without a seed: different ones
# in each process.
MODEL = """
import jax.numpy as jnp
import numpy as np

from launcher.recipes import Model


def build(options, precision):
    def init(key):
        rng = np.random.default_rng(options.seed)
        return {"w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), "b": jnp.zeros(2)}

    def loss(params, batch, key):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - 1) ** 2), {}

    return Model(init, loss)
"""

# 64 rows to train on and 100 held out; each process notes which it makes. On request, the
# second process's memory fails after the first steps.
DATA = """
import ctypes
import os
from pathlib import Path

import jax
import numpy as np

from launcher.recipes import Dataset
from launcher.recipes.data.batches import batches, held_out

ROWS = np.random.default_rng(0).normal(size=(164, 4)).astype(np.float32)


def check(options, model_options, validation):
    pass


def damage():
    # What a fault of this process's memory would do to the parameter `w` and its moments.
    for array in jax.live_arrays():
        if array.shape == (4, 2) and not array.is_deleted():
            (shard,) = array.addressable_shards
            number = ctypes.c_float.from_address(shard.data.unsafe_buffer_pointer())
            number.value += 1


def build(options, model_options, global_batch_size, seed):
    def rows(which):
        nonlocal made
        made += 1
        if hasattr(options, "fault") and made > 3 and jax.process_index() == 1:
            damage()
        with Path(options.notes, f"{os.getpid()}.txt").open("a") as file:
            print(*which, file=file)
        return {"x": ROWS[which]}

    made = 0
    train = batches(64, global_batch_size, seed, rows)
    held = held_out(100, global_batch_size, lambda which: rows(which + 64))
    return Dataset(train, held, "rows")
"""

WORDS = typed(
    "model=custom model.module=my_model dataset=custom dataset.module=my_data "
    "allow_modules=[my_model,my_data] cluster=emulated cluster.gpus=2 cluster.hosts=2 "
    "parallel=data train.steps=4 train.global_batch_size=32 train.eval_every=4 "
    "train.eval_batches=null train.check_replicas_every=1 wandb.mode=disabled run.id=one"
)


def ended(folder: Path, seed: str, more: str = "") -> tuple[int, str, str]:
    (folder / "my_model.py").write_text(MODEL)
    (folder / "my_data.py").write_text(DATA)
    (folder / "notes").mkdir()
    options = f"dataset.options={{notes: notes{more}}}", f"model.options={{seed: {seed}}}"
    return Launcher(folder, *WORDS, *options).end()


@pytest.mark.slow
def test_an_init_that_differs_by_process_is_the_first_ones(tmp_path: Path) -> None:
    code, out, err = ended(tmp_path, "null")  # checked from the first step on
    assert (code, err) == (0, "")
    assert (
        "the processes made different first values of params.w, by an init that does not follow "
        "from its key alone; all take the first replica's\n"
    ) in out
    home = tmp_path / "outputs" / "one"
    assert len(lines(home)) == 4

    # A process asks for its own rows: after one for the shapes, half of each batch.
    asked = [
        [{int(n) for n in line.split()} for line in path.read_text().splitlines()]
        for path in (tmp_path / "notes").iterdir()
    ]
    first, second = (each[1:] for each in asked if len(each) > 1)  # the driver wants no others
    steps = [(a, b) for a, b in zip(first, second, strict=True) if max(a | b) < 64]
    held = [(a, b) for a, b in zip(first, second, strict=True) if max(a | b) >= 64]
    assert len(steps) == 4
    assert all(not a & b for a, b in steps)
    assert [len(a | b) for a, b in held] == [32, 32, 32, 4]
    assert all(not a & b for a, b in held)
    assert set.union(*(a | b for a, b in held)) == set(range(64, 164))

    # And what they find is the mean over all held-out rows.
    with ocp.CheckpointManager(home / "checkpoints") as manager:
        params = manager.restore(4, args=ocp.args.StandardRestore())["params"]
    rows = np.random.default_rng(0).normal(size=(164, 4)).astype(np.float32)[64:]
    expected = np.mean((rows @ params["w"] + params["b"] - 1) ** 2)
    assert lines(home)[-1]["eval/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_run_whose_replicas_part_ends_and_names_step_array_and_process(tmp_path: Path) -> None:
    code, _, err = ended(tmp_path, "0", ", fault: true")
    assert (code, err.count("\n")) == (1, 1), err
    told = re.search(
        r"step (\d): the replica of \S+\.w on device 1 \(process 1\) differs from that on device 0 "
        r"\(process 0\)",
        err,
    )
    assert told, err
    home = tmp_path / "outputs" / "one"
    assert summary(home)["exit_reason"].startswith(f"step {told[1]}: the replica of")
    assert not list((home / "checkpoints").glob(told[1]))


@pytest.mark.stress
def test_replicas_of_stages_on_two_hosts_are_checked_at_each_step(tmp_path: Path) -> None:
    """More digests than a device may have in flight, each of several devices, beside transfers."""
    train(
        tmp_path,
        *typed(
            "recipe=smoke model=gpt model.num_layers=4 model.scan_layers=true dataset=synthetic "
            "cluster=emulated cluster.hosts=2 cluster.gpus=4 parallel=three_d parallel.data=2 "
            "parallel.model=1 parallel.pipeline=2 parallel.num_micro_batches=2 "
            "optimizer.clip_norm=1 train.eval_every=3 train.steps=8 train.check_replicas_every=1 "
            "wandb.mode=disabled cluster.step_timeout=60 cluster.max_restarts=0 run.id=here"
        ),
    )
    assert len(losses(tmp_path / "outputs" / "here")) == 8


@pytest.mark.slow
def test_replicas_on_two_hosts_resume_to_the_bit(tmp_path: Path) -> None:
    """Whose gradients are summed in memory that their processes share."""
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    words = typed(
        "dataset=text dataset.path=fox.txt model.num_layers=2 model.num_heads=2 "
        "model.hidden_size=32 model.sequence_length=16 model.dropout=0.1 "
        "train.global_batch_size=8 train.eval_every=0 optimizer.decay=constant parallel=data "
        "cluster=emulated cluster.hosts=2 cluster.gpus=2 report=none"
    )
    states = {}
    for run, steps in ("whole", 6), ("resumed", 3), ("resumed", 6):
        train(tmp_path, *words, f"run.id={run}", f"train.steps={steps}")
        with ocp.CheckpointManager(tmp_path / "outputs" / run / "checkpoints") as manager:
            states[run] = manager.restore(steps, args=ocp.args.StandardRestore())
    jax.tree.map(np.testing.assert_array_equal, states["resumed"], states["whole"])


# Each process notes what JAX says of its cache.
COUNTS = """
import os
from pathlib import Path

import jax
from launcher.recipes.datasets.synthetic import Synthetic
from launcher.recipes.datasets.synthetic.dataset import build as synthetic


def check(options, model_options, validation):
    pass


def build(options, model_options, global_batch_size, seed):
    def note(event, **_):
        kind = event.rpartition("/")[2]
        if kind in ("cache_hits", "cache_misses"):
            with Path(f"{os.getpid()}.{kind}").open("a") as file:
                print(jax.process_index(), file=file)

    in_worker = Path("/proc/self/cmdline").read_text().startswith("ray::")
    if in_worker:
        jax.monitoring.register_event_listener(note)
    return synthetic(Synthetic(), model_options, global_batch_size, seed)
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method",
    ["parallel=zero2", "parallel=manual parallel.num_stages=2 parallel.num_micro_batches=2"],
)
def test_a_second_start_compiles_nothing_in_any_process(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "counts.py").write_text(COUNTS)
    words = typed(
        "model=mlp dataset=custom dataset.module=counts allow_modules=[counts] cluster=emulated "
        f"cluster.gpus=4 cluster.hosts=2 train.steps=2 train.eval_every=0 report=none {method}"
    )

    def started(run: str) -> dict[str, set[str]]:
        """Which processes found a program, and which had to compile one."""
        train(tmp_path, *words, f"run.id={run}")
        told: dict[str, set[str]] = {".cache_hits": set(), ".cache_misses": set()}
        for path in tmp_path.glob("*.cache_*"):
            told[path.suffix] |= {*path.read_text().split()}
            path.unlink()
        return told

    assert started("first")[".cache_misses"] == {"0", "1"}
    assert started("second") == {".cache_hits": {"0", "1"}, ".cache_misses": set()}
