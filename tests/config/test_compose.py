"""Composition: every YAML file, every printed example, and the one place of each default."""

import dataclasses
import json
import re
import shlex
from dataclasses import dataclass

import pytest

from launcher.__main__ import main
from launcher.cli.command import _EXAMPLES
from launcher.cluster.kinds import kind_of
from launcher.config.cluster import CLUSTERS
from launcher.config.compose import load, load_points, to_dict
from launcher.config.families import (
    DatasetOptions,
    ModelOptions,
    find_datasets,
    find_models,
    register,
)
from launcher.config.folders import CONF
from launcher.config.optimizer import OPTIMIZERS
from launcher.config.parallel import METHODS, Manual, Replay, Zero3
from launcher.config.reader import build, from_dict, setting_keys
from launcher.config.schema import Config
from launcher.config.sweep import run_sweeper
from launcher.plan import local_shape
from launcher.recipes.datasets.text import StdlibText, Text
from launcher.recipes.models.gpt import GPTOptions
from launcher.recipes.models.llama.hf import config_of
from launcher.recipes.models.mlp import MLPOptions

FILES = sorted(CONF.rglob("*.yaml"))
DEVICES = sorted((CONF / "device").glob("*.yaml"))  # parts of files
OPTIONS = [file for file in FILES if file not in DEVICES]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_composes_by_the_command_in_it(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "my_llama" in file.read_text():
        theirs = config_of(load(["model=llama", "dataset=synthetic"]).model)
        (tmp_path / "my_llama").mkdir()
        (tmp_path / "my_llama" / "config.json").write_text(json.dumps(theirs))
    found = re.findall(r"^#   python -m launcher(.*)$", file.read_text(), re.MULTILINE)
    commands = [shlex.split(command) for command in found]
    choice = {f"{file.parent.name}={file.stem}"} if file.parent != CONF else set()
    assert any(choice <= set(words) for words in commands)
    for words in commands:
        if "-m" in words:  # of a sweep one point
            words = [word.partition(",")[0] for word in words if word != "-m"]
        load(words)


RECIPES = sorted((CONF / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_says_what_it_is_and_what_to_expect(file):
    head, _, settings = file.read_text().partition("\ndefaults:\n")
    assert settings
    assert re.match(r"# @package _global_\n# [A-Z]", head)
    assert "\n#\n# Expect " in head


def test_each_family_has_a_recipe_for_eight_gpus_or_for_a_laptop():
    named = {name for file in RECIPES for name in re.findall(r"/model: (\w+)", file.read_text())}
    assert named == set(find_models())
    for family in set(find_models()) - {"mlp", "toy"}:  # which no such machine is worth
        assert (CONF / "recipe" / f"{family}_8gpus.yaml") in RECIPES


@pytest.mark.sampled(4)
@pytest.mark.parametrize("file", DEVICES, ids=lambda file: file.stem)
def test_a_datasheet_is_for_described_clusters_and_for_devices_that_are_here(file, tmp_path, mine):
    (defaults,) = re.findall(r"^#   (defaults: .*)$", file.read_text(), re.MULTILINE)
    mine(f"{defaults}\nkind: described\nname: mine\ngpus: 8\n", "cluster/mine")
    shape = kind_of(load(["cluster=mine", "task=plan"], [str(tmp_path)]).cluster).shape(None)
    here = local_shape(8, 1, shape.device_kind)
    between = {"inter_host": shape.inter_host, "latency": shape.latency}
    assert dataclasses.replace(here, name="mine", **between) == shape


def test_clusters_take_their_devices_from_datasheets():
    for file in (CONF / "cluster").glob("*.yaml"):
        assert "device:" not in re.sub("#.*", "", file.read_text()), file


def test_a_device_that_there_is_not(tmp_path, capsys, mine):
    mine("defaults: [/device@_here_: h10, _self_]\n", "cluster/mine")
    assert main(["--config-dir", str(tmp_path), "cluster=mine"]) == 2
    assert capsys.readouterr().err == (
        f"launcher: There is no device=h10 (in {tmp_path}/cluster/mine.yaml). Did you mean h100?\n"
    )
    assert main(["device=h100"]) == 2
    assert capsys.readouterr().err == (
        "launcher: device=h100 is not an option by itself: files of the group cluster use it "
        "(on the command line). Name it there: defaults: [/device@_here_: h100, _self_].\n"
    )


def test_the_examples_of_the_help_are_right(tmp_path, monkeypatch):
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nrun: {seed: 1}"
    )
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^  launcher(.*?)(?:  |$)", _EXAMPLES, re.MULTILINE)
    assert len(commands) == 15
    # See report/test_runs.py, project/test_new.py and cli/test_json.py.
    others = (" runs", " new my_project", " schema")
    commands = [command for command in commands if command not in others]
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("Call me Ishmael. " * 1000)
    for command in commands:
        words = shlex.split(command.replace("/data/books", "books"))
        assert main([*words, "task=check"]) == 0


def test_the_defaults_of_yaml_and_schema_agree():
    composed = load([])
    assert isinstance(composed.model, GPTOptions)
    model = dataclasses.replace(composed.model, **dict.fromkeys(GPTOptions.row))
    assert dataclasses.replace(composed, model=model) == build(Config, {})
    assert load(["model=mlp", "dataset=synthetic"]).model == MLPOptions()


WITH_PATH = "arrays", "documents", "pictures", "text", "tokens"
GIVEN = {  # what an option has no default for
    **{("dataset", name): {"path": "/data"} for name in WITH_PATH},
    ("dataset", "mixture"): {"parts": {"a": {"path": "a"}}},
    ("parallel", "replay"): {"plan": "plan.json"},
}
MODEL_OF = {"digits": "mlp", "pictures": "vit"}
BY_DEFAULT = [
    *(("dataset", name, of) for name, of in find_datasets().items()),
    # A custom one's module has no default.
    *(("optimizer", name, of) for name, of in OPTIMIZERS.items() if name != "custom"),
    *(("cluster", name, CLUSTERS[name]) for name in ("local", "emulated", "slurm")),
    *(("parallel", name, of) for name, of in METHODS.items()),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("section", "name", "of"), BY_DEFAULT)
def test_the_defaults_of_an_option_agree(section, name, of):
    given = GIVEN.get((section, name), {})
    words = [f"{section}.{key}={value}".replace("'", "") for key, value in given.items()]
    words += [f"model={MODEL_OF[name]}"] if name in MODEL_OF else []
    assert getattr(load([f"{section}={name}", *words]), section) == of(**given)


def test_the_yaml_files_show_every_setting():
    text = "\n".join(file.read_text() for file in FILES)
    said = set(re.findall(r"^ *(\w+):", text, re.MULTILINE))
    assert {key.split(".")[-1] for key in setting_keys()} <= said


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "dimensions"),
    [
        # hidden, layers, heads: Alpa (arXiv:2201.12023), Table 6, and its benchmark suite.
        ("125m", (768, 12, 12)),
        ("350m", (1024, 24, 16)),
        ("760m", (1536, 24, 16)),
        ("1.3b", (2048, 24, 32)),
        ("2.6b", (2560, 32, 32)),
        ("6.7b", (4096, 32, 32)),
        ("15b", (5120, 48, 40)),
        ("39b", (8192, 48, 64)),
        ("76b", (10240, 60, 80)),
    ],
)
def test_the_alpa_sizes(size, dimensions):
    model = load([f"model.size={size}"]).model
    assert isinstance(model, GPTOptions)
    assert (model.hidden_size, model.num_layers, model.num_heads) == dimensions
    assert (model.sequence_length, model.vocab_size) == (1024, 51200)
    assert (model.layers, model.sizes) == (dimensions[1], {})


