"""Settings drawn at random, right ones, wrong ones and rubbish: `task=check` and `task=plan` answer
with 0, 1 or 2, in one line where it is not 0, soon. A slice by default, all with `-m stress`."""

import random
import signal
import sys
from pathlib import Path

import pytest
import yaml

from launcher.__main__ import main
from launcher.config.fields import settings_of
from launcher.config.parallel import METHODS
from launcher.config.schema import Config

sys.path.insert(0, str(Path(__file__).parent))
from test_bad_inputs import WRONG, settings

SECONDS = 30  # that no answer may take
ALL = list(settings())
RUBBISH = (
    "", "=", "a", "a=", "=a", "a==b", "~a", "+a=1", "++model=2", "a.b.c=1", "model=[", "model={a:",
    "train.steps=${train.steps}", "train.steps=${nothing}", "train.steps=${oc.env:NOTHING}",
    "train.steps=${oc.decode:'['}", "train.steps=", "run.id=../../x", "run.id=a/b", "run.id='a b'",
    "run.id=" + "x" * 300, "run.dir=" + "x" * 5000, "\0", "é=1", "model=gpt model=mlp", "-x", "--y",
    "train.steps=" + "9" * 5000, "train.steps=" + "[" * 300 + "]" * 300,
    "model.options=" + "{a:" * 200 + "1" + "}" * 200, "wandb.name='\x1b[31m'", "wandb.name=\"\\n\"",
    "model@x=gpt", "hydra.run.dir=x", "recipe=null", "model=", "run.seed=1e400", "run.seed=0x7",
    "a=" + "(" * 200, "train.steps=range(1,3)", "train.steps=1,2", "train.steps=choice(1,2)",
    "train={}", "train=null", "model={}", "model.name=", "parallel.method=???", "task=???",
)  # fmt: skip
OPTIONS = {
    "model": ["gpt", "mlp", "custom", "gtp"],
    "dataset": ["stdlib_text", "text", "synthetic", "custom"],
    "optimizer": ["adamw", "adam", "sgd", "lion", "adafactor", "muon"],
    "parallel": list(METHODS),
    "cluster": ["local", "emulated", "slurm", "h100_8", "p3_16xlarge_x8"],
    "recipe": ["quickstart", "smoke", "gpt_text", "ddp_tutorial", "pipeshard_tutorial"],
}


def value(setting, draw):
    """A value for a setting: mostly of its kind, else of any."""
    least = setting.metadata.get("minimum") or 0
    of_kind = {
        int: [least, least + 1, 2, 3, 4, 8, 64, 1000, 2**31 - 1],
        float: [least, 1e-3, 0.5, 1, 2.0, 1e30],
        bool: [True, False],
        str: ["x", "gpt", "4h", "a/b", "a-b", "auto", "None", "é"],
        list: [[], [1], ["a", "b"], ["x"] * 50],
        dict: [{}, {"a": 1}, {"a": {"b": [1, 2]}}],
    }[setting.kind]
    if (choices := setting.metadata.get("choices")) and draw.random() < 0.8:
        return draw.choice([*choices])
    anything = [one for values in WRONG.values() for one in values]
    wrong = WRONG[setting.kind]
    return draw.choice(draw.choice([of_kind, of_kind, of_kind, wrong, anything, [None]]))


