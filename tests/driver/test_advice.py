"""Advice to type something can be typed as it is shown, and means what the message says.

A message that names a command of the launcher, or a setting with a value of the user's, has it from
`to_type`. Each of its calls is found and made with values that need quotes, and a shell and the
launcher read what comes of it; a call with other variables than `HELD` fails until it has them.
Advice with fixed values is read from the sources: its settings and options exist. The usage of
`launcher runs` and `launcher new`, which holds no value, is their parsers'.
"""

import ast
import functools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

import launcher
from launcher.base import LAUNCH, to_type
from launcher.config.compose import load, to_dict, to_yaml
from launcher.config.environment import below
from launcher.config.folders import find_groups, search_folders
from launcher.config.overrides import parse
from launcher.config.reader import setting_keys
from launcher.config.sections import TASKS
from launcher.driver.record import run_log

ROOT = Path(launcher.__file__).parent
# Texts that need quotes, and some that need none.
ODD = r"""12e5,a b,it's,say "x",a=b,c:\d\,null,True,1_0,x;y,[a],hf:/a-b/c.d,{a},$HOME,${x},a\${x},é,
~x,007,1:30,#a,\",-5,.""".replace("\n", "").split(",")
ODD += ["x,y"]
PATH = Path("a b/it's=12e5,[x]")

# What the calls hold: the user's values.
HELD = {
    **dict.fromkeys(("folder", "path", "script", "output", "theirs"), PATH),
    "name": "mine",
    "owner_id": "12e5",
    "size": "hf:it's",
    "PREFIX": "hf:",
    "allow_modules": ["one"],
    "module": "my_pkg.sub",
    "key": "wandb.tags",
    "is_list": True,
    "items": ["a b", "it's", "(x"],
    "command": ["launcher"],
    "settings": ["recipe=smoke", 'wandb.name="it\'s 5"'],
    "tokenizer": str(PATH),
    "left_out": ["a[1,2]", "b"],
    "run": SimpleNamespace(folder=PATH),
    "parent": SimpleNamespace(path=PATH),
    "self": SimpleNamespace(_home=SimpleNamespace(id="12e5"), dir="s3://b/it's"),
    "words": [("dataset.path", str(PATH)), ("dataset.validation_path", "a b")],
}
# What is said beside a setting, so that it has an effect.
BESIDE = {
    "dataset.tokenizer": ("dataset=jsonl", "dataset.path=x"),
    "dataset.path": ("dataset=tokens",),
    "run.mirror": ("run.id=a",),
    "cluster.slurm.exclude": ("cluster=slurm", "cluster.gpus=2"),
}


def sources():
    """The texts of the modules of the launcher and its recipes, by their paths."""
    for name in ("", "recipes"):  # a link, which is not followed
        root = (ROOT / name).resolve()
        for path in sorted(root.rglob("*.py")):
            yield str(name / path.relative_to(root)), path.read_text()


def is_call(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "to_type"


# When tests are collected, in each process of tests: only what has such a call is parsed.
CALLS = {
    f"{name}:{ast.unparse(node)}": node
    for name, text in sources()
    if "to_type(" in text
    for node in ast.walk(ast.parse(text))
    if is_call(node)
}


def in_shell(text):
    """The words that bash makes of a text."""
    script = f"printf '%s\\0' {text}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, cwd="/")
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("call", CALLS)
def test_what_is_advised_is_understood(call):
    def given(*words):
        asked.extend(words)
        return to_type(*words)

    asked = []
    code = compile(ast.Expression(CALLS[call]), call, "eval")
    words = in_shell(eval(code, {"to_type": given, "LAUNCH": LAUNCH, **HELD}))
    meant = dict(word for word in asked if isinstance(word, tuple))
    if not meant:  # another program's
        assert words == [str(word) for word in asked]
        return
    begin = {"python": 3, "launcher": 1}.get(words[0], 0)
    words = [word for word in words[begin:] if word not in ("--config-dir", "conf", "recipe=mine")]
    words = [*BESIDE.get(next(iter(meant)), ()), *words]
    said = {"recipe": "mine"} | {one.key_or_group: one.value() for one in parse(words)}
    assert {key: said[key] for key in meant} == meant
    if "model.size" not in meant:  # a folder that is not there
        tree = {"recipe": "mine"} | to_dict(load(words))
        assert {key: OmegaConf.select(OmegaConf.create(tree), key) for key in meant} == meant


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


class Texts(ast.NodeVisitor):
    """Collects the texts outside docstrings and `to_type`, each with the values that it holds.

    They stand in it as `\0`.
    """

    def __init__(self):
        self.found = []

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node):
        if not is_call(node):
            self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            self.found.append((node.value, []))

    def visit_JoinedStr(self, node):
        held = [one for one in node.values if isinstance(one, ast.FormattedValue)]
        text = "".join("\0" if one in held else one.value for one in node.values)
        self.found.append((text, [ast.unparse(one.value) for one in held]))
        for one in held:
            self.visit(one.value)


@functools.cache
def texts():
    collector = Texts()
    for _, text in sources():
        collector.visit(ast.parse(text))
    return collector.found


ADVISES = re.compile(r"\b(?:set|give|use|add|write|take|with|start|prepare|read)\b[^.;]*$", re.I)
# Numbers, and names of ours, which need no quotes.
OURS = {
    *("usable", "_MOST_STAND_INS", "_multiples(batch, pieces)", "listed(sharing)", "each"),
    *("max(there // each, 1)", "model.has_state", "named", "SIDE", "most + 1", "VOCABULARY"),
    *("vocab_size", "self.format"),
}


def test_advice_with_a_value_of_the_users_comes_from_the_function():
    advised = set()
    for text, held in texts():
        assert "python -m launcher " not in text
        for number, at in enumerate(match.start() for match in re.finditer("\0", text)):
            key = re.search(r"(?:^|[\s(])[a-z_]+(?:\.[a-z_]+)*=[\[{]?$", text[:at])
            if key and ADVISES.search(text[: key.start()]):
                advised.add(held[number])
    assert advised == OURS


def test_settings_and_options_that_are_advised_exist():
    groups, known, seen = find_groups(search_folders(())), set(setting_keys()), 0
    sections = {key.partition(".")[0] for key in known if "." in key}
    choices = {"task": TASKS, "wandb.mode": ("online", "offline", "disabled")}
    for text, _ in texts():
        text = re.sub(".*--config-dir.*", "", text)  # with an option of the user's
        for key, value in re.findall(r"(?<![\w.=\[{])([a-z_]+(?:\.[a-z_]+)*)=([\w/-]+)", text):
            if key in groups and re.fullmatch(r"[a-z]\w*", value):
                assert value in groups[key], text
            elif key in choices:
                assert value in choices[key], text
            elif "." in key and key.partition(".")[0] in sections:
                assert below(key, tuple(known)) or key.startswith("hydra."), text
            else:
                continue
            seen += 1
    assert seen > 100


def test_the_command_that_resumes_says_no_more_how_to_begin(monkeypatch):
    words = ["recipe=smoke", "run.id=a", "+run.resume=never", "wandb.name='it is'"]
    monkeypatch.setattr("sys.argv", ["launcher", *words])
    log = SimpleNamespace(_allocation=None, _home=SimpleNamespace(id="12e5"))
    advised = run_log.RunLog._resume_command(log, "interrupted")
    config = load(in_shell(advised)[1:])
    assert (config.run.id, config.run.resume, config.wandb.name) == ("12e5", "auto", "it is")