def test_a_set_dimension_beats_the_size():
    model = load(["model.size=39b", "model.num_layers=6"]).model
    assert isinstance(model, GPTOptions)
    assert (model.num_layers, model.hidden_size) == (6, 8192)


def test_the_command_line_beats_the_recipe_which_beats_the_groups():
    config = load(["train.steps=7", "recipe=smoke", "optimizer=sgd"])
    assert (config.train.steps, config.cluster.gpus, config.optimizer.name) == (7, 2, "sgd")


def test_what_a_recipe_says_of_its_own_choice_does_not_stick_to_another():
    def said(*words):
        config = load(["recipe=smoke", *words])
        parallel, cluster = config.parallel, config.cluster
        num_stages = getattr(parallel, "num_stages", None)
        return parallel.method, num_stages, parallel.num_micro_batches, cluster.gpus

    assert said() == said("parallel=manual") == ("manual", 2, 2, 2)
    assert said("parallel=data") == ("data", None, 1, 2)
    assert said("parallel=zero3", "parallel.num_micro_batches=4") == ("zero3", None, 4, 2)
    assert said("cluster=local") == ("manual", 2, 2, None)
    replayed = load(["recipe=pipeshard_tutorial", "parallel=replay", "parallel.plan=p"]).parallel
    assert replayed == Replay(plan="p")
    other = load(["recipe=smoke", "model=mlp", "dataset=synthetic"]).model
    assert other == load(["model=mlp", "dataset=synthetic"]).model


def test_a_file_may_hold_a_list_of_tables(tmp_path, mine):
    mine("optimizer:\n  groups:\n    - {pattern: '*.bias', weight_decay: 0}\n")
    (group,) = load(["recipe=mine"], [str(tmp_path)]).optimizer.groups
    assert (group.pattern, group.weight_decay) == ("*.bias", 0)


