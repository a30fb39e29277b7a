"""The pages tell the truth: commands are accepted, Python runs and prints what they show, and what
they name exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml
from object_servers import s3_server
from pages import ROOT, Block, Page, read_page, read_pages

from launcher import checkpoint, debug
from launcher.__main__ import main
from launcher.cli import runs_command
from launcher.cli.new import write_project
from launcher.config.compose import load, to_dict
from launcher.config.folders import CONF, find_groups
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer
from launcher.recipes.models.llama.hf import config_of
from launcher.train.program import build_program

PAGES = read_pages()
BY_NAME = {page.name: page for page in PAGES}
CONF_PAGE, CLUSTER_PAGE, RECIPES_PAGE, CODE_PAGE = (
    read_page(f"{room}/README.md") for room in ("conf", "conf/cluster", "recipes", "launcher")
)
_ALL = [command.partition(" #")[0].rstrip() for page in PAGES for command in page.commands]
COMMANDS = list(dict.fromkeys(x for c in _ALL for x in re.findall(r"-m launcher(?!\.)(.*)", c)))
DEBUG_COMMANDS = [x for c in _ALL for x in re.findall(r"-m launcher\.debug (.*)", c)]
PROGRAMS = [
    pytest.param(program, id=f"{page.name}:{number}")
    for page in PAGES
    for number, program in enumerate(page.programs)
    if not page.name.startswith("recipes/")  # modules: see below
]
# The Python blocks of the pages in recipes/, in order.
MODULES = {
    "recipes/README.md": ("net", "data", "net_options", "data_options"),
    "recipes/datasets/README.md": ("talks", "shapes", "arrays"),
    "recipes/models/README.md": ("normed", "nnx_net"),
}
(_OWN,) = (c for c in RECIPES_PAGE.commands if "model.module=my_pkg.net" in c)
OWN_MODEL = shlex.split(_OWN.partition("-m launcher")[2])
END = "\0\n"  # printed between the blocks of a program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages' reader stands: with what they tell him to write, and with the runs behind
    him that they have him make; of one no more than what settings are held against."""
    folder = tmp_path_factory.mktemp("reader")
    named = ("recipe/rates", "recipe/mine", "cluster/mine")
    files = (*CONF_PAGE.of("yaml"), *CLUSTER_PAGE.of("yaml"))
    for name, block in zip(named, files, strict=True):
        file = folder / "my_conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("Call me Ishmael. " * 1000)
    (folder / "README.md").write_text(BY_NAME["README.md"].text)
    (folder / "my_pkg").mkdir()
    for page, names in MODULES.items():
        for name, (block,) in zip(names, BY_NAME[page].programs, strict=True):
            (folder / "my_pkg" / f"{name}.py").write_text(block.text)
    theirs = load(["model=llama", "dataset=synthetic", "model.vocab_size=300"]).model
    (folder / "my_llama").mkdir()
    (folder / "my_llama" / "config.json").write_text(json.dumps(config_of(theirs)))
    for module in ("arrays", "shapes", "talks"):
        subprocess.run([sys.executable, f"my_pkg/{module}.py"], cwd=folder, check=True)
    talks = Documents(path=str(folder / "talks.jsonl"), tokenizer=str(folder / "tokenizer.json"))
    train_tokenizer(talks, 300, folder / "tokenizer.json")
    prepare_corpus(talks, 1)
    shutil.copy(folder / "tokenizer.json", folder / "my_llama")

    program = build_program(load(["recipe=smoke"]))
    state = checkpoint.copy_to_host(jax.jit(program.init)(program.seed))
    first, mine = folder / "outputs" / "first", folder / "outputs" / "mine"
    smoke, default = to_dict(load(["recipe=smoke"])), to_dict(load([]))
    for home, settings in ((first, smoke), (mine, default)):
        settings["run"]["id"] = home.name
        held = {"data": {"next_batch": 3}, "metrics": {"next_step": 4}, "config": settings}
        checkpoint.save(home / "checkpoints", 3, state, held)
    plan = {"cluster": {"hosts": 1, "devices_per_host": 2}}
    (first / "plan.json").write_text(json.dumps(plan))
    (first / "config.yaml").write_text(yaml.safe_dump(smoke))
    return folder


def test_what_is_tested_is_found() -> None:
    assert len(PAGES) >= 8
    assert len(COMMANDS) > 35
    assert len(DEBUG_COMMANDS) > 2
    assert len(PROGRAMS) >= 5
    shown = [block for page in PAGES for block in page.blocks if block.output is not None]
    assert len(shown) >= 5  # the walk through compilation