def word(key, said):
    text = yaml.safe_dump(said, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
    return f"{key}={text}"


def check_words(draw):
    """A command line of groups, settings and rubbish."""
    words = [f"{g}={draw.choice(o)}" for g, o in OPTIONS.items() if draw.random() < 0.25]
    for setting in draw.sample(ALL, draw.choice([0, 1, 1, 2, 3, 6])):
        words.append(word(setting.key, value(setting, draw)))
    if draw.random() < 0.25:
        words.append(draw.choice(RUBBISH))
    if words and draw.random() < 0.1:  # a slip of the finger
        at = draw.randrange(len(words))
        spot = draw.randrange(len(words[at]) + 1)
        words[at] = words[at][:spot] + draw.choice("[]{}$'\"\\,=. x0") + words[at][spot:]
    draw.shuffle(words)
    return words


def frozen_tree(draw):
    """Settings for a file, nested as the schema is."""
    tree = {}
    for setting in draw.sample(ALL, draw.choice([1, 2, 4, 10])):
        place = tree
        *sections, name = setting.key.split(".")
        for section in sections:
            inner = place.setdefault(section, {})
            place = inner if isinstance(inner, dict) else {}
        place[name] = value(setting, draw)
    return tree


def plan_words(draw):
    """A small model by any method on any devices; most of them fit together."""
    words = draw.choice([
        ["model=mlp", "dataset=synthetic", f"model.num_layers={draw.choice([1, 2, 4, 5])}",
         f"model.hidden_size={draw.choice([1, 8, 30, 64])}"],
        ["dataset=synthetic", "model.size=null", "model.vocab_size=32", "model.sequence_length=8",
         f"model.num_layers={draw.choice([1, 2, 4])}", "model.hidden_size=16", "model.num_heads=2"],
    ])  # fmt: skip
    methods = "data", "parameter_server", "zero2", "zero3", "shard", "three_d"
    method = draw.choice(["auto", "manual", *methods, "manual"])
    words += [f"parallel={method}", f"cluster={draw.choice(['emulated', 'emulated', 'h100_8'])}"]
    may = {
        "cluster.gpus": [1, 2, 3, 4, 8],
        "cluster.hosts": [1, 2, 3],
        "train.global_batch_size": [1, 2, 6, 8, 24],
        "train.precision": ["fp32", "bf16"],
        "train.eval_every": [0, 5],
        "parallel.num_micro_batches": [1, 2, 3, 8],
        "parallel.num_stages": [1, 2, 3, 9],
        "parallel.num_layers": [1, 2, 3, 50],
        "parallel.schedule": ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble"],
        "parallel.remat": ["none", "full", "dots_saveable", "full/2", "selective:1", "full/9"],
        "parallel.data": [1, 2, 4],
        "parallel.model": [1, 2, 3],
        "parallel.pipeline": [1, 2],
        "optimizer.clip_norm": ["null", 1.0],
    }
    for key in draw.sample(list(may), draw.choice([0, 1, 2, 3, 4])):
        words.append(f"{key}={draw.choice(may[key])}")
    return words


@pytest.fixture
def answered(tmp_path, monkeypatch, capsys):
    """Gives a command line, returns what is wrong with the answer."""
    monkeypatch.chdir(tmp_path)

    def ask(words):
        capsys.readouterr()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(SECONDS)
        try:
            code = main(words)
        except SystemExit as error:
            return [f"{words}: SystemExit {error.code}"]
        except BaseException as error:
            return [f"{words}: {type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        err = capsys.readouterr().err
        fine = code == 0 and not err
        fine |= code in (1, 2) and err.startswith("launcher: ") and len(err.splitlines()) == 1
        return [] if fine else [f"{words}: exit code {code}, {err!r}"]

    return ask


def sliced(count, default, size):
    """Seeds in slices: the first by default, the others by hand."""
    others = range(default, count, size)
    by_hand = [range(n, min(n + size, count)) for n in others]
    return [range(default), *(pytest.param(seeds, marks=pytest.mark.stress) for seeds in by_hand)]


def name(seeds):
    return f"{seeds[0]}-{seeds[-1]}"


@pytest.mark.parametrize("seeds", sliced(500, 8, 97), ids=name)
def test_checking(seeds, answered, tmp_path):
    faults, file = [], tmp_path / "config.yaml"
    for seed in seeds:
        draw = random.Random(seed)
        faults += answered([*check_words(draw), "task=check"])
        file.write_text(yaml.safe_dump({**frozen_tree(draw), "task": "check"}))
        faults += answered(["--frozen", str(file)])
    assert not faults, "\n".join(faults)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("seeds", sliced(100, 1, 25), ids=name)
def test_planning(seeds, answered):
    faults = []
    for seed in seeds:
        faults += answered([*plan_words(random.Random(seed)), "task=plan"])
    assert not faults, "\n".join(faults)


def test_every_section_is_drawn_from():
    assert len(ALL) > 100
    drawn = {setting.key.partition(".")[0] for setting in ALL}
    assert drawn == {field.name for field in settings_of(Config)}
