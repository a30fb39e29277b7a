"""What runs code is the command line's to say: no file decides it, and no text brings a line in."""

import os
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from launcher.__main__ import main
from launcher.base import CONF
from launcher.config.compose import load, load_frozen, sources_of, to_dict
from launcher.config.errors import ConfigError
from launcher.config.reader import from_dict
from launcher.submit.job import array_script, script_for

SLURM = ("cluster=slurm", "run.id=mine", "task=check")
# What a file may say of each setting that runs code: the rest of the line behind `cluster: slurm:`.
COMMANDS = {
    "cluster.slurm.setup": "{slurm: {setup: [touch /tmp/x]}}",
    "cluster.slurm.python": '{slurm: {python: "false"}}',
    "cluster.slurm.env.LD_PRELOAD": "{slurm: {env: {LD_PRELOAD: /tmp/x.so}}}",
    "cluster.slurm.container.image": "{slurm: {container: {image: x, workdir: /tmp/x}}}",
    "cluster.slurm.srun_args": "{slurm: {srun_args: [--task-prolog=/tmp/x]}}",
    "cluster.slurm.extra.export": "{slurm: {extra: {export: 'BASH_ENV=/tmp/x'}}}",
}
ELSEWHERE = "model: {name: custom, module: m, options: {s: {setup: [touch /tmp/x]}}}\n"


def recipe(folder, text):
    """The words that choose a recipe that says `text`."""
    path = folder / "my_conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}\n")
    return ["--config-dir", str(folder / "my_conf"), "recipe=mine"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_runs_code_only_where_the_command_line_allows_it(command, here, capsys):
    words = [*recipe(here, f"cluster: {COMMANDS[command]}"), *SLURM]
    for allowed in ([], ["allow_commands=false"]):
        assert main([*words, *allowed]) == 2
        assert capsys.readouterr().err == (
            f"launcher: {command} runs code, so no file may set it "
            "(in my_conf/recipe/mine.yaml:2). "
            "If you trust the file, add allow_commands=true on the command line.\n"
        )
    assert main([*words, "allow_commands=true"]) == 0


def test_what_the_command_line_says_itself_is_allowed():
    slurm = load([*SLURM, "cluster.slurm.setup=[module load cuda]", "cluster.slurm.env.A=b"])
    assert slurm.cluster.slurm.setup == ["module load cuda"]
    assert slurm.cluster.slurm.env == {"A": "b"}


def test_what_the_command_line_adds_to_does_not_become_its_own(here):
    words = [*recipe(here, f"cluster: {COMMANDS['cluster.slurm.env.LD_PRELOAD']}"), *SLURM]
    assert main([*words, "cluster.slurm.env.A=b"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        f"{ELSEWHERE}cluster: {{slurm: '${{model.options.s}}'}}",
        f"{ELSEWHERE}cluster: {{slurm: {{setup: '${{model.options.s.setup}}'}}}}",
        "allow_commands: true\ncluster: {slurm: {setup: [touch /tmp/x]}}",
        "<<: {cluster: {slurm: {setup: [touch /tmp/x]}}}",
    ],
)
def test_no_detour_leads_to_code(text, here):
    with pytest.raises(ConfigError, match=r"runs code|only on the command line"):
        load([*recipe(here, text)[2:], *SLURM, "allow_modules=[m]"], [str(here / "my_conf")])


@pytest.mark.parametrize("chosen", ["val.yaml", "/recipe/val.yaml", "/recipe: val.yaml"])
def test_a_file_named_with_its_extension_is_looked_at(chosen, here, capsys):
    recipe(here, "cluster: {slurm: {setup: [touch /tmp/x]}}")
    (here / "my_conf/recipe/mine.yaml").rename(here / "my_conf/recipe/val.yaml")
    default = "override /recipe: val.yaml" if ":" in chosen else chosen
    words = recipe(here, f"defaults: [{default}]")
    if ":" in chosen:  # by the command line
        words[-1] = "recipe=val.yaml"
    assert main(words) == 2
    assert (
        "cluster.slurm.setup runs code, so no file may set it (in my_conf"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("way", ["/../../../elsewhere/evil", "{}/elsewhere/evil"])
def test_no_file_outside_the_folders_of_settings_is_read(way, here, capsys):
    """Found from the project's folder, `..` leads to other files than from one that lies deeper."""
    (here / "elsewhere").mkdir()
    os.mkfifo(here / "elsewhere" / "evil.yaml")
    (here / "a/b/c").mkdir(parents=True)
    way = f"/{way.format(here)}" if "{}" in way else way
    words = recipe(here / "a/b/c", f"defaults: [{way}]")
    assert main([*words, *SLURM]) == 2
    assert "which is in no folder of settings" in capsys.readouterr().err


def test_a_users_folder_inside_the_projects_is_the_users():
    chosen = SimpleNamespace(config_path="gpt", package="model")
    assert [one.is_own for one in sources_of([chosen], (CONF / "model", CONF))] == [False]
    chosen.config_path = "model/gpt"
    assert [one.is_own for one in sources_of([chosen], (CONF / "model", CONF))] == [True]


def test_what_a_file_leaves_out_needs_no_permission(here):
    slurm = "setup: [], env: {}, python: null, srun_args: [], extra: {}, container: {image: null}"
    words = recipe(here, f"cluster: {{slurm: {{{slurm}}}}}")
    assert main([*words, *SLURM]) == 0


def test_a_frozen_file_runs_code_only_where_the_command_line_allows_it(here):
    config = load([*SLURM, "cluster.slurm.setup=[umask 027]"])
    file = here / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(config) | {"allow_commands": True}))
    with pytest.raises(ConfigError, match=r"^cluster\.slurm\.setup runs code.*config\.yaml"):
        load_frozen(file)
    assert load_frozen(file, ["allow_commands=true"]).cluster == config.cluster