@pytest.fixture
def _bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket of the pages, for a command that names it."""
    if "s3://bucket/" not in request.getfixturevalue("command"):
        yield
        return
    with s3_server() as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.usefixtures("_bucket")
@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(
    command: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as `python -m` does
    arguments = shlex.split(command)
    if arguments[:1] == ["new"]:
        assert write_project(tmp_path / arguments[1])
        return
    if arguments[:1] == ["runs"]:
        words = [word for word in arguments[1:] if word != "--json"]
        action, *_ = [*runs_command.read_words(words).names, "list"]
        assert f"runs {action}" in runs_command.HELP or action == "list"
        return
    for task in ("sweep_status", "export", "generate", "evaluate", "prepare_data", "tokenize"):
        if f"task={task}" in arguments:  # whose settings have no meaning for another task
            assert load(arguments).task == task
            return
    if "plan.advise=true" in arguments:  # the same
        assert load(arguments).plan.advise
        return
    assert main([*arguments, "task=check"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", DEBUG_COMMANDS)
def test_every_debug_command_is_accepted(command: str, folder: Path) -> None:
    """What they print, tests/cli/test_debug.py looks at."""
    words = debug.parse_arguments(shlex.split(command)).words
    if "=" in words[0]:
        load(words)
    else:
        assert (folder / words[0] / "plan.json").is_file()


def test_every_other_command_names_what_exists() -> None:
    """Tests, tools and installations: their files, marks and extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for page in PAGES:
        assert [e for e in re.findall(r"'\.\[(\w+)\]'", page.text) if e not in extras] == []
    marks = [mark.split(":")[0] for mark in project["tool"]["pytest"]["ini_options"]["markers"]]
    named = [mark for page in PAGES for mark in re.findall(r"pytest\b[^`\n]* -m (\w+)", page.text)]
    assert [mark for mark in named if mark not in marks] == []


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_python_runs(program: list[Block], folder: Path) -> None:
    flags = os.environ["XLA_FLAGS"].split()
    own = [flag for flag in flags if "device_count" not in flag]  # a user has set no devices
    environ = {**os.environ, "XLA_FLAGS": " ".join(own)}
    text = f"\nprint({END.strip()!r}, flush=True)\n".join(block.text for block in program)
    command = [sys.executable, "-c", text]
    result = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for block, printed in zip(program, result.stdout.split(END), strict=True):
        assert block.output in (None, printed)


@pytest.mark.parametrize("module", ["net", "normed", "nnx_net"])
def test_a_model_of_ones_own_makes_steps(
    module: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in recipes/; test_cost_sheet.py trains the first."""
    monkeypatch.syspath_prepend(folder)
    program = build_program(load([*OWN_MODEL, f"model.module=my_pkg.{module}"]))
    assert bool(jax.tree.leaves(program.state.model_state)) == (module != "net")


def test_a_dataset_of_ones_own_gives_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in recipes/README.md; test_cost_sheet.py trains on it."""
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        monkeypatch.delitem(sys.modules, name)  # of another test
    words = ["model=mlp", "dataset=custom", "dataset.module=my_pkg.data", "train.eval_every=0"]
    program = build_program(load([*words, "allow_modules=[my_pkg]"]))
    assert program.dataset.train(0)["x"].shape == (32, 32)
    assert program.dataset.train(0)["y"].shape == (32, 8)


UNFIT = {
    "empty": "",
    "ones": """
import numpy as np
from launcher.recipes import Dataset

def check(options, model_options, validation):
    pass

def build(options, model_options, batch_size, seed):
    x, y = np.ones((batch_size, 16), np.float32), np.ones((batch_size, 4), np.float32)
    return Dataset(lambda k: {"x": x, "y": y}, None, "ones")
""",
}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["model.module=my_pkg.empty", "task=plan"],
            "model.module=my_pkg.empty has no function build; "
            "write one as recipes/models/mlp/model.py does",
        ),
        (
            ["dataset=custom", "dataset.module=my_pkg.ones", "train.eval_every=50"],
            "train.eval_every=50 evaluates, and dataset.name=custom holds nothing out for that; "
            "have its build return validation batches, or set train.eval_every=0",
        ),
    ],
)
def test_a_module_that_lacks_something_is_refused_before_anything_starts(
    words: list[str],
    error: str,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in UNFIT.items():
        (folder / "my_pkg" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    own = [
        word for word in OWN_MODEL if word != "dataset=synthetic" or "dataset=custom" not in words
    ]
    assert main([*own, *words]) == 2
    assert capsys.readouterr().err == f"launcher: {error}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_option_is_named() -> None:
    for group, options in find_groups([CONF]).items():
        (row,) = re.findall(rf"^\| `{group}` \| (.*?) \|", CONF_PAGE.text, re.MULTILINE)
        assert sorted(re.findall(r"`(\w+)`", row)) == options


def test_the_layers_are_those_that_imports_are_held_to() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in tool["contracts"] if c.get("containers") == ["launcher"])
    _, _, rest = CODE_PAGE.text.partition("| layer | does |\n|---|---|\n")
    rows = rest.partition("\n\n")[0].splitlines()
    cells = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows]
    assert cells == [re.findall(r"\w+", layer) for layer in contract["layers"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_it_names_exists(page: Page) -> None:
    named = re.findall(r"\b((?:conf|launcher|recipes|tests)/[\w/.]*\w/?)", page.text)
    named += re.findall(r"(?<![\w/])(?:\.ci|slurm)/[\w.]*\w", page.text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Page) -> None:
    for link in page.links:
        path, _, heading = link.partition("#")
        target = (ROOT / page.name).parent / path if path else ROOT / page.name
        assert target.exists(), link
        if heading:
            assert heading in read_page(str(target.resolve().relative_to(ROOT))).headings, link


@pytest.mark.parametrize("page", [page for page in PAGES if "/" in page.name], ids=lambda p: p.name)
def test_every_other_page_is_short(page: Page) -> None:
    """tests/budget.toml limits the first page, and all together."""
    assert len(page.text.splitlines()) <= 200
