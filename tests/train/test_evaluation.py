"""An evaluation is the mean over all held-out rows, under every plan, as one device computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.recipes import Dataset, InputError, Model, build_dataset, build_model
from launcher.recipes.data.batches import batches, held_out
from launcher.train.program import build_program
from launcher.train.worker import TrainWorker

MLP = "model=mlp", "model.hidden_size=16", "dataset=synthetic", "dataset.num_samples=100"
GPT = "model=gpt", "model.size=nano", "model.num_layers=2", "model.hidden_size=16"
SMALL = "train.global_batch_size=32", "train.eval_batches=null", "train.steps=1"
DATA = "parallel=data", "cluster.gpus=4"
SHARD = "parallel=shard", "parallel.data=2", "parallel.model=2", "cluster.gpus=4"
STAGES = (
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=8"),
    "cluster.gpus=4",
)


def trained(words):
    """A worker after one step, and its program."""
    config = load([*SMALL, *words])
    worker = TrainWorker()
    worker.build(to_dict(config))
    shape = local_shape(config.cluster.gpus or 1, 1, "cpu")
    worker.setup(plan_of(config.parallel, worker._program.train, shape).to_dict())
    worker.create()
    worker.step(1)
    return worker, config


def evaluation(worker):
    """What an evaluation finds, call by call as the driver asks for it."""
    found = [worker.evaluate(k) for k in range(worker._program.eval_batches)]
    assert found[:-1] == [None] * (len(found) - 1)
    metrics = found[-1].metrics
    worker.close()
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def rows_of(batches, count):
    """All rows of the first batches, as one batch."""
    parts = [batches(k) for k in range(count)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def loss_of(worker, config, batch):
    """The loss of one batch on one device."""
    params = jax.tree.map(np.asarray, worker._state.params)
    model = build_model(config.model, "fp32")
    return float(jax.jit(lambda p, b: model.loss(p, b, None)[0])(params, batch))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [STAGES, DATA, SHARD], ids=["stages", "data", "shard"])
def test_every_held_out_row_counts_once(plan):
    worker, config = trained([*MLP, *plan])
    held = rows_of(worker._program.dataset.validation, 4)
    assert len(held["x"]) == 100
    assert worker._program.eval_batches == 4
    expected = loss_of(worker, config, held)
    assert evaluation(worker)["eval/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [SHARD, STAGES], ids=["shard", "stages"])
def test_every_held_out_sequence_of_a_text_counts_once(plan, tmp_path):
    length, text = 8, tmp_path / "a.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 16 * 101 * length, "u1").tobytes())
    words = "dataset=text", f"dataset.path={text}", f"model.sequence_length={length}"
    fraction = (77 * length + 3) / text.stat().st_size
    worker, config = trained([*GPT, *words, f"dataset.validation_fraction={fraction}", *plan])
    held = rows_of(worker._program.dataset.validation, 3)
    assert len({row.tobytes() for row in held["tokens"]}) == len(held["tokens"]) == 77
    expected = loss_of(worker, config, held)
    assert evaluation(worker)["eval/loss"] == pytest.approx(expected, rel=1e-6)


def masked(weighted):
    """A model whose loss is a mean over what a mask leaves of each row."""

    def init(key):
        return {"w": jax.random.normal(key, (5, 7))}

    def loss(params, batch, key):
        errors = jnp.square(batch["x"] @ params["w"]) * batch["mask"]
        total = batch["mask"].sum()
        return errors.sum() / total, {"weight": total} if weighted else {}

    return Model(init, loss)


def sparse(num_rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 5)).astype(np.float32)
    return {"x": x, "mask": (rng.random((num_rows, 7)) < rng.random((num_rows, 1))) * np.float32(1)}


def dataset_of(rows, whole):
    """A dataset of these rows, and as many to train on: made by row, or by whole batches."""

    def build(config, model, batch_size, seed):
        def gather(which):
            return {name: x[which] for name, x in rows.items()}

        count = len(rows["x"])
        held = held_out(count, batch_size, gather)
        train = batches(count, batch_size, seed, gather)
        return Dataset(train, (lambda k: held(k)) if whole else held, "rows")

    return build


def patched(monkeypatch, model, dataset):
    monkeypatch.setattr("launcher.train.program.build_model", lambda *given: model)
    monkeypatch.setattr("launcher.train.program.build_dataset", dataset)


@pytest.mark.parametrize("whole", [False, True], ids=["rows", "whole batches"])
def test_a_mean_over_other_things_than_rows_is_weighed_by_what_the_model_says(monkeypatch, whole):
    rows, model = sparse(45), masked(weighted=True)
    patched(monkeypatch, model, dataset_of(rows, whole))
    worker, _ = trained([*MLP[:3], *DATA, *(("train.eval_batches=2",) if whole else ())])
    params = jax.tree.map(np.asarray, worker._state.params)
    expected = float(model.loss(params, rows, None)[0])
    found = evaluation(worker)
    assert list(found) == ["eval/loss"]
    assert found["eval/loss"] == pytest.approx(expected, rel=1e-6)


def test_without_weights_a_piece_counts_by_its_rows(monkeypatch):
    rows, model = sparse(40), masked(weighted=False)
    patched(monkeypatch, model, dataset_of(rows, whole=False))
    worker, _ = trained([*MLP[:3], *DATA])
    params = jax.tree.map(np.asarray, worker._state.params)
    held = worker._program.dataset.validation
    first, last = (float(model.loss(params, held(k), None)[0]) for k in range(2))
    expected = (32 * first + 8 * last) / 40
    assert evaluation(worker)["eval/loss"] == pytest.approx(expected, rel=1e-6)


def test_batches_of_an_evaluation_are_those_that_are_there_and_asked_for():
    def count(num_rows, batches):
        words = f"dataset.num_samples={num_rows}", f"train.eval_batches={batches}"
        config = load([*MLP[:3], "train.global_batch_size=32", *words])
        return build_program(config).eval_batches

    assert [count(100, 8), count(100, 2), count(100, "null"), count(96, "null")] == [4, 2, 4, 3]


def test_all_of_a_dataset_that_does_not_say_how_much_it_holds_out_is_refused(monkeypatch):
    def build(*arguments):
        dataset = build_dataset(*arguments)
        return dataset._replace(validation=lambda k: dataset.validation(k))

    monkeypatch.setattr("launcher.train.program.build_dataset", build)
    with pytest.raises(InputError) as error:
        build_program(load([*MLP, "train.eval_batches=null"]))
    assert str(error.value) == (
        "train.eval_batches=null evaluates on all that is held out, and dataset.name=synthetic "
        "does not say how much that is; set train.eval_batches to a number, or have its build "
        "return launcher.recipes.data.batches.held_out"
    )