def test_what_a_recipe_says_without_a_choice_of_its_own_is_for_every_option(tmp_path, mine):
    """And files before and after it keep their turn; the environment is asked at the end."""
    mine(
        "defaults:\n  - override /model: mlp\n"
        "parallel: {num_micro_batches: 8}\noptimizer: {learning_rate: 1e-4}\n"
        "model: {num_layers: 7}\n"
    )
    mine("defaults: [manual, _self_]\nremat: ${oc.env:REMAT,full}\n", "parallel/mine")
    folders = [str(tmp_path)]
    config = load(["recipe=mine", "parallel=mine", "model=gpt", "model.num_heads=2"], folders)
    assert (config.parallel.num_micro_batches, config.parallel.remat) == (8, "full")
    assert config.parallel.method == "manual"
    assert config.optimizer.learning_rate == 1e-4
    assert config.model == load(["model.num_heads=2"]).model


def test_a_method_that_is_set_by_itself_is_as_one_that_is_chosen(tmp_path, mine):
    for name in ("manual", "data"):
        chosen = load([f"parallel={name}", "parallel.remat=full"])
        for words in (
            [f"parallel.method={name}", "parallel.remat=full"],
            [f"parallel={{method: {name}, remat: full}}"],
            [f"+parallel={name}", "+parallel.remat=full"],
        ):
            assert load(words) == chosen
    mine("parallel: {method: zero3, num_micro_batches: 2}\n")
    config = load(["recipe=mine"], [str(tmp_path)])
    assert config.parallel == Zero3(num_micro_batches=2)
    assert load(["recipe=mine", "parallel.remat=full"], [str(tmp_path)]).parallel.remat == "full"


@pytest.mark.parametrize(
    ("section", "said", "chosen"),
    [
        ("optimizer", "{name: lion, b1: 0.8}", "sgd"),
        ("parallel", "{method: data, num_micro_batches: 2}", "manual"),
        ("cluster", "{kind: slurm, gpus: 8}", "local"),
    ],
)
def test_an_option_on_the_command_line_beats_the_kind_that_a_recipe_names(
    section, said, chosen, tmp_path, mine
):
    mine(f"{section}: {said}\n")
    words = [f"{section}={chosen}"]
    assert load(["recipe=mine", *words], [str(tmp_path)]) == load(words)


def test_what_says_nothing_may_stand_beside_any_method():
    """In a sweep over methods, say."""
    words = ["parallel.num_stages=null", "parallel.schedule=auto", "parallel.data=null"]
    points, wrong = points_of(["parallel=auto,manual,zero2,three_d", *words])
    assert not wrong
    assert [point.config.parallel.method for point in points] == [
        "auto", "manual", "zero2", "three_d",
    ]  # fmt: skip
    assert points[1].config.parallel == Manual()


