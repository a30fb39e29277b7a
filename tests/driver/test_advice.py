"""Advice to type something can be typed as it is shown, and means what the message says.

A message that names a command of the launcher, or a setting with a value of the user's, has it from
`to_type`. Each of its calls has a case in `TYPED` with values that need quotes, whose words a shell
reads and the launcher accepts; a new call fails until it has one. Advice with fixed values is read
from the sources: its settings and options exist. The usage of `launcher runs` and `launcher new`,
which holds no value, is their parsers'.
"""

import ast
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

import launcher
from launcher.base import LAUNCH, setting_word, to_type
from launcher.cli import command
from launcher.config.compose import load, to_dict, to_yaml
from launcher.config.environment import below
from launcher.config.folders import find_groups, search_folders
from launcher.config.overrides import parse
from launcher.config.reader import setting_keys
from launcher.config.sections import TASKS
from launcher.driver.record import run_log

ROOT = Path(launcher.__file__).parent
ODD = ["12e5", "a b", "it's", 'say "x"', "a=b", "c:\\d\\", "null", "True", "1_0", "x,y", "[a]"]
ODD += [
    "hf:/a-b/c.d",
    "{a}",
    "$HOME",
    "${x}",
    "a\\${x}",
    "é",
    "~x",
    "007",
    "1:30",
    "#a",
    '\\"',
    "-5",
    ".",
]
PATH = Path("a b/it's=12e5,[x]")

# By the place of a call: its variables, and the settings that it has typed; None: another program.
TYPED = {
    "cli/new.py:main": ({"folder": PATH}, None),
    "cli/new.py:training_command": (
        {"name": "mine"},
        {"allow_modules": ["mine"]},
    ),
    "config/overrides.py:_parse_one": (
        {"key": "wandb.tags", "is_list": True, "items": ["a b", "it's", "(x"]},
        {"wandb.tags": ["a b", "it's", "(x"]},
    ),
    "config/sections.py:check_code": (
        {"allow_modules": ["one"], "module": "my_pkg.sub"},
        {"allow_modules": ["one", "my_pkg.sub"]},
    ),
    "driver/folder/make_folder.py:_check_exposed": ({"folder": PATH}, None),
    "driver/planning/init_from.py:_check_settings": (
        {"name": "llama", "PREFIX": "hf:", "path": PATH},
        {"model.name": "llama", "model.size": f"hf:{PATH}"},
    ),
    "driver/planning/init_from.py:_tokenizer_remedy": (
        {"path": PATH},
        {"dataset.tokenizer": str(PATH)},
    ),
    "driver/planning/prepare.py:shape_of": ({}, {"task": "calibrate"}),
    "driver/record/run_log.py:_resume_command:0": ({"script": PATH}, None),
    "driver/record/run_log.py:_resume_command:1": (
        {
            "command": ["launcher"],
            "settings": ["recipe=smoke", setting_word("wandb.name", "it's 5")],
            "self": SimpleNamespace(_home=SimpleNamespace(id="12e5")),
        },
        {"run.id": "12e5", "wandb.name": "it's 5", "task": "train"},
    ),
    "inference/export_tokenizer.py:warn_of_other_tokens": (
        {"theirs": PATH},
        {"dataset.tokenizer": str(PATH)},
    ),
    "plan/profile/calibration.py:": ({}, {"task": "calibrate"}),
    "report/trackers/wandb_tracker.py:__init__": ({"run": SimpleNamespace(folder=PATH)}, None),
    "submit/job.py:_submit_sweep": ({"folder": PATH}, {"sweep.dir": str(PATH)}),
    "submit/job.py:announced": ({"output": PATH}, None),
}


def sources():
    """The modules of the launcher and its recipes by their paths, parsed."""
    for name in ("", "recipes"):  # a link, which is not followed
        root = (ROOT / name).resolve()
        for path in sorted(root.rglob("*.py")):
            yield str(name / path.relative_to(root)), ast.parse(path.read_text())


SOURCES = dict(sources())


