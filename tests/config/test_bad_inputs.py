"""Bad settings made from the schema itself: every key with every way to get it wrong.

Each ends with exit code 2 and one line that names the key, starts no process and leaves nothing in
the folder. All are said in a frozen file, which needs no composing; a part of them on the command
line and in a folder of the user's, where `pytest -m slow` says all.
"""

from __future__ import annotations

import os
import sys
import typing
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import yaml

from launcher.__main__ import main
from launcher.config.environment import COMMAND_LINE_ONLY
from launcher.config.fields import LARGEST, key_of, settings_of
from launcher.config.schema import Config

LOOKED_FOR = ("cluster.gpus=999", "model.module=no_such")
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}


class Setting(NamedTuple):
    """One setting, and what else must be said for there to be one."""

    key: str
    kind: Any
    optional: bool
    metadata: Any
    beside: dict[str, Any]


class Case(NamedTuple):
    """A wrong value, and what the message has to hold."""

    key: str
    value: Any
    told: str
    beside: dict[str, Any]

    @property
    def tree(self):
        """The settings, nested."""
        tree: dict[str, Any] = {}
        for key, value in {**self.beside, self.key: self.value}.items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return tree


NEEDED = {"parts": {"a": {"path": "x"}}}  # of what has to be said, and is no text


def settings(cls=Config, prefix="", beside=None):
    hints = typing.get_type_hints(cls)
    for field in settings_of(cls):
        key, hint = f"{prefix}{key_of(field)}", hints[field.name]
        if "variants" in field.metadata:
            variants = field.metadata["variants"]
            for name, variant in variants.classes.items():
                needed = [f.name for f in fields(variant) if f.default is f.default_factory]
                said = {
                    f"{key}.{variants.key}": name,
                    **{f"{key}.{word}": NEEDED.get(word, "x") for word in needed},
                }
                if name == "mlp":
                    said["dataset.name"] = "synthetic"
                yield from settings(variant, f"{key}.", said)
        elif is_dataclass(hint):
            yield from settings(hint, f"{key}.", beside)
        elif key != next(iter(beside or ()), None):  # which names the variant
            options = [option for option in typing.get_args(hint) if option is not type(None)]
            kind = options[0] if type(None) in typing.get_args(hint) else hint
            may_be_null = "auto" in field.metadata or field.default is None
            optional = kind is not hint or may_be_null
            kind = typing.get_origin(kind) or kind
            yield Setting(key, kind, optional, field.metadata, beside or {})


WRONG: dict[Any, list[Any]] = {
    int: ["many", 1.5, True, [1], {"a": 1}, "0x10", "1:30", "010", " 7 ", "", float("nan")],
    float: ["fast", True, [1.0], {"a": 1}, float("nan"), float("inf"), "", 10**400],
    bool: [1, "perhaps", "true", [True], 0.0],
    str: [3, 1.5, True, ["a"], {"a": "b"}, "", " ", "two\nlines", "a\0b"],
    list: ["word", 3, {"a": "b"}],
    dict: ["word", 3, ["a"]],
}


# What a model and a dataset of the user's own need beside their options.
OWN = {
    "model": {"model.module": "x", "dataset.name": "synthetic"},
    "dataset": {"dataset.module": "x", "model.name": "mlp"},
}


def wrong_values():
    for key, kind, optional, metadata, beside in settings():
        values = [*WRONG[kind], *([] if optional else [None])]
        if metadata.get("one_or_several"):  # a word stands for a list of it
            values.remove("word")
        for value in values:
            yield Case(key, value, key, {k: v for k, v in beside.items() if k != key})
        if "choices" in metadata:
            right = [*metadata["choices"]][-1]
            wrong = right[:-1] + "X" if isinstance(right, str) else right + 1
            yield Case(key, wrong, str(right), beside)
        if (minimum := metadata.get("minimum")) is not None:
            below = int(minimum) - 1 if kind in (int, list) else minimum - 1e-3
            value = [below] if kind is list else below
            yield Case(key, value, f"{key} must be at least", beside)
        if kind in (int, float) and "choices" not in metadata:
            maximum = metadata.get("maximum") or (LARGEST if kind is int else 3e38)
            above = maximum + 1 if kind is int else max(maximum + 1e-3, maximum * 1.1)
            yield Case(key, above, f"{key} must be at most", beside)