def test_a_plus_before_a_known_name_is_harmless():
    assert load(["+recipe=smoke", "+train.steps=7", "++run.seed=1"]) == load(
        ["recipe=smoke", "train.steps=7", "run.seed=1"]
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("typed", ["1e3", "1_000", "010", "12:30:00", "no", "true", "nan"])
def test_text_on_the_command_line_is_taken_as_typed(typed):
    assert load([f"wandb.name={typed}"]).wandb.name == typed


def test_null_clears_a_text_setting_and_quotes_make_it_text():
    assert load(["wandb.name=x", "wandb.name=null"]).wandb.name is None
    assert load(["wandb.name='null'"]).wandb.name == "null"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("typed", ["1e3", "1.0e3", "1E3", "1_000", "1000.0"])
def test_a_whole_number_may_have_an_exponent(typed, tmp_path, mine):
    steps = load([f"train.steps={typed}"]).train.steps
    assert (steps, type(steps)) == (1000, int)
    mine(f"train: {{steps: {typed}}}\n")
    assert load(["recipe=mine"], [str(tmp_path)]).train.steps == 1000


@pytest.mark.parametrize(
    ("typed", "steps"), [("off", 0), ("false", 0), ("auto", None), ("null", None), ("7", 7)]
)
def test_snapshots_have_words_for_never_and_for_the_default(typed, steps):
    assert load([f"train.snapshot={typed}"]).train.snapshot == steps
    assert from_dict(to_dict(load([f"train.snapshot={typed}"]))).train.snapshot == steps


def test_a_whole_number_of_a_variable_is_one(monkeypatch):
    for text, number in {"1e3": 1000, "12": 12}.items():
        monkeypatch.setenv("STEPS", text)
        steps = load(["train.steps=${oc.env:STEPS}"]).train.steps
        assert (steps, type(steps)) == (number, int)


def test_a_resolved_configuration_survives_json():
    config = load(["dataset=text", "dataset.path=/data", "wandb.tags=[a,b]", "model.size=39b"])
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_users_own_groups_and_files(mine):
    mine("name: mlp\nnum_layers: 2\n", "model/small")
    mine("name: synthetic\nnum_samples: 8\n", "dataset/synthetic")
    conf = mine("# @package _global_\ntrain: {steps: 1}\n", "debug/short")
    config = load(["model=small", "dataset=synthetic", "+debug=short"], conf)
    assert config.model == MLPOptions(num_layers=2)
    # A file of the user's beats the project's of the same name.
    assert config.dataset.num_samples == 8
    assert config.train.steps == 1
    # And is gone again when the next configuration is loaded without the folder.
    assert isinstance(load(["dataset=stdlib_text"]).dataset, StdlibText)
    assert load(["model=mlp", "dataset=synthetic"]).dataset.num_samples == 4096


def test_a_dataset_of_the_users_own(tmp_path, mine):
    mine("name: text\npath: /data/books\n", "dataset/books")
    assert load(["dataset=books"], [str(tmp_path)]).dataset == Text(path="/data/books")


def points_of(arguments):
    """The points of a sweep, by Hydra's own sweeper."""
    asked = []

    def run(points):
        asked.extend(points)
        return 0

    run_sweeper(arguments, (), run, pytest.fail)
    return load_points(asked)


def test_sweep_points_are_the_product_in_order():
    points, _ = points_of(["train.steps=1,2", "model.num_layers=range(4,6)", "run.seed=3"])
    assert [point.overrides for point in points] == [
        ("train.steps=1", "model.num_layers=4", "run.seed=3"),
        ("train.steps=1", "model.num_layers=5", "run.seed=3"),
        ("train.steps=2", "model.num_layers=4", "run.seed=3"),
        ("train.steps=2", "model.num_layers=5", "run.seed=3"),
    ]
    assert [point.config.train.steps for point in points] == [1, 1, 2, 2]


def test_a_sweep_over_the_options_of_a_group():
    points, _ = points_of(["optimizer=glob(ada*)"])
    assert [point.config.optimizer.name for point in points] == ["adafactor", "adam", "adamw"]


def test_unused_vocabulary_rows_are_said(capsys):
    assert main(["model.size=125m", "task=check"]) == 0
    unused = (
        "dataset=stdlib_text is bytes: 50,944 of the model's 51,200 vocabulary rows are unused; "
        "model.vocab_size=256 leaves them out"
    )
    assert unused in capsys.readouterr().out.splitlines()
    for words in ([], ["model.size=125m", "dataset=synthetic"]):
        assert main([*words, "task=check"]) == 0
        assert "unused" not in capsys.readouterr().out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("optimizer={learning_rate: 5}", "optimizer", "learning_rate", 5.0),
        ("model={num_layers: 8}", "model", "num_layers", 8),
        ("parallel={num_stages: 2}", "parallel", "num_stages", 2),
        ("train={steps: 7}", "train", "steps", 7),
        ("run={seed: 3}", "run", "seed", 3),
    ],
)
def test_a_table_on_the_command_line_sets_what_is_in_it_and_no_more(word, section, key, value):
    got, plain = to_dict(load([word])), to_dict(load([]))
    assert got[section].pop(key) == value
    plain[section].pop(key)
    assert got == plain


@pytest.mark.parametrize("default", ["/recipe: mine", "mine"])
def test_files_that_choose_one_another_without_end_are_refused(default, tmp_path, capsys, mine):
    mine(f"defaults:\n  - {default}\n")
    assert main(["--config-dir", str(tmp_path), "recipe=mine", "task=check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_families_are_found_by_the_names_of_their_modules():
    assert list(find_models()) == [
        *("bert", "gpt", "llama", "mlp", "moe", "resnet", "toy", "unet", "vit", "wide_resnet")
    ]
    assert list(find_datasets()) == [
        *("arrays", "digits", "documents", "mixture", "pictures", "stdlib_text", "synthetic"),
        *("text", "tokens"),
    ]


@pytest.mark.parametrize(("base", "name"), [(ModelOptions, "gpt"), (DatasetOptions, "text")])
def test_a_copied_family_that_kept_its_name_is_refused(base, name):
    @dataclass(frozen=True)
    class Copied(base):
        name: str = "to be replaced"

    Copied.name = name
    known = (find_models if base is ModelOptions else find_datasets)()
    with pytest.raises(TypeError, match=rf"\.{name} both name their family '{name}'"):
        register(Copied)
    assert known == (find_models if base is ModelOptions else find_datasets)()


def test_a_name_needs_a_default():
    @dataclass(frozen=True)
    class Nameless(ModelOptions):
        name: str

    with pytest.raises(TypeError, match="Nameless needs a default of its field `name`"):
        register(Nameless)
