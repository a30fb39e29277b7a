"""What learns and how: groups, frozen parameters, adapters, averages, Muon, under every plan."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from rich.console import Console

from launcher.checkpoint.train_state import flat_name, without_adapters
from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.tasks.export import ExportTask
from launcher.plan import local_shape
from launcher.recipes import InputError, build_model
from launcher.runtime import compile_step
from launcher.train.lora import with_adapters
from launcher.train.optimizer import build_optimizer, matrix_axes
from launcher.train.program import build_program, build_steps
from launcher.train.worker import TrainWorker

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
from adapted import merge  # noqa: E402
from checkpoint_peer import Trainee  # noqa: E402
from launch import together  # noqa: E402

GPT = (
    *("model=gpt", "model.vocab_size=32", "model.hidden_size=16", "model.num_layers=2"),
    *("model.num_heads=2", "model.sequence_length=8", "dataset=synthetic"),
    *("train.global_batch_size=8", "train.steps=20", "train.eval_every=0", "cluster=emulated"),
    *("optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2"),
)
WAYS = {
    "groups": [
        "optimizer.groups=[{pattern: '*.bias', learning_rate: 1e-3, weight_decay: 0.5},"
        "{pattern: 'layers_1.*', frozen: true}, {pattern: '*embed*', weight_decay: 0.3}]"
    ],
    "train_only": ["optimizer.train_only=layers_1.*"],
    # Of a gradient far below eps Adam's step is small, and not its rounding's sign.
    "ema": ["optimizer.ema=0.5", "optimizer.eps=1e-6"],
    "lora": ["optimizer.lora.rank=2", "optimizer.ema=0.9"],
    "muon": ["optimizer=muon", "optimizer.eps=1e-6"],
    "wsd": ["optimizer.decay=wsd", "optimizer.decay_fraction=0.9"],
    "lora_scanned": ["optimizer.lora.rank=2", "model.scan_layers=true"],
    "muon_scanned": ["optimizer=muon", "model.scan_layers=true", "optimizer.ema=0.9"],
}
PLANS = {
    "manual": ["parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=2"],
    "zero3": ["parallel=zero3"],
    "three_d": ["parallel=three_d", "parallel.model=2", "parallel.pipeline=2"],
}
FAST = {("lora", "manual")}
SLOW = {("groups", "manual"), ("muon", "zero3")}
STEPS = 3


@functools.cache
def one_device(way):
    config = load([*GPT, *WAYS[way]])
    program = build_program(config)
    model = with_adapters(build_model(config.model, "fp32"), config.optimizer.lora)
    init, step = build_steps(config, model)
    state, step = jax.jit(init)(program.seed), jax.jit(step)
    states = [state]
    for k in range(STEPS):
        states.append(step(states[-1], program.dataset.train(k))[0])
    return config, states


def largest_change(one, other):
    return jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), one, other)


@pytest.mark.parametrize(
    ("way", "method"),
    [
        pytest.param(
            way, method, marks=[] if (way, method) in FAST else [by_hand], id=f"{way}-{method}"
        )
        for way in WAYS
        for method in PLANS
        for by_hand in [pytest.mark.slow if (way, method) in SLOW else pytest.mark.stress]
    ],
)
def test_a_plan_computes_what_one_device_does(way, method):
    _, states = one_device(way)
    config = load([*GPT, *WAYS[way], *PLANS[method], "cluster.gpus=4"])
    program = build_program(config)
    plan = plan_of(config.parallel, program.train, local_shape(4, 1, "cpu"))
    step = compile_step(program.train, plan, jax.devices())
    state = step.create(program.init, program.seed)
    for k in range(STEPS):
        state, _ = step(state, program.dataset.train(k))
    got, want = (jax.tree.map(np.asarray, s) for s in (state, states[-1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    moved = jax.tree.leaves(largest_change(want.params, states[0].params))
    assert max(moved) > 1e-3


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("way", "method"),
    [
        *(("ema", "zero3"), ("lora", "manual"), ("muon", "manual")),
        *((way, "zero3") for way in WAYS if way != "ema"),
    ],
)
def test_two_processes_compute_what_one_device_does(way, method, tmp_path):
    words = [*GPT, *WAYS[way], *PLANS[method], "cluster.gpus=4", "cluster.hosts=2"]
    jobs = [["create_and_save", str(tmp_path)]]
    given = json.dumps({"words": words, "model": [], "jobs": jobs})
    together(HERE.parent / "checkpoint_peer.py", 2, 2, given=given)
    _, states = one_device(way)
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = manager.restore(2, args=ocp.args.StandardRestore())
    for part in ("params", "ema"):
        if getattr(states[2], part) is not None:
            want = jax.tree.map(np.asarray, getattr(states[2], part))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), saved[part], want
            )


def test_what_is_frozen_stays_and_has_no_optimizer_state():
    _, states = one_device("train_only")
    names = {name for name, x in largest_change(states[0].params, states[-1].params).items()
             if max(jax.tree.leaves(x)) > 0}  # fmt: skip
    assert names == {"layers_1"}
    (adam,) = (part for part in states[-1].opt_state if hasattr(part, "mu"))
    layer = jax.tree.leaves(states[-1].params["layers_1"])
    assert [x.shape for x in jax.tree.leaves(adam.mu)] == [x.shape for x in layer]


def test_groups_have_their_own_rates_and_decays():
    config = load([*GPT, "optimizer=sgd", "optimizer.momentum=0", "optimizer.clip_norm=null",
                   "optimizer.decay=constant", "optimizer.learning_rate=0.5",
                   "optimizer.weight_decay=0.25", "optimizer.groups=[{pattern: one.*, "
                   "learning_rate: 0.125}, {pattern: '*', weight_decay: 0}]"])  # fmt: skip
    optimizer, _ = build_optimizer(config.optimizer, 20)
    params = {"one": {"w": jnp.ones((2, 2))}, "two": {"w": jnp.ones((2, 2))}}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["one"]["w"], -0.125 * 1.25)
    np.testing.assert_allclose(updates["two"]["w"], -0.5)


def test_adapters_start_at_nothing_and_learn_beside_a_model_that_stays():
    config, states = one_device("lora")
    model = build_model(config.model, "fp32")
    batch = build_program(config).dataset.train(0)
    adapted_loss = jax.jit(with_adapters(model, config.optimizer.lora).loss)
    loss = jax.jit(model.loss)
    first, last = states[0].params, states[-1].params
    base = without_adapters(first)
    np.testing.assert_allclose(
        adapted_loss(first, batch, None)[0], loss(base, batch, None)[0], rtol=1e-6
    )
    assert max(jax.tree.leaves(largest_change(base, without_adapters(last)))) == 0
    assert len(jax.tree.leaves(first["lora"])) == 2 * 4 * 2
    kernel = last["lora"]["layers_0"]["self_attention"]["linear_qkv"]["kernel"]
    assert (kernel["a"].shape, kernel["b"].shape) == ((16, 2), (2, 48))
    merged = merge(last, config.optimizer.lora)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(
        loss(merged, batch, None)[0], adapted_loss(last, batch, None)[0], rtol=1e-6
    )
    assert max(jax.tree.leaves(largest_change(base, merged))) > 1e-3


def test_an_average_is_of_the_parameters_that_were():
    config, states = one_device("ema")
    want = states[0].params
    for state in states[1:]:
        want = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, want, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), states[-1].ema, want)
    assert states[-1].averaged["params"] is not states[-1].params
    del config


def test_muon_makes_updates_orthogonal_of_a_size_like_adams():
    config, states = one_device("muon")
    _, adam = one_device("ema")
    before, after = (s.params["layers_0"]["mlp"]["linear_fc1"]["kernel"] for s in states[:2])
    rate = config.optimizer.learning_rate
    update = (after - before) / rate + 0.1 * before  # weight decay taken out
    singular = np.linalg.svd(update, compute_uv=False) / (0.2 * 64**0.5)
    assert sorted(singular)[1] > 0.6  # five steps of the iteration; a norm before it takes a rank
    assert singular.max() < 1.3
    words = [s.params["word_embeddings"]["embedding"] for s in (states[1], adam[1])]
    np.testing.assert_allclose(*words, atol=1e-6)  # by Adam, the same


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("a.linear_qkv.kernel", (16, 3, 2, 8), (0, 1)),
        ("a.linear_proj.kernel", (2, 8, 16), (0, 2)),
        ("a.linear_k.kernel", (64, 2, 8), (0, 1)),
        ("layers.mlp.kernel", (4, 16, 64), (1, 1)),
        ("layers_0.experts.experts_up", (4, 16, 64), (1, 1)),
        ("layers.experts.experts_up", (2, 4, 16, 64), (2, 1)),
        ("layers.norm.scale", (4, 16), None),
        ("bias", (16,), None),
    ],
)
def test_the_matrix_that_an_array_stands_for(name, shape, axes):
    assert matrix_axes(name, shape) == axes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.train_only=nothing"], "optimizer.train_only=nothing is the name of no param"),
        (["optimizer.groups=[{pattern: x.*}]"], r"optimizer.groups\[0\].pattern=x.\* is the name"),
        (["optimizer.groups=[{pattern: '*', frozen: true}]"], "freezes all parameters"),
        (["optimizer.lora.rank=2", "optimizer.lora.pattern=x"], "optimizer.lora.pattern=x is the"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(words, said):
    with pytest.raises(InputError, match=said):
        build_program(load([*GPT, *words]))


OWN = """
import jax.numpy as jnp, optax
def build(options, steps):
    return optax.sgd(options.rate), lambda count: options.rate * jnp.ones(())
