"""Advice: each piece is a command line whose plan has the gain that was promised."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.__main__ import main
from launcher.config.compose import load
from launcher.driver.planning import advice
from launcher.driver.planning.advice import changes, scaled
from launcher.plan import Advice
from launcher.report.console import make_console
from launcher.report.plan_table import improvements, print_advice

QUIET = ("task=plan", "report=none", "train.eval_every=0", "dataset=synthetic")
MLP = ("model=mlp", "model.hidden_size=512", *QUIET)
GPT = ("model=gpt", *QUIET)
PRICED = ("cluster.price_per_device_hour=2",)
# The plans that advice is held to, as command lines.
STATED = {
    "data": (*MLP, "cluster=a100_8", "parallel=data", *PRICED),
    "zero3": (*MLP, "cluster=h100_8", "parallel=zero3", "train.precision=bf16"),
    "a pipeline": (*MLP, "cluster=a100_8", "parallel=manual", "cluster.gpus=2"),
    "three axes": (*MLP, "cluster=p3_16xlarge", "parallel=three_d"),
    "a model axis": (*MLP, "cluster=b200_8", "parallel=shard", "cluster.gpus=4"),
    "searched": (*MLP, "cluster=a100_8", "cluster.gpus=4"),
    "searched, two hosts": (*MLP, "cluster=p4d_24xlarge_x4", "cluster.hosts=2", "cluster.gpus=4"),
    "searched, microbatches given": (
        *(*GPT, "cluster=h200_8", "cluster.gpus=2", "parallel.num_micro_batches=4"),
        *("train.precision=bf16", *PRICED),
    ),
    "searched, little memory": (
        *(*GPT, "model.size=mini", "cluster=a100_8", "cluster.gpus=2"),
        "cluster.device.memory_gib=1.5",
    ),
    "a Llama": ("model=llama", *QUIET, "cluster=a100_pcie_4", "cluster.gpus=2", "parallel=zero2"),
}


def planned(words, name):
    """Run a command line; return its `plan.json`."""
    assert main([*words, f"run.id={name}"]) == 0
    return json.loads(Path(f"outputs/{name}/plan.json").read_text())


def throughput(plan, words):
    """Tokens a second, of samples without tokens these."""
    length = getattr(load(list(words)).model, "sequence_length", None) or 1
    return plan["predicted_samples_per_second"] * length


def hold_to_its_promises(words):
    plan = planned([*words, "plan.advise=true"], "asked")
    before = throughput(plan, words)
    assert plan["advice"]
    for number, one in enumerate(plan["advice"]):
        changed = [*words, *one["change"]]
        again = planned(changed, f"changed-{number}")
        gain = throughput(again, changed) / before - 1
        if not one["largest"]:
            assert gain == pytest.approx(one["gain"], abs=0.02), one["change"]
        devices = load(list(words)).cluster.gpus / load(changed).cluster.gpus
        assert one["gain_per_cost"] is None or (
            (1 + gain) * devices - 1 == pytest.approx(one["gain_per_cost"], abs=0.02)
        )
        assert again["predicted_step_seconds"] == pytest.approx(one["predicted_step_seconds"])
        assert again["num_parameters"] == one["num_parameters"]
        fullest = max(stage["memory_bytes"] for stage in again["stages"])
        assert fullest <= again["cluster"]["memory_bytes"]
    return plan


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def few(monkeypatch):
    """Of the changes only some are planned, so that a test takes a second."""

    def only(*wanted):
        every = advice.changes
        monkeypatch.setattr(advice, "_SIZES", 0)
        monkeypatch.setattr(
            advice, "changes", lambda config: [c for c in every(config) if c.what in wanted]
        )

    return only


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STATED)
def test_each_piece_of_advice_planned_again_has_the_promised_gain(name, here):
    hold_to_its_promises(STATED[name])


def test_advice_keeps_its_promises_and_is_told(here, few, capsys):
    few("one more host", "twice the batch", "one more GPU")
    plan = hold_to_its_promises(STATED["data"])
    host, batch = plan["advice"]  # 9 GPUs do not share 32 samples
    assert host["change"] == [
        "cluster.hosts=2",
        "cluster.gpus=16",
        "cluster.links.inter_host_gb_per_second=25",
    ]
    assert (host["devices"], batch["devices"]) == (16, 8)
    assert (host["trains_otherwise"], batch["trains_otherwise"]) == (False, True)
    for one in plan["advice"]:  # 200 steps of 32 samples, at 2 a device and hour
        assert one["seconds"] == pytest.approx(200 * 32 / one["samples_per_second"])
        assert one["cost"] == pytest.approx(one["seconds"] / 3600 * one["devices"] * 2)
    told = capsys.readouterr().out
    assert "advice: 3 changes planned, of which 2 fit" in told
    assert "time to 6.40 K samples" in told
    page = Path("outputs/asked/report.html").read_text()
    assert "<h2>Advice</h2>" in page
    assert "train.global_batch_size=64" in page


@pytest.mark.slow
def test_where_the_plan_does_not_fit_advice_is_what_does(here, few, capsys):
    few("one more GiB a GPU", "remat full", "a searched plan")
    words = [*MLP, "cluster=a100_8", "cluster.gpus=1", "cluster.device.memory_gib=0.01"]
    words += ["parallel=data", "plan.advise=true", "run.id=small"]
    assert main(words) == 1
    plan = json.loads(Path("outputs/small/plan.json").read_text())
    (one,) = plan["advice"]
    assert one["change"] == ["cluster.device.memory_gib=1.01"]
    assert one["gain"] is None
    assert one["gain_per_cost"] is None
    assert "no costs are shown" in capsys.readouterr().out


@pytest.mark.parametrize(("fits", "least"), [(True, 1.0), (False, 0.1)])
def test_the_largest_model_is_the_largest_of_few_that_fit(fits, least):
    """By a planner that fits models up to some size, given one that fits or does not."""
    model = load(["model=gpt", "model.size=1.3b"]).model
    missing = -1 if fits else 1
    plan = SimpleNamespace(
        held_devices=8, cluster={"memory_bytes": 1 << 35}, num_parameters=1 << 29
    )
    plan.missing_bytes = missing
    tried = []

    def advise(change):
        tried.append(volume(change.words) / volume(scaled(model, 1.0)))
        return tried[-1] if tried[-1] <= 10 * least else None

    found = advice._largest(model, plan, advise)
    assert len(tried) <= advice._SIZES
    assert found == max(size for size in tried if size <= 10 * least)
    assert found > least


def volume(words):
    found = {key: int(value) for key, value in (word.split("=") for word in words)}
    return found["model.num_layers"] * found["model.hidden_size"] ** 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("times", [0.2, 1.0, 30.0])
@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "vit", "resnet", "unet", "mlp"])
def test_a_scaled_model_is_one_that_the_family_takes(name, times):
    words = [f"model={name}", "dataset=synthetic"]
    given = load(words).model
    model = load([*words, *scaled(given, times)]).model
    if times == 1.0:
        assert model == given
    if hasattr(model, "num_heads"):
        size = given.hidden_size // given.num_heads
        assert model.hidden_size == size * model.num_heads


def test_a_model_without_a_width_is_not_scaled():
    words = ["model=custom", "model.module=mine", "allow_modules=[mine]", "dataset=synthetic"]
    assert scaled(load(words).model, 2.0) == ()


def named(words):
    return {change.what: change.words for change in changes(load(list(words)))}


def test_changes_are_of_what_is_not_searched_for():
    searched = named([*GPT, "cluster=a100_8_x8"])
    assert searched["one more GPU a host"] == ("cluster.gpus=72",)
    assert searched["one more host"] == ("cluster.hosts=9", "cluster.gpus=72")
    assert searched["a network twice as fast"] == ("cluster.links.inter_host_gb_per_second=400",)
    assert not {"remat full", "twice the microbatches", "a searched plan"} & set(searched)
    given = named([*GPT, "cluster=a100_8", "parallel.remat=full", "parallel.num_stages=2"])
    assert given["remat searched for"] == ("parallel.remat=auto",)
    assert given["num_stages searched for"] == ("parallel.num_stages=auto",)
    manual = named([*MLP, "cluster=a100_8", "parallel=manual", "train.precision=bf16"])
    assert manual["half the microbatches"] == ("parallel.num_micro_batches=2",)
    assert manual["remat full"] == ("parallel.remat=full",)
    assert manual["links twice as fast"] == ("cluster.links.intra_host_gb_per_second=600",)
    assert not {"twice the sequence", "16-bit products"} & set(manual)


def test_what_changes_the_training_says_so():
    every = changes(load([*GPT, "cluster=a100_8", "parallel=manual"]))
    sections = {c.trains_otherwise: {w.partition(".")[0] for w in c.words} for c in every}
    assert sections.keys() == {False, True}
    for change in changes(load([*GPT, "cluster=a100_8", "parallel=manual"])):
        for word in change.words:
            assert change.trains_otherwise == word.startswith(("train.", "model."))


def test_advice_needs_a_command_line(here, capsys):
    words = [*STATED["data"], "run.id=one"]
    assert main(words) == 0
    path = Path("outputs/one/config.yaml")
    path.write_text(path.read_text().replace("advise: false", "advise: true"))
    capsys.readouterr()
    assert main(["--frozen", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("launcher: plan.advise=true says what to add to the command line")


def test_ctrl_c_leaves_no_folder(here, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, "plan_of", interrupted)
    assert main([*STATED["data"], "plan.advise=true", "run.id=one"]) == 130
    assert not Path("outputs/one").exists()


def one(what, gain, devices=8, **more):
    rate = 1000 * (1 + gain)
    return Advice(
        what=what,
        change=(f"cluster.gpus={devices}",),
        trains_otherwise=False,
        gain=gain,
        gain_per_cost=(1 + gain) * 8 / devices - 1,
        plan="",
        num_parameters=10**9,
        devices=devices,
        predicted_step_seconds=1.0,
        samples_per_second=rate,
        tokens_per_second=None,
        seconds=10 * 86400 / (1 + gain),
        cost=None,
        **more,
    )


def test_the_cheapest_improvements_come_first():
    found = (
        one("dear", 0.5, devices=16),
        one("free", 0.1),
        one("none", 0.004),
        one("worse", -0.2),
        one("cheap", 0.2, devices=9),
        one("larger", -0.9, largest=True),
    )
    plan = SimpleNamespace(advice=found, predicted_within=0.12)
    assert [a.what for a in improvements(plan)] == ["free", "cheap", "dear"]
    file = io.StringIO()
    print_advice(make_console(file), plan, 7)
    assert (
        file.getvalue()
        == """
advice: 7 changes planned, of which 5 fit
            add                  gain  per cost  time to 864 M samples
as planned                                                   10.0 days
free        cluster.gpus=8   +10.0% ~  +10.0% ~               9.1 days
cheap       cluster.gpus=9     +20.0%   +6.7% ~               8.3 days
dear        cluster.gpus=16    +50.0%    -25.0%               6.7 days
per cost: of throughput, at the same price of a device
~ within the predictions' ± 12%: perhaps none
cluster.price_per_device_hour is not set: no costs are shown
little or no gain: none +0.4%, worse -20.0%
larger, of those planned: 1.00 B parameters, 1.00 s a step: cluster.gpus=8
"""
    )


def test_the_loss_of_a_host_is_planned_only_where_advice_is_asked_for(here, capsys):
    """That search takes as long as the first."""
    words = (*MLP, "cluster=p4d_24xlarge_x4", "cluster.gpus=32", "parallel=data")
    assert main([*words]) == 0
    assert "a host is lost" not in capsys.readouterr().out
    assert main([*words, "plan.advise=true"]) == 0
    assert "\nif a host is lost" in capsys.readouterr().out
