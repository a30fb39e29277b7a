"""`--json`: one object on standard output, and remedies that mend what is wrong."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import jsonschema
import pytest
from broken import broken

from launcher.cli import command, outcome, remedy
from launcher.cli.remedy import Edit
from launcher.config.errors import ConfigError
from launcher.config.reader import setting_keys
from launcher.stop import Stop

SCHEMA = json.loads(command.SCHEMA.read_text())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(capfd):
    """Run a command line with `--json`; return its object, which the schema must allow."""

    def ask(*words):
        with Stop() as stop:
            code = outcome.run(["--json", *words], stop)
        document = json.loads(capfd.readouterr().out)
        jsonschema.validate(document, SCHEMA)
        assert document["exit_code"] == code
        return document

    return ask


def mended(words, error):
    """The words after the remedy, by its description alone."""
    assert error["remedy"], error
    removed, added = error["remedy"]["remove"], error["remedy"]["add"]
    return [*(word for word in words if word not in removed), *added]


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(100))
def test_the_remedy_mends_a_broken_command_line(seed, here, ask):
    words = ["task=check", *broken(seed, here)]
    error = ask(*words)["error"]
    assert error["message"]
    assert ask(*mended(words, error))["error"] is None


def test_an_error(ask):
    assert ask("task=check", "parallel=atuo") == {
        "schema": 1,
        "exit_code": 2,
        "error": {
            "code": "unknown_option",
            "message": "There is no parallel=atuo (on the command line). Did you mean auto?",
            "keys": ["parallel"],
            "where": None,
            "remedy": {"remove": ["parallel=atuo"], "add": ["parallel=auto"]},
        },
    }


def test_a_file_is_named_with_its_line_and_overridden(here, ask):
    recipe = here / "my_conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ntrain:\n  precision: bf61\n")
    error = ask("task=check", "--config-dir", "my_conf", "recipe=mine")["error"]
    assert (error["code"], error["keys"]) == ("wrong_value", ["train.precision"])
    assert error["where"] == "my_conf/recipe/mine.yaml:3"
    assert error["remedy"] == {"remove": [], "add": ["train.precision=bf16"]}
    recipe.write_text("# @package _global_\ntrain: {steps: 3\nwandb: 4\n")
    error = ask("task=check", "--config-dir", "my_conf", "recipe=mine")["error"]
    assert (error["code"], error["remedy"]) == ("file", {"remove": ["recipe=mine"], "add": []})
    assert error["where"].startswith("my_conf/recipe/mine.yaml:")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("model=custom model.module=my_pkg.net", "not_allowed"),
        ("allow_moduels=[os] model=custom model.module=os", "unknown_setting"),
        ("parallel.allow_over_memroy=true", "unknown_setting"),
        ("run.resume=nevr", "wrong_value"),
        ("run.resume=must", "missing_value"),
        ("cluster=h100_8 cluster.device.memory_gib=lots", "wrong_value"),
        ("train.init_from=nowhere", "contradiction"),
        ("dataset=jsonl", "missing_value"),
    ],
)
def test_no_remedy_loosens_what_protects_a_run(words, code, ask):
    error = ask("task=check", *words.split())["error"]
    assert error["code"] == code
    told = error["remedy"] or {"remove": [], "add": []}
    assert not any("allow" in word or "memory" in word or "run." in word for word in told["add"])
    assert not any("resume" in word or "init_from" in word for word in told["remove"])


def test_every_protected_setting_is_refused_in_any_edit():
    protected = [key for key in setting_keys() if re.search("allow_|resume|memory|fork", key)]
    assert len(protected) > 5
    for key in protected:
        assert not Edit(add=(f"{key}=1",)).is_safe
        assert not Edit(remove=(f"++{key}=1",)).is_safe
    assert not Edit(remove=("task=chekc",)).is_safe  # it would train
    assert not Edit(("task=chekc",), ("task=train",)).is_safe
    assert Edit(("task=chekc",), ("task=check",)).is_safe


@pytest.mark.parametrize(
    "words", ["--dry-run", "--cfg job", "--dryrun train.stepz=2", "mode=check", "taks=chekc"]
)
def test_no_remedy_trains_what_may_have_asked_for_no_training(words, ask):
    assert ask(*words.split())["error"]["remedy"] is None


@pytest.mark.parametrize("said", ["run: {resume: never}", "task: plan"])
def test_no_remedy_leaves_out_a_file_that_protects_a_run(said, here, ask):
    recipe = here / "my_conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(f"# @package _global_\n{said}\ntrain: {{stepz: 3}}\n")
    error = ask("--config-dir", "my_conf", "recipe=mine")["error"]
    assert (error["code"], error["remedy"]) == ("unknown_setting", None)


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("-m train.steps=10,0", "train.steps=10,1"),
        ("-m parallel=zero2,zero4", "parallel=zero2,zero3"),
        ("-m run.seed=glob(*)", ""),
        ("-m hydra/launcher=joblib run.seed=1,2", ""),
        ("wandb.tags=a,b", "wandb.tags=[a,b]"),
        ("dataset.validation_fraction=10%", "dataset.validation_fraction=0.1"),
        ("optimizer.warmup_steps=10%", ""),
        ("batch_size=8", "train.global_batch_size=8"),
        ("--config_dir my_conf recipe=mine", "--config-dir my_conf"),
        ("--config-dir=my_cnof recipe=mine", "--config-dir my_conf"),
        ("--config-dir my_conf/recipe/mine.yaml", "--config-dir my_conf recipe=mine"),
        ("--config-dir my_conf recipe=my_conf/recipe/mine", ""),
    ],
)
def test_what_a_remedy_adds(words, added, here, ask):
    recipe = here / "my_conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ntrain: {log_every: 3}\n")
    said = ["task=check", *words.split()]
    error = ask(*said)["error"]
    assert error["remedy"]["add"] == added.split()
    assert ask(*mended(said, error))["error"] is None


def test_a_signal_before_any_work_is_answered(capfd, monkeypatch):
    monkeypatch.setattr("launcher.stop.exit_at_once", sys.exit)
    monkeypatch.setattr(command, "settings_said", lambda _: signal.raise_signal(signal.SIGTERM))
    with Stop() as stop, pytest.raises(SystemExit, match="75"):
        outcome.run(["--json", "task=check"], stop)
    document = json.loads(capfd.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    assert (document["exit_code"], document["error"]["code"]) == (75, "preempted")


@pytest.mark.parametrize(("output", "code"), [("/dev/full", 1), (None, 0)])
def test_nobody_may_read_the_object(output, code, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open(output, "w") if output else None)  # noqa: SIM115
    assert outcome.run(["--json", "schema"], Stop()) == code


def test_several_faults_have_one_remedy(ask):
    words = ["task=check", "parallel=maual", "train.stepz=5", "train.precision=bf61"]
    remedy = ask(*words)["error"]["remedy"]
    assert remedy == {
        "remove": words[1:],
        "add": ["parallel=manual", "train.steps=5", "train.precision=bf16"],
    }


def test_nothing_else_is_on_standard_output(ask, monkeypatch):
    def noisy(config, environ):
        print("a library's own line")
        os.write(1, b"a process's own line\n")
        return ["fine"]

    monkeypatch.setattr("launcher.driver.planning.check.check", noisy)
    assert ask("task=check")["check"]["notes"] == ["fine"]


def test_what_is_refused_without_it_is_refused_with_it(ask, monkeypatch):
    assert ask("--frozen", "config.yaml", "--config-dir", ".")["error"]["message"].startswith(
        "--frozen is one run's settings"
    )

    def check_versions():
        raise ConfigError("JAX 0.3 is too old")

    monkeypatch.setattr("launcher.api.versions.check_versions", check_versions)
    assert ask("task=check")["error"]["message"] == "JAX 0.3 is too old."


def test_a_fault_of_the_launcher_is_an_object_too(ask, monkeypatch):
    monkeypatch.setattr(command, "summary_of", lambda config: 1 / 0)
    error = ask("task=check")["error"]
    assert (error["code"], error["remedy"]) == ("internal", None)


def test_runs(here, ask):
    assert ask("runs") == {"schema": 1, "exit_code": 0, "error": None, "runs": []}
    folder = here / "outputs" / "one"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(
        json.dumps({"exit_reason": "done", "steps": 3, "final_loss": 2.5, "eval_loss": 2.25})
    )
    spoilt = here / "outputs" / "two"
    spoilt.mkdir()
    (spoilt / "summary.json").write_text('{"exit_reason": "done", "final_loss": NaN}')
    run, other = sorted(ask("runs")["runs"], key=lambda run: run["id"])
    assert other["loss"] is None
    assert (run["id"], run["state"], run["loss"]) == ("one", "done", 2.5)
    assert ask("runs", "show", "one")["runs"] == [run]
    assert ask("runs", "best", "by=eval_loss")["runs"][0]["eval_loss"] == 2.25
    assert ask("runs", "rm", "one", "--yes")["exit_code"] == 2
    assert folder.is_dir()


@pytest.mark.slow  # it traces and plans
def test_a_plan_that_does_not_fit_has_words_that_do(here, ask):
    words = ["recipe=mlp_synthetic", "parallel=data", "cluster=h100_8", "model.hidden_size=512"]
    words += ["task=plan", "cluster.device.memory_gib=0.008"]
    document = ask(*words)
    error, plan = document["error"], document["plan"]
    assert (document["exit_code"], error["code"]) == (1, "memory")
    assert error["remedy"]["remove"] == ["parallel=data"]
    assert document["run"]["state"] == "planned"
    assert Path(document["run"]["folder"], "plan.json").is_file()
    document = ask(*mended(words, error))
    assert document["error"] is None
    assert document["plan"]["stages"][0]["memory_bytes"] < plan["stages"][0]["memory_bytes"]


PAGE = (Path(command.__file__).parent / "README.md").read_text()
SYMPTOMS = re.findall(r"^### (.+)\n\n`(.+)`: (.+\n(?:.+\n)*)", PAGE, re.MULTILINE)


def test_every_symptom_of_the_page_is_found():
    assert len(SYMPTOMS) == PAGE.count("\n### ") >= 15


@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize(("message", "words", "text"), SYMPTOMS, ids=[s[1] for s in SYMPTOMS])
def test_a_symptom_of_the_page(message, words, text, ask):
    error = ask("task=check", *words.split())["error"]
    assert error["message"] == message
    told = re.findall(r"`([^`]+)`", text.partition("Remedy:")[2])
    if error["remedy"] is None:
        assert "no word" in text
    else:
        assert [*error["remedy"]["add"]] == [word for word in told if "=" in word or word == "-m"]
        assert bool(error["remedy"]["add"]) != ("leave it out" in text)


def test_every_kind_of_error_is_in_the_schema():
    sources = Path(command.__file__).parents[2]
    texts = [path.read_text() for path in (sources / "launcher").rglob("*.py")]
    used = {code for text in texts for code in re.findall(r'\bcode="(\w+)"', text)}
    kinds = set(SCHEMA["$defs"]["error"]["properties"]["code"]["enum"])
    assert len(used) >= 8
    assert used <= kinds
    assert {*remedy._HOPELESS, *remedy._LATER, *outcome._ENDINGS.values()} <= kinds


def test_the_schema_is_printed(capsys):
    assert outcome.run(["schema"], Stop()) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))