"""


def test_an_optimizer_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "own_optimizer.py").write_text(OWN)
    (tmp_path / "bad_optimizer.py").write_text("def build(options, steps): return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = "optimizer=custom", "optimizer.module=own_optimizer", "optimizer.options={rate: 0.5}"
    plain = [word for word in GPT if not word.startswith("optimizer")]
    config = load([*plain, *words, "allow_modules=[own_optimizer]", "train.non_finite=skip"])
    program = build_program(config)
    model = build_model(config.model, "fp32")
    init, step = build_steps(config, model)
    state, batch = jax.jit(init)(program.seed), program.dataset.train(0)
    new, metrics = jax.jit(step)(state, batch)
    grads = jax.jit(jax.grad(lambda p: model.loss(p, batch, None)[0]))(state.params)
    want = jax.tree.map(lambda p, g: p - 0.5 * g, state.params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new.params, want)
    assert float(metrics["learning_rate"]) == 0.5
    words = "optimizer=custom", "optimizer.module=bad_optimizer", "allow_modules=[bad_optimizer]"
    with pytest.raises(InputError, match="must return \\(transformation, schedule\\)"):
        build_program(load([*plain, *words]))


@pytest.mark.slow  # adapters, which freeze the rest: the test below
def test_a_state_with_frozen_parameters_is_saved_and_resumed(tmp_path):
    trainee = Trainee([*GPT, *WAYS["groups"], *PLANS["manual"], "cluster.gpus=2"], model=())
    losses = trainee.create_and_save(str(tmp_path))
    trainee.worker.restore(str(tmp_path), 2)
    assert trainee._losses(3, 4) == losses
    trainee.worker.close()


def test_adapters_are_merged_at_export_and_begin_anew_on_a_stored_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*GPT, *WAYS["lora"], *PLANS["manual"], "cluster.gpus=2"]
    trainee = Trainee(words, model=())
    (tmp_path / "outputs/mine/checkpoints").mkdir(parents=True)
    losses = trainee.create_and_save("outputs/mine/checkpoints")
    (tmp_path / "outputs/mine/config.yaml").write_text(yaml.safe_dump(to_dict(load(words))))
    for name, more in {"plain": [], "average": ["export.ema=true"]}.items():
        asked = [f"export.path={name}.npz", "task=export", "run.id=mine", *more]
        ExportTask().run(load(asked), Console(quiet=True))
    trainee.worker.restore("outputs/mine/checkpoints", 2)
    state, lora = trainee.worker._state, load(words).optimizer.lora
    state = jax.tree.map(np.array, state)
    assert trainee._losses(3, 4) == losses
    for name, params in {"plain": state.params, "average": state.averaged["params"]}.items():
        with np.load(f"{name}.npz") as stored:
            for path, want in jax.tree_util.tree_leaves_with_path(merge(params, lora)):
                np.testing.assert_allclose(stored[f"params.{flat_name(path)}"], want, atol=1e-6)
        assert not [key for key in stored.files if "lora" in key]
    trainee.worker.create("plain.npz")
    begun = jax.tree.map(np.asarray, trainee.worker._state)
    jax.tree.map(
        np.testing.assert_array_equal, begun.averaged["params"]["lora"], begun.params["lora"]
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        without_adapters(begun.params),
        merge(state.params, lora),
    )
    trainee.worker.close()


@pytest.mark.parametrize("method", ["manual", pytest.param("zero3", marks=pytest.mark.stress)])
def test_an_evaluation_is_of_the_averages(method):
    evaluated = [word for word in GPT if not word.startswith("train.eval")]
    words = [*evaluated, "train.eval_every=1", "train.eval_batches=1", *WAYS["ema"], *PLANS[method]]
    config = load([*words, "cluster.gpus=2"])
    worker = TrainWorker()
    worker.build(to_dict(config))
    program = worker._program
    worker.setup(plan_of(config.parallel, program.train, local_shape(2, 1, "cpu")).to_dict())
    worker.create()
    worker.step(1)
    worker.step(2)
    got = worker.evaluate(0).metrics["eval/loss"]
    state = jax.tree.map(np.asarray, worker._state)
    loss = jax.jit(build_model(config.model, "fp32").loss)
    losses = [
        float(loss(p, program.dataset.validation(0), None)[0])
        for p in (state.averaged["params"], state.params)
    ]
    assert got == pytest.approx(losses[0], abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3
    worker.close()