def useless_options():
    """In the user's own names and values: what a checkpoint could not keep, or a module not get."""
    for section, beside in OWN.items():
        said, key = {f"{section}.name": "custom", **beside}, f"{section}.options"
        infinite = float("inf")
        for value in (float("nan"), -infinite, [1.0, infinite], {"b": [{"c": infinite}]}, b"hi"):
            yield Case(key, {"a": value}, f"{key}.a", said)
        yield Case(key, {"a": {1: 2}}, f"{key}.a.1", said)
        yield Case(key, {"name": "foo"}, f"{key}.name", said)


def slips():
    """Each key with its first letter left out, two swapped, or its last doubled."""
    known = {setting.key for setting in settings()}
    for key, _, _, _, beside in settings():
        section, _, name = key.rpartition(".")
        for slip in (name[1:], name[:1] + name[2:3] + name[1:2] + name[3:], name + name[-1]):
            typed = f"{section}.{slip}" if section else slip
            if len(name) > 3 and typed not in known and slip != name:
                others = {k: v for k, v in beside.items() if k != key}
                told = f"Did you mean {key}?"
                yield Case(typed, "x", told, others)


def contradictions():
    """Settings of which each is fine, and that do not go together."""
    for optimizer, keys in {
        "adamw": ("momentum",),
        "adam": ("momentum",),
        "sgd": ("b1", "b2", "eps"),
        "lion": ("momentum", "eps"),
        "adafactor": ("momentum", "b1", "b2", "eps"),
    }.items():
        for key in keys:
            yield _together({"optimizer.name": optimizer, f"optimizer.{key}": 0.5})
    pipeline = {"num_stages": 2, "num_layers": 2, "stages_per_mesh": 2, "pipeline": 2}
    mesh = {"data": 2, "model": 2}
    how = {"schedule": "gpipe"}
    plan = {"remat": "full", "num_micro_batches": 2, "cost": "profile"}
    for method, keys in {
        "auto": {"stages_per_mesh": 2, "pipeline": 2, "plan": "p", **mesh},
        "manual": {"pipeline": 2, "plan": "p", **mesh},
        "data": {**pipeline, **how, **mesh},
        "parameter_server": {**pipeline, **how, **mesh, "servers": 0},
        "zero2": {**pipeline, **how, **mesh},
        "zero3": {**pipeline, **how, **mesh},
        "shard": {**pipeline, **how},
        "three_d": {"num_stages": 2, "stages_per_mesh": 2, "plan": "p"},
    }.items():
        for key, value in keys.items():
            yield _together({"parallel.method": method, f"parallel.{key}": value})
    for key, value in {**pipeline, **mesh, **how, **plan}.items():
        replayed = {"parallel.method": "replay", "parallel.plan": "p"}
        yield _together({**replayed, f"parallel.{key}": value})
    yield _together({"parallel.method": "replay"}, "parallel.plan")
    for key in ("gres", "time", "mem", "signal", "job_name"):
        slurm = {"cluster.kind": "slurm", "cluster.gpus": 2, "cluster.slurm.gpu_type": "a100"}
        yield _together({**slurm, f"cluster.slurm.{key}": "no good"})
    for key, value in {
        "partition": "p",
        "cpus": 4,
        "exclusive": False,
        "signal": "TERM@9",
        "wait": True,
        "setup": ["x"],
        "env": {"A": "b"},
        "container": {"image": "i"},
        "dry_run": True,
    }.items():
        yield _together({"cluster.kind": "emulated", f"cluster.slurm.{key}": value})
    for kind in ("local", "emulated"):
        yield _together({"cluster.kind": kind, "cluster.transport": "collective"})
    alone = {"cluster.kind": "local", "cluster.max_restarts": 0}
    yield _together({**alone, "train.non_finite": "rollback"})
    yield _together({**alone, "train.spikes": "rollback"})
    for option in ("nodes", "time", "output", "gpus-per-node"):
        slurm = {"cluster.kind": "slurm", "cluster.gpus": 2}
        yield _together({**slurm, "cluster.slurm.extra": {option: "1"}})