def calls():
    """Each call of `to_type`, by its place."""
    found = {}
    for name, tree in SOURCES.items():
        inner = {}
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            inner |= {id(node): function.name for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "to_type":
                found.setdefault(f"{name}:{inner.get(id(node), '')}", []).append(node)
    for place, nodes in found.items():
        nodes.sort(key=lambda node: node.lineno)
        yield from (
            {place: nodes[0]}.items()
            if len(nodes) == 1
            else ((f"{place}:{number}", node) for number, node in enumerate(nodes))
        )


CALLS = dict(calls())


def test_each_call_has_a_case():
    assert set(CALLS) == set(TYPED)


def in_shell(text):
    """The words that bash makes of a text."""
    script = f"printf '%s\\0' {text}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, cwd="/")
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("place", TYPED)
def test_what_is_advised_is_understood(place):
    variables, meant = TYPED[place]
    code = compile(ast.Expression(CALLS[place]), place, "eval")
    words = in_shell(eval(code, {"to_type": to_type, "LAUNCH": LAUNCH, **variables}))
    if meant is None:
        assert words[-1].startswith(str(PATH))
        return
    begin = {"python": 3, "launcher": 1}.get(words[0], 0)
    words = [word for word in words[begin:] if word not in ("--config-dir", "conf", "recipe=mine")]
    said = {override.key_or_group: override.value() for override in parse(words)}
    if "dataset.tokenizer" in said:
        words += ["dataset=jsonl", "dataset.path=x"]
    config = load(words) if "model.size" not in said else None  # whose folder is not there
    for key, value in meant.items():
        assert said.get({"model.name": "model"}.get(key, key), "train") == value
        assert config is None or OmegaConf.select(OmegaConf.create(to_dict(config)), key) == value


@pytest.mark.parametrize("begin", range(0, len(ODD), 4))
def test_any_text_comes_back(begin):
    asked = dict(zip(("name", "group", "entity", "project"), ODD[begin:], strict=False))
    words = to_type(*((f"wandb.{k}", text) for k, text in asked.items()), ("wandb.tags", ODD))
    config = load(in_shell(words)).wandb
    assert {key: getattr(config, key) for key in asked} == asked
    assert config.tags == ODD


def test_settings_that_are_printed_are_those_that_a_file_would_say():
    texts = [*ODD, "1.5e3", ".5E-3", "-1_0e5", "on"]
    assert OmegaConf.create(to_yaml(texts)) == texts
    assert yaml.safe_load(to_yaml(texts)) == texts


def texts():
    """Each text of the sources outside docstrings and `to_type`: place, text, and what it holds.

    A value that it holds stands as `\0`.
    """
    for name, tree in SOURCES.items():
        left_out = set()
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                left_out.add(id(body[0].value))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "to_type":
                left_out |= {id(inner) for inner in ast.walk(node)}
            if isinstance(node, ast.JoinedStr):
                left_out |= {id(inner) for inner in node.values}
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield name, node.value, []
            elif isinstance(node, ast.JoinedStr):
                held = [one.value for one in node.values if isinstance(one, ast.FormattedValue)]
                parts = (getattr(one, "value", "") for one in node.values)
                text = "".join(one if isinstance(one, str) else "\0" for one in parts)
                yield name, text, list(map(ast.unparse, held))


ADVISES = re.compile(r"\b(?:set|give|use|add|write|take|with|start|prepare)\b[^.;:]*$", re.I)
# Numbers, and names of ours, which need no quotes.
OURS = {
    *("usable", "_MOST_STAND_INS", "_multiples(batch, pieces)", "listed(sharing)", "each"),
    *("max(there // each, 1)", "model.has_state", "named", "SIDE", "most + 1", "VOCABULARY"),
    "vocab_size",
}


def test_advice_with_a_value_of_the_users_comes_from_the_function():
    advised = set()
    for name, text, held in texts():
        assert "python -m launcher " not in text, (name, text)
        for number, at in enumerate(match.start() for match in re.finditer("\0", text)):
            key = re.search(r"(?:^|[\s(])([a-z_]+(?:\.[a-z_]+)*)=[\[{]?$", text[:at])
            if key and ADVISES.search(text[: key.start()]):
                advised.add(held[number])
    assert advised == OURS


def test_settings_and_options_that_are_advised_exist():
    groups, known, seen = find_groups(search_folders(())), set(setting_keys()), 0
    sections = {key.partition(".")[0] for key in known if "." in key}
    choices = {"task": TASKS, "wandb.mode": ("online", "offline", "disabled")}
    for name, text, _ in texts():
        text = re.sub(".*--config-dir.*", "", text)  # with an option of the user's
        for key, value in re.findall(r"(?<![\w.=\[{])([a-z_]+(?:\.[a-z_]+)*)=([\w/-]+)", text):
            if key in groups and re.fullmatch(r"[a-z]\w*", value):
                assert value in groups[key], (name, text)
            elif "." in key and key.partition(".")[0] in sections:
                assert below(key, tuple(known)) or key.startswith("hydra."), (name, text)
            elif key in choices:
                assert value in choices[key], (name, text)
            else:
                continue
            seen += 1
    assert seen > 100


def examples():
    """The examples of the help that are one run's settings."""
    lines = re.findall(r"^  launcher ((?:[a-z_.]+=\S+ )+)", command._EXAMPLES, re.M)
    assert len(lines) > 5
    return lines


@pytest.mark.parametrize("line", examples())
def test_examples_of_the_help_are_accepted(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = in_shell(line)
    assert load([*words, *(["cluster.gpus=2"] if "cluster=slurm" in words else [])])


def test_the_command_that_resumes_says_no_more_how_to_begin(monkeypatch):
    words = ["recipe=smoke", "run.id=a", "+run.resume=never", "wandb.name='it is'"]
    monkeypatch.setattr("sys.argv", ["launcher", *words])
    log = SimpleNamespace(_allocation=None, _home=SimpleNamespace(id="12e5"))
    advised = run_log.RunLog._resume_command(log, "interrupted")
    config = load(in_shell(advised)[1:])
    assert (config.run.id, config.run.resume, config.wandb.name) == ("12e5", "auto", "it is")
