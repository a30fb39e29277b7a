"""`hf://org/name` as a setting: which take it, the commit in a run's settings, what is said."""

import dataclasses
import json
import os
import re

import jax
import pytest
import yaml
from hub_stub import SIGNATURE, TOKEN, HubStub
from huggingface_hub import constants
from launched import Launcher, lines

from launcher.base import hub, installing
from launcher.checkpoint.hugging_face import Folder, write_hugging_face
from launcher.config.compose import load, load_frozen, to_written, to_yaml
from launcher.config.errors import ConfigError
from launcher.config.fields import key_of, settings_of
from launcher.config.hub import hub_settings, pins
from launcher.config.schema import MODELS, Config
from launcher.driver.planning.check import check
from launcher.driver.planning.downloads import download
from launcher.driver.planning.init_from import find_start
from launcher.recipes import build_model
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer, up_to_date
from launcher.recipes.models.hugging_face import family_named
from launcher.recipes.models.sizes import SizedOptions
from launcher.report.console import make_console
from launcher.submit.job import freeze
from launcher.submit.points import Point
from launcher.submit.sweep import _command

MODEL = "model=llama", "model.size=hf://org/name", "train.init_from=hf://org/name"
DATA = "dataset=jsonl", "dataset.path=hf://datasets/org/talks/data"
WORDS = *MODEL, *DATA, "dataset.tokenizer=hf://org/name"
SMALL = ["model=llama", "dataset=synthetic", "model.vocab_size=400", "model.num_layers=2"]
SMALL += ["model.num_heads=2", "model.num_kv_heads=2", "model.hidden_size=32", "model.mlp_size=64"]
SMALL += ["model.sequence_length=32"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The contents of a model's and of a dataset's repository."""
    folder = tmp_path_factory.mktemp("theirs")
    talks = [json.dumps({"text": f"the number {i} follows {i - 1}"}) for i in range(300)]
    (folder / "talks.jsonl").write_text("\n".join(talks))
    words = ["dataset=jsonl", f"dataset.path={folder / 'talks.jsonl'}"]
    train_tokenizer(load(words).dataset, 290, folder / "tokenizer.json")
    options = load(SMALL).model
    params = build_model(options, "fp32").init(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = {
        f"params.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf
        for path, leaf in leaves
    }
    family = family_named("llama")
    made = Folder(family.config_of(options), list(family.tensors(options)))
    write_hugging_face(
        folder / "model", made, lambda names: {n: arrays[n] for n in names}, "float32", False
    )
    files = {file.name: file.read_bytes() for file in (folder / "model").iterdir()}
    files |= {"tokenizer.json": (folder / "tokenizer.json").read_bytes(), "x.py": b"raise 1"}
    data = {f"data/train-{i}.jsonl": "\n".join(talks[i::3]) for i in range(3)}
    return files, {**data, "data/test-0.jsonl": talks[0], "other/train-0.jsonl": talks[1]}


@pytest.fixture
def stub(theirs, tmp_path, monkeypatch):
    with HubStub(tmp_path / "hub") as running:
        running.add("org/name", theirs[0])
        running.add("org/talks", theirs[1], kind="datasets")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for name, value in (("ENDPOINT", running.url), ("HF_HUB_CACHE", str(tmp_path / "cache"))):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "")
        forget()
        yield running
    forget()


def forget():
    """Forget what this process knows, as another one does."""
    hub.pin.cache_clear()
    hub._silence.cache_clear()


def refusal(ask, *arguments):
    with pytest.raises(ConfigError) as refused:
        ask(*arguments)
    return str(refused.value)


# Settings of paths that take no repository: what is written, and files that are none of Hugging
# Face's. A new one is to be thought about.
OTHERS = {
    *("run.dir", "export.path", "evaluate.path", "tokenize.path", "generate.prompts", "sweep.dir"),
    *("dataset.tokens", "dataset.validation_path", "parallel.plan", "cluster.workdir"),
}
PATHS = {"dir", "init_from", "path", "plan", "prompts", "size", "tokens", "tokenizer", "workdir"}


def test_every_setting_of_a_path_takes_a_repository_or_is_known_not_to():
    taking, paths = set(), set()
    for section in dataclasses.fields(Config):
        variants = section.metadata.get("variants")
        kinds = variants.classes if variants else {"": section.default_factory}
        for name, kind in kinds.items():
            tree = {section.name: {variants.key: name}} if variants else {}
            found = (key for s, key, _ in hub_settings(tree) if s == section.name)
            taking |= {(name, f"{section.name}.{key}") for key in found}
            if dataclasses.is_dataclass(kind):
                keys = {key_of(field) for field in settings_of(kind)}
                paths |= {(name, f"{section.name}.{key}") for key in keys & PATHS}
    assert taking == {
        ("", "train.init_from"),
        *((name, "dataset.path") for name in ("documents", "text")),
        ("documents", "dataset.tokenizer"),
        *((n, "model.size") for n, kind in MODELS.items() if issubclass(kind, SizedOptions)),
    }
    # Arrays, pictures and tokens in files that are not Hugging Face's.
    left = {(name, key) for name, key in paths - taking if key not in OTHERS}
    assert left == {(name, "dataset.path") for name in ("arrays", "pictures", "tokens")}


def test_a_check_names_the_commits_and_downloads_no_weights_and_no_data(stub, theirs, tmp_path):
    config = load(WORDS)
    commit, of_data = stub.add("org/name", theirs[0]), stub.add("org/talks", theirs[1], "datasets")
    pinned, data = f"hf://org/name@{commit}", f"hf://datasets/org/talks@{of_data}/data"
    assert dict(pins(config)) == {
        "model.size": pinned,
        "train.init_from": pinned,
        "dataset.path": data,
        "dataset.tokenizer": pinned,
    }
    assert (config.model.hidden_size, config.dataset.folder) == (32, "org-talks-data.tokens")
    said = check(config, os.environ)
    assert f"train.init_from: {pinned} (0.2 MiB to download, files: 1)" in "; ".join(said)
    assert f"dataset.path: {data} (0.0 MiB to download, files: 4)" in said
    names = {file.name for file in (tmp_path / "cache").rglob("snapshots/*/**/*") if file.is_file()}
    assert names == {"config.json", "tokenizer.json"}
    written = to_yaml(to_written(config))
    assert written.count(commit) == 3
    assert written.count(of_data) == 1


def test_what_is_downloaded_is_used_where_there_is_no_network(stub, theirs, tmp_path, capsys):
    config = load(WORDS)
    download(config, make_console())
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # to prepare the data
    download(config, make_console(), 0)
    assert "downloading hf://datasets/org/talks@" in capsys.readouterr().out
    prepare_corpus(config.dataset, 1)
    assert find_start(config, 0).parent.name == "snapshots"
    stub.stop()
    forget()
    again = load(WORDS)
    assert again == config
    assert sum("(in the cache)" in line for line in check(again, os.environ)) == 1
    # Tokens need their documents no more.
    for file in (tmp_path / "cache" / "datasets--org--talks" / "blobs").iterdir():
        file.unlink()
    assert up_to_date(again.dataset) is not None
    assert not any("dataset.path" in line for line in check(again, os.environ))
    said = refusal(load, [*MODEL, "train.init_from=hf://org/other"])
    assert said.startswith("train.init_from=hf://org/other is not in the cache")
    assert "(on the command line). Try again, download it" in said
    # Of a model that is there in part, that is known before anything starts.
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    weights.resolve().unlink()
    for words in ("train.steps=2",), ("--json", "task=plan"):
        code, _, errors = Launcher(tmp_path / "here", *WORDS, *words).end()
        assert code == 2
        assert "launcher: train.init_from=hf://org/name@" in errors
        assert "is not in the cache" in errors
    assert not (tmp_path / "here" / "outputs").exists()


def test_what_is_no_model_and_no_documents_is_refused(stub, theirs):
    stub.add("org/old", {"config.json": theirs[0]["config.json"], "pytorch_model.bin": b"pickle"})
    old = load([*MODEL[:2], "train.init_from=hf://org/old", "dataset=synthetic"])
    said = "train.init_from=hf://org/old@.* holds no model.safetensors, but .bin, .json. Code and"
    assert re.match(said, refusal(check, old, os.environ))
    assert re.match(said, refusal(download, old, make_console(), 0))
    tables = load(["dataset=parquet", "dataset.path=hf://datasets/org/talks"])
    said = "dataset.path=hf://datasets/org/talks@.* holds no file that is read here, but .jsonl. "
    assert re.match(said, refusal(check, tables, os.environ))
    where, data = "(on the command line).", "hf://datasets/org"
    for name, text in (
        (
            f"{data}/talks/daat",
            f"has no such file or folder {where} Did you mean {data}/talks/data?",
        ),
        (data, f"is not the name of a repository {where}"),
        ("hf://org/talks", f"is not there, or is private {where} Open "),
    ):
        word = f"dataset.path={name}"
        assert refusal(load, ["dataset=jsonl", word]).startswith(f"{word} {text}")


def test_the_runs_of_a_sweep_take_the_commits_that_were_checked(stub):
    words = ("-m", *WORDS)[1:]
    point = Point(words, "one", load(words))
    command = _command(point, (), stub.root, "a", "s")
    assert [word for word in command if "@" in word] == [
        f'{key}="{text}"' for key, text in pins(point.config)
    ]


def test_without_the_package_the_error_installs_it(stub, monkeypatch):
    monkeypatch.setattr(hub, "lacking", installing)
    with pytest.raises(ConfigError) as refused:
        load(WORDS)
    assert refused.value.code == "missing_package"
    assert "Install it: pip install 'huggingface-hub>=1,<3'." in str(refused.value)


def test_a_name_from_the_environment_is_written_with_its_commit(stub, monkeypatch):
    monkeypatch.setenv("THEIRS", "hf://org/name")
    config = load(["model=llama", "model.size=${oc.env:THEIRS}", "dataset=synthetic"])
    assert to_written(config)["model"]["size"] == dict(pins(config))["model.size"]


@pytest.mark.slow
def test_a_job_has_all_it_needs_when_it_is_submitted(stub, tmp_path):
    """A node that runs it may have no network."""
    config = load([*WORDS, "cluster=slurm", "cluster.gpus=1", "model.sequence_length=32"])
    prepare_corpus(config.dataset, 1)
    home = freeze(config, make_console()).path
    stub.stop()
    forget()
    frozen = load_frozen(home / "config.yaml")
    assert dict(pins(frozen)) == dict(pins(config))
    download(frozen, make_console(), 0)
    assert (find_start(frozen, 0) / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_training_goes_on_with_its_files(stub, theirs, tmp_path, monkeypatch):
    """The branch moves, the network goes, the run is resumed: to the same weights and data."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stub.add("org/name", theirs[0], closed="gated")
    words = (*WORDS, "run.id=a", "train.eval_every=0", "wandb.mode=disabled", "model.loss_chunks=1")
    words += ("train.global_batch_size=4", "train.log_every=1", "cluster.gpus=1")
    said = []

    def start(*more):
        code, *texts = Launcher(tmp_path / "here", *words, *more).end()
        said.extend(texts)
        return code, *texts

    code, output, errors = start("train.steps=2")
    assert code == 0, errors
    assert "downloading hf://org/name@" in output
    home = tmp_path / "here" / "outputs" / "a"
    before = yaml.safe_load((home / "config.yaml").read_text())
    moved = stub.add("org/name", {**theirs[0], "README.md": "moved"})
    code, _, errors = start("train.steps=3", "model.size=hf://org/name@main")
    assert code == 2
    assert f"hf://org/name@{moved}" in errors
    stub.stop()
    code, output, errors = start("train.steps=3")
    assert code == 0, errors
    after = yaml.safe_load((home / "config.yaml").read_text())
    assert (after["model"], after["dataset"]) == (before["model"], before["dataset"])
    assert [line["step"] for line in lines(home) if "train/loss" in line][-1] == 3
    said += [p.read_text("latin-1") for p in (tmp_path / "here").rglob("*") if p.is_file()]
    assert not any(secret in text for text in said for secret in (TOKEN, SIGNATURE))