def _together(said, told=""):
    *beside, key = said
    mlp = {"model.name": "mlp", "dataset.name": "synthetic"}
    return Case(key, said[key], told or key, mlp | {name: said[name] for name in beside})


CASES = [*wrong_values(), *useless_options(), *slips(), *contradictions()]
# Each of these leaves out what the others of its group say, so that a few of every kind are left.
SAMPLE = CASES[:: len(CASES) // 12]


# What the machine and its files do not have. In these {} is a folder that holds an empty file,
# `file`, ten bytes of text, `text`, and a FIFO, `fifo`, which nobody writes to.
NOTHING = ("{}/nowhere", "{}/file", "{}/fifo")
TEXT = "task=plan dataset=text dataset.path="
REPLAY = "task=plan model=mlp dataset=synthetic parallel=replay parallel.plan="
MLP_ = "task=plan model=mlp dataset=synthetic "
ELSEWHERE = [
    ("task=sweep_status sweep.dir={}", "sweep.dir={}"),
    ("cluster=h100_8", "cluster=h100_8"),
    ("cluster.gpus=999", "cluster.gpus=999"),
    ("run.resume=must run.id=nobody", "run.resume=must"),
    ("run.id=file run.dir={}", "run.id=file"),
    ("run.dir={}/file", "run.dir={}/file"),
    ("run.dir={}/file/below", "run.dir={}/file/below"),
    *((f"{TEXT}{name}", f"dataset.path={name}") for name in (*NOTHING, "/dev/null")),
    (f"{TEXT}{{}}", "dataset.pattern=**/*.txt"),
    (f"{TEXT}{{}} dataset.pattern=/x", "dataset.pattern=/x"),
    (f"{TEXT}{{}}/text", "dataset.path={}/text"),
    *((f"{REPLAY}{name}", f"parallel.plan={name}") for name in (*NOTHING, "{}", "{}/text")),
    (f"{MLP_}model.input_size=2147483647", "model.input_size=2147483647"),
    ("task=plan dataset=synthetic model.vocab_size=2147483647", "model.vocab_size=2147483647"),
    *((f"{MLP_}train.init_from={name}", f"init_from={name}") for name in (*NOTHING, "{}")),
    ("--frozen {}/nowhere", "--frozen {}/nowhere"),
    ("--frozen {}/fifo", "--frozen {}/fifo"),
    ("run.dir={}/fifo", "run.dir={}/fifo"),
    ("run.id=fifo run.dir={}", "run.id=fifo"),
    ("--frozen {}", "--frozen {}"),
    ("--frozen {}/file", "{}/file"),
    ("--config-dir {}/nowhere", "--config-dir {}/nowhere"),
    ("--config-dir {}/file", "--config-dir {}/file"),
    (
        "model=custom model.module=no_such_pkg.net allow_modules=[no_such_pkg] dataset=synthetic "
        "model.options={{vocab_size:9,sequence_length:9}}",
        "model.module=no_such",
    ),
    ("dataset=custom dataset.module=json allow_modules=[json]", "dataset.module=json"),
]


# Where `task=check` has nothing to say: what it does not look at, as it says, or has no part in.
LATER = ("task=sweep_status", "cluster=h100_8", f"{MLP_}model.input", "task=plan dataset=synthetic")
LATER += ("dataset=custom dataset.module=json", "--frozen")


@pytest.fixture(scope="module")
def started():
    """The processes that this one starts, as they are started. A hook stays for good."""
    events: list[str] = []

    def note(event, arguments):
        if event in STARTS:
            events.append(f"{event} {arguments}")

    sys.addaudithook(note)
    return events


class Refused:
    """Runs command lines in an empty folder and holds what must be true of each refusal."""

    def __init__(self, folder, started, capsys):
        self._folder, self._started, self._capsys = folder, started, capsys

    def __call__(self, words, told):
        """What is wrong with the answer; nothing where it is as it should be."""
        self._started.clear()
        try:
            code = main(words)
        except BaseException as error:
            self._capsys.readouterr()
            return [f"{words}: {type(error).__name__}: {error}"]
        out, err = self._capsys.readouterr()
        # A wrong device or file is found when it is looked for, which is announced.
        quiet = not out or "task=plan" in words or told.startswith(LOOKED_FOR)
        faults = {
            f"exit code {code}": code != 2,
            f"it said {out!r}": not quiet,
            f"not one line: {err!r}": err.count("\n") != 1 or not err.startswith("launcher: "),
            f"not {told!r}: {err!r}": told not in err,
            f"started {self._started}": bool(self._started),
            "left something": any(self._folder.iterdir()),
        }
        return [f"{words}: {fault}" for fault, is_so in faults.items() if is_so]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, started):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Refused(tmp_path / "here", started, capsys)


