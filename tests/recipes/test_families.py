"""Every family: it learns, trains and resumes by each method as on one device, in its memory.

What a family's tests need is its row in `FAMILIES`; the rest is asked of all of them alike.
"""

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from launcher.config.compose import load
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.recipes import build_dataset, build_model
from launcher.recipes.datasets.synthetic import Synthetic
from launcher.trace import trace_step
from launcher.train.program import build_program, build_steps
from launcher.train.step import init_state, make_train_step

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE / "runtime"), str(HERE / "train")]
import cases  # noqa: E402
from checkpoint_peer import Trainee  # noqa: E402
from launch import together  # noqa: E402
from test_memory_measured import check as check_memory  # noqa: E402
from test_memory_measured import check_plan as check_memory_of  # noqa: E402


@dataclass(frozen=True)
class Family:
    """What the tests of a family need.

    Attributes:
        tiny: settings of a model that compiles fast.
        larger: settings of one whose activations are most of its memory.
        below: what the loss must fall below on samples that were not seen before.
        steps: in so many steps of 32 samples.
        rate: of Adam.
        by_slice: whether statistics are those of each slice of the batch.
    """

    tiny: str
    larger: str
    below: float
    steps: int = 80
    rate: float = 1e-2
    by_slice: bool = False


_TEXT = "vocab_size=32 sequence_length=8 num_layers=2 num_heads=2 hidden_size=16"
_LARGER = "hidden_size=128 num_heads=4 num_layers=4 sequence_length=64 vocab_size=256"
_PICTURES = "image_size=8 channels=2"
# The loss of texts is ln 32 = 3.47 where nothing is known and ln 4 = 1.39 where all is; of masked
# texts 2.5 by the frequencies of tokens; of four classes 1.39 and 0; of noise, drawn with variance
# 1, 1 and more than 0; of vectors the variance of their targets, 0.40 (mlp) and 0.35 (toy), and 0.
FAMILIES = {
    "gpt": Family(_TEXT, _LARGER, 2.0),
    "llama": Family(f"{_TEXT} num_kv_heads=1", _LARGER, 2.0, 40),
    "moe": Family(
        f"{_TEXT} num_experts=4 mlp_size=16 capacity_factor=1",
        f"{_LARGER} num_experts=4 mlp_size=256", 2.0, 40,
    ),
    "moe_dropless": Family(
        f"{_TEXT} num_experts=4 mlp_size=16 capacity_factor=0 shared_size=8",
        f"{_LARGER} num_experts=4 mlp_size=256 capacity_factor=0", 2.0, 40,
    ),
    "bert": Family(
        "vocab_size=16 sequence_length=8 num_layers=2 num_heads=2 hidden_size=32 mask_every=4",
        _LARGER, 2.0, 400, 3e-3,
    ),
    "vit": Family(
        f"{_PICTURES} num_classes=4 patch_size=4 num_layers=2 num_heads=2 hidden_size=16",
        "hidden_size=128 num_heads=4 num_layers=4 patch_size=4 image_size=32 num_classes=10",
        0.1, 40,
    ),
    "resnet": Family(
        f"{_PICTURES} num_classes=4 depth=10 width=4",
        "depth=18 width=16 image_size=16 num_classes=10", 0.1, 40, by_slice=True,
    ),
    "wide_resnet": Family(
        "image_size=16 channels=2 num_classes=4 depth=14 width=4 width_factor=2",
        "depth=50 width=8 width_factor=2 image_size=16 num_classes=10", 0.1, 20, by_slice=True,
    ),
    "unet": Family(
        f"{_PICTURES} width=8 levels=2 blocks=1",
        "width=16 levels=2 blocks=2 image_size=16", 0.45, 60,
    ),
    "mlp": Family(
        "input_size=8 hidden_size=32 output_size=4",
        "input_size=256 hidden_size=256 output_size=256 num_layers=8", 0.1, 60,
    ),
    "toy": Family(
        "hidden_size=16", "input_size=256 hidden_size=256 output_size=256 num_layers=8", 0.15,
        by_slice=True,
    ),
}  # fmt: skip
METHODS = {
    "manual": "parallel=manual parallel.num_stages=2 parallel.num_micro_batches=2 cluster.gpus=4",
    "auto": "parallel=auto parallel.num_stages=2 parallel.num_micro_batches=2 parallel.cost=model"
    " cluster.gpus=4",
    "zero3": "parallel=zero3 cluster.gpus=2",
    "three_d": "parallel=three_d parallel.data=2 parallel.model=2 parallel.pipeline=2"
    " parallel.num_micro_batches=2 cluster.gpus=8",
    "two_processes": "parallel=manual parallel.num_stages=2 parallel.num_micro_batches=2"
    " cluster.gpus=4 cluster.hosts=2",
    "zero3_in_two_processes": "parallel=zero3 cluster.gpus=2 cluster.hosts=2",
}
STEPS = 4  # a checkpoint after two
COMMON = (
    f"train.global_batch_size={cases.BATCH} optimizer=adam optimizer.learning_rate=1e-2"
    " optimizer.eps=1e-3 optimizer.warmup_steps=0"
)


def settings(name, sizes):
    return [f"model={name.partition('_dropless')[0]}", *(f"model.{s}" for s in sizes.split())]


def words(name, method):
    return [*settings(name, FAMILIES[name].tiny), *COMMON.split(), *METHODS[method].split()]


