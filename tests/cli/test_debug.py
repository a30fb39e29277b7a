"""`python -m launcher.debug`: every stage of compilation as text, of settings and of a run."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import yaml

from launcher.config.compose import load, to_dict
from launcher.debug import main

WORDS = [
    "model=mlp",
    "dataset=synthetic",
    "model.num_layers=4",
    "model.hidden_size=16",
    "parallel=manual",
    "parallel.num_stages=2",
    "parallel.num_micro_batches=2",
    "cluster=emulated",
    "cluster.gpus=4",
    "cluster.hosts=2",
]
NAMES = ["loss", "layers", "stages", "tasks_of_stage_0", "tasks_of_stage_1", "update", "slots"]
WORKERS = ["instructions_of_worker_0", "instructions_of_worker_1"]


@pytest.fixture(scope="module")
def printed():
    """What it prints of `WORDS`."""
    with redirect_stdout(StringIO()) as out:
        assert main(WORDS) == 0
    return out.getvalue()


def parts(text):
    """What is printed, by its headings."""
    found = [part.partition("\n\n") for part in text.removeprefix("# ").split("\n\n# ")]
    return {name: body for name, _, body in found}


def planned(folder):
    """The folder of a run that was planned with `WORDS`, as far as `debug` reads it."""
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.plan import local_shape
    from launcher.train.program import build_program

    config = load(WORDS)
    plan = plan_of(config.parallel, build_program(config).train, local_shape(4, 2, "cpu"))
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
    return folder


def test_of_settings(printed):
    shown = parts(printed)
    assert list(shown) == [*NAMES, *WORKERS]
    assert shown["layers"].count("operands: ") == 4
    assert "layer 3, operands: 0.params.output_layer.kernel" in shown["layers"]
    assert "stage 1: layers 1, 2, 3; mesh 1, devices 2, 3 as 2x1; remat none" in shown["stages"]
    assert "-> activation 0, residual 0" in shown["tasks_of_stage_0"]
    assert "gradient of 0.params.output_layer.kernel" in shown["tasks_of_stage_1"]
    assert "update.1, mesh 1\n{ lambda" in shown["update"]


def test_a_worker_follows_its_own_part(printed):
    shown = parts(printed)
    slots = [line.split() for line in shown["slots"].splitlines()]
    for worker, name in enumerate(WORKERS):
        lines = shown[name].splitlines()
        runs = [line for line in lines if line.startswith("RUN")]
        assert runs
        assert all(f", mesh {worker}:" in line for line in runs)
        freed = [int(n) for line in lines if line.startswith("FREE") for n in line.split()[1:]]
        assert freed
        assert {slots[slot][2] for slot in freed} == {str(worker)}
    sends = [[x for x in shown[w].splitlines() if x.startswith("SEND")] for w in WORKERS]
    assert sends[0] == sends[1]  # each has both workers as its ends
    assert len(sends[0]) >= 4  # an activation and its gradient in each of two microbatches


def test_of_a_run(printed, tmp_path, capsys):
    assert main([str(planned(tmp_path))]) == 0
    assert capsys.readouterr().out == printed


def test_files_and_hlo(tmp_path, capsys):
    out = tmp_path / "dump"
    assert main([*WORDS, "--hlo", "--out", str(out)]) == 0
    files = sorted(out.iterdir())
    assert capsys.readouterr().out.splitlines() == [str(path) for path in files]
    assert [file.stem[3:] for file in files[:9]] == [*NAMES, *WORKERS]
    programs = {file.stem[3:]: file.read_text() for file in files[9:]}
    assert "hlo_of_stage.0.forward" in programs
    assert all(text.startswith("HloModule") for text in programs.values())


def test_errors_are_one_line(tmp_path, capsys):
    def refused(*words):
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.splitlines()
        return line.removeprefix("launcher: ")

    assert refused("outputs/none") == (
        "outputs/none is not a run's folder: it has no config.yaml. "
        "Name one such as outputs/<run id>, or give settings as key=value."
    )
    assert refused("modle=mlp").startswith("modle is not a setting")
    assert refused("--hol").startswith("The command line is wrong: unrecognized arguments: --hol.")

    folder = planned(tmp_path)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["model"]["hidden_size"] = 32
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "was made for another program" in refused(str(folder))
    (folder / "plan.json").unlink()
    assert "plan.json cannot be read as a plan" in refused(str(folder))