def test_there_are_enough():
    assert len(CASES) > 1000
    assert {case.key for case in CASES} >= {setting.key for setting in settings()}


@pytest.mark.stress
def test_in_a_frozen_file(refused, tmp_path):
    file, faults = tmp_path / "config.yaml", []
    for case in CASES:
        file.write_text(yaml.safe_dump(case.tree))
        if case.key.startswith("allow_"):
            continue  # which a file has no say in
        faults += [f"{case}: {fault}" for fault in refused(["--frozen", str(file)], case.told)]
    assert faults == []


@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize(("command", "told"), ELSEWHERE, ids=[command for command, _ in ELSEWHERE])
def test_what_is_not_there(command, told, refused, tmp_path):
    inputs = tmp_path / "in puts"
    inputs.mkdir()
    (inputs / "file").touch()
    (inputs / "text").write_text("ten bytes\n")
    os.mkfifo(inputs / "fifo")
    words = [quoted(word.format(inputs)) for word in command.split(" ")]
    assert refused(words, told.format(inputs)) == []
    if not command.startswith(LATER):
        assert refused([*words, "task=check"], told.format(inputs)) == []


def quoted(word):
    """Hydra wants blanks in values quoted."""
    key, is_setting, value = word.partition("=")
    return f"{key}='{value}'" if is_setting and " " in value else word


def in_a_folder(case, folder):
    """The command line that chooses the case's settings from a recipe in `folder`."""
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe" / "mine.yaml"
    recipe.write_text(f"# @package _global_\n{yaml.safe_dump(case.tree)}")
    choices = [f"{k.removesuffix('.name')}={v}" for k, v in case.beside.items() if ".name" in k]
    return ["--config-dir", str(folder), "recipe=mine", *choices]


def check_in_a_folder(cases, refused, tmp_path):
    faults = []
    for case in cases:
        told = f"{case.key} is for" if case.key in COMMAND_LINE_ONLY else case.told
        words = in_a_folder(case, tmp_path / "conf with spaces ü")
        faults += [f"{case}: {fault}" for fault in refused(words, told)]
    assert faults == []


def test_a_sample_in_a_users_folder(refused, tmp_path):
    check_in_a_folder(SAMPLE, refused, tmp_path)


@pytest.mark.stress
def test_all_in_a_users_folder(refused, tmp_path):
    check_in_a_folder(CASES, refused, tmp_path)