@functools.cache
def on_one_device(name, slices):
    """A training by plain `jax.jit`: its losses, and the parameters and the state after each step.

    Statistics and noise are those of so many slices, one after the other.
    """
    config = load([*settings(name, FAMILIES[name].tiny), *COMMON.split(), "dataset=synthetic",
                   "train.steps=100", "train.eval_every=0"])  # fmt: skip
    program = build_program(config)
    init, step = build_steps(config, build_model(config.model, "fp32"))
    over = functools.partial(cases._over_slices, slices)
    losses, states = [], [jax.jit(init)(program.seed)]
    with mock.patch("launcher.train.step.value_and_grad", over):
        step = jax.jit(step)
        for k in range(STEPS):
            state, metrics = step(states[-1], program.dataset.train(k))
            states.append(state)
            losses.append(float(metrics["loss"]))
    return losses, [jax.device_get(state.model) for state in states]


FAST = {("toy", "manual")}
SLOW = {  # of each kind of layer one family; each way
    *(("moe_dropless", "auto"), ("bert", "three_d"), ("vit", "zero3"), ("resnet", "manual")),
    *(("unet", "auto"), ("mlp", "zero3_in_two_processes")),
}


def marked(case):
    return [] if case in FAST else [pytest.mark.slow if case in SLOW else pytest.mark.stress]


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=marked((name, method)))
        for name in FAMILIES
        for method in METHODS
    ],
)
def test_it_trains_as_on_one_device_and_resumes_exactly(name, method, tmp_path):
    run = in_two_processes if "processes" in method else in_this_process
    slices, losses, again = run(words(name, method), tmp_path)
    assert again == losses
    wanted, states = on_one_device(name, slices if FAMILIES[name].by_slice else 1)
    np.testing.assert_allclose(losses, wanted[2:], rtol=1e-5)
    undisturbed, resumed = (restored(tmp_path / name, 4) for name in ("last", "last_again"))
    jax.tree.map(np.testing.assert_array_equal, resumed, undisturbed)
    saved = restored(tmp_path / "saved", 2)
    for part, want in states[2].items():
        jax.tree.map(close, saved[part], want)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want, states[0][part])
        assert max(jax.tree.leaves(moved)) > 1e-3


def restored(folder, step):
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore())


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def in_this_process(given, folder):
    """The slices of the plan, and the losses of the third and fourth step, also after a resume.

    The folder's `saved` has the state after two steps; `last` and `last_again` have it after four,
    also after a resume.
    """
    trainee = Trainee(given, model=())
    plan = trainee.worker._train.plan
    assert len({d for stage in plan.stages for d in stage.devices}) > 1
    losses = trainee.create_and_save(str(folder / "saved"))
    trainee.save_last(str(folder / "last"))
    again = trainee.resume(str(folder / "saved"))
    trainee.save_last(str(folder / "last_again"))
    trainee.worker.close()
    return trainee.slices(), losses, again


def in_two_processes(given, folder):
    saved = str(folder / "saved")
    jobs = [
        ["slices"],
        ["create_and_save", saved],
        ["save_last", str(folder / "last")],
        ["resume", saved],
        ["save_last", str(folder / "last_again")],
    ]
    text = json.dumps({"words": given, "model": [], "jobs": jobs})
    devices = 2 if "cluster.gpus=4" in given else 1
    told = [json.loads(t) for t in together(HERE / "checkpoint_peer.py", 2, devices,
                                            given=text)]  # fmt: skip
    knows = next(each for each in told if None not in each[1])
    return knows[0], knows[1], knows[3]


LEARNS_SLOW = {"moe", "toy"}


@pytest.mark.devices(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LEARNS_SLOW else pytest.mark.stress)
        for name in FAMILIES
    ],
)
def test_its_loss_falls_on_samples_that_it_has_not_seen(name):
    family = FAMILIES[name]
    options = load([*settings(name, family.tiny), "dataset=synthetic"]).model
    model, optimizer = build_model(options, "fp32"), optax.adam(family.rate)
    data = build_dataset(Synthetic(num_samples=32 * family.steps), options, 32, seed=0)
    step = jax.jit(make_train_step(model, optimizer, lambda count: family.rate))
    state = jax.jit(functools.partial(init_state, model, optimizer))(key())
    losses = []
    for k in range(family.steps):
        state, metrics = step(state, data.train(k))
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < family.below


def key():
    return np.asarray(jax.random.key_data(jax.random.key(0)))


PLANS = "two_stages", "one_stage", "replicas", "auto", "zero3", "three_d"
# Other plans of other models are measured in tests/runtime/test_memory_measured.py.
MEASURED_SLOW = {("mlp", "auto"), ("mlp", "three_d")}
OVERESTIMATED = {("resnet", "zero3")}


def marked_measured(case):
    if case in OVERESTIMATED:
        why = "27 % over: the estimate holds gathered parameters all through a pass"
        return [pytest.mark.stress, pytest.mark.xfail(reason=why)]
    return [pytest.mark.slow if case in MEASURED_SLOW else pytest.mark.stress]


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=marked_measured((name, plan)))
        for name in FAMILIES
        for plan in PLANS
    ],
)
def test_its_memory_is_estimated_within_fifteen_percent(name, plan):
    method = METHODS[plan].split() if plan in METHODS else []
    config = load([*settings(name, FAMILIES[name].larger), "dataset=synthetic", *method])
    model, optimizer = build_model(config.model, "fp32"), optax.adam(1e-3)
    batch = build_dataset(config.dataset, config.model, 32, seed=0).train(0)
    step = make_train_step(model, optimizer, lambda count: 1e-3)
    state = jax.eval_shape(functools.partial(init_state, model, optimizer), key())
    traced = trace_step(step, (state, batch))
    if not method:
        check_memory(traced, plan, within=0.15)
        return
    cluster = local_shape(config.cluster.gpus, config.cluster.hosts, "cpu")
    check_memory_of(traced, plan_of(config.parallel, traced, cluster), within=0.15)