def test_the_job_of_what_was_allowed_is_told_so():
    told = "config.yaml allow_commands=true)"
    assert told in script_for(load([*SLURM, "cluster.slurm.setup=[umask 027]"]))
    assert told not in script_for(load(SLURM))


def test_a_package_that_a_file_names_is_not_imported(here, capfd, monkeypatch):
    """Hydra would, as a further folder of settings."""
    (here / "evil").mkdir()
    (here / "evil" / "__init__.py").write_text("print('code ran')")
    monkeypatch.syspath_prepend(str(here))
    (here / "my_conf").mkdir()
    (here / "my_conf" / "config.yaml").write_text("hydra: {searchpath: ['pkg://evil']}\n")
    assert main(["--config-dir", "my_conf", "task=check"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "hydra is Hydra's own section" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.slurm.extra", {"comment": "x\n#SBATCH --uid=0"}),
        ("cluster.slurm.extra", {"x\ntouch /tmp/x\n#": ""}),
        ("cluster.slurm.setup", ["true", "true\ntouch /tmp/x"]),
        ("cluster.slurm.srun_args", ["-x\ny"]),
        ("cluster.slurm.env", {"A": "b\nc"}),
        ("cluster.slurm.container.mounts", ["/a:/b\n/c"]),
        ("wandb.tags", ["a\nb"]),
    ],
)
def test_no_text_brings_a_line_of_its_own(key, value, here, capsys):
    tree = to_dict(load(SLURM))
    *sections, name = key.split(".")
    place = tree
    for section in sections:
        place = place[section]
    place[name] = value
    (here / "config.yaml").write_text(yaml.safe_dump(tree))
    assert main(["--frozen", "config.yaml", "allow_commands=true"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert key in err
    assert "must be one line of plain text" in err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("comment=x --uid", "cannot name an option of sbatch"),
        ("--comment=x", "cannot name an option of sbatch"),
        ("outpu", "is short for output"),
        ("output", "cannot be set here"),
    ],
)
def test_an_extra_option_is_one_option(name, told):
    tree = to_dict(load(SLURM))
    tree["cluster"]["slurm"]["extra"] = {name: "1"}
    with pytest.raises(ConfigError, match=told):
        from_dict(tree)


def test_a_value_is_no_second_option():
    for key in ("gres", "gpu_type", "account"):
        script = script_for(load([*SLURM, f"cluster.slurm.{key}='x --uid=0 \"'"]))
        lines = [line for line in script.splitlines() if "--uid" in line]
        assert [shlex.split(line)[2:] for line in lines] == [[]]


@pytest.mark.devices
def test_a_folder_is_no_command(here, capsys):
    """What the shell would do with its name, in a script and in that of an array."""
    config = load([*SLURM, "run.dir='it\\'s $(touch ran)'", "cluster.slurm.array=2"])
    environ = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    for script in (script_for(config), array_script([config], "mine")):
        head = script[: script.index("# One task on each node")]
        subprocess.run(["bash", "-c", head], check=True, env=environ)
    assert list(here.iterdir()) == []
    folder = here / "two\nlines"
    folder.mkdir()
    os.chdir(folder)
    assert main([*SLURM[:2], "cluster.slurm.dry_run=true"]) == 2
    assert "cannot stand in a batch script" in capsys.readouterr().err
