"""What depends on a switch is refused while that is off, but not what a file says below it."""

import ast
import functools
import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.config.compose import load, to_dict
from launcher.config.environment import below
from launcher.config.errors import ConfigError
from launcher.config.overrides import parse
from launcher.config.reader import setting_keys
from launcher.config.schema import Config, read_by
from launcher.config.sections import TASKS
from launcher.config.sources import OF_PROGRAM, Origin, refuse_unread
from launcher.driver.tasks import task as tasks

CLI = "(on the command line)"
MLP = "model=mlp dataset=synthetic model.widths=[8,8]"
# Of each switch what depends on it, said while it is off, and how the refusal begins.
REFUSED = [
    ("train.eval_every=0 train.eval_batches=4", "train.eval_batches"),
    ("task=export run.id=r export.dtype=bfloat16", "export.dtype"),
    ("train.eval_every=0 train.eval_batches=8", "train.eval_batches"),  # the default
    ("train.checkpoint.every_minutes=0 train.checkpoint.keep=3", "train.checkpoint.keep"),
    (
        "train.checkpoint.every_minutes=0 train.checkpoint.on_error=stop",
        "train.checkpoint.on_error",
    ),
    (
        "optimizer.decay=constant optimizer.final_learning_rate=1e-5",
        "optimizer.final_learning_rate",
    ),
    (f"{MLP} model.hidden_size=8", "model.hidden_size"),
    (f"{MLP} model.num_layers=2", "model.num_layers"),
    (f"dataset=text dataset.path={__file__} dataset.pattern=*.py", "dataset.pattern"),
    ("dataset=synthetic dataset.targets=linear", "dataset.targets"),
    *(
        (f"wandb.mode=disabled wandb.{word}", f"wandb.{word.partition('=')[0]}")
        for word in ("project=p", "entity=e", "group=g", "name=n", "tags=[t]")
    ),
    ("export.step=3", "export.step"),
    ("export.path=x.npz", "export.path"),
    ("tokenize.vocab_size=300", "tokenize.vocab_size"),
    ("plan.compile=true", "plan.compile"),
    ("task=plan plan.advise=true", "plan.advise"),
    ("task=plan cluster=a100_8 parallel.verify=compile plan.advise=true", "plan.advise"),
    ("dataset=tokens dataset.path=a.bin dataset.end_token=3", "dataset.end_token"),
    (
        "dataset=tokens dataset.path=a dataset.validation_path=b dataset.validation_fraction=0.1",
        "dataset.validation_fraction",
    ),
    ("dataset=tokens dataset.path=a dataset.cache_gib=3", "dataset.cache_gib"),
    ("optimizer.decay_fraction=0.2", "optimizer.decay_fraction"),
    ("optimizer.restarts=2", "optimizer.restarts"),
    ("optimizer.lora.alpha=2", "optimizer.lora.alpha"),
    ("evaluate.step=3", "evaluate.step"),
    ("train.eval_every=0 prompt=x", "prompt"),
    ("train.sample_every=0 generate.seed=1", "generate.seed"),
    ("generate.prompts=x", "generate.prompts"),
    ("task=generate run.id=r generate.prompts=f prompt=x", "prompt"),
    ("task=generate run.id=r generate.temperature=0 generate.top_k=3", "generate.top_k"),
    ("sweep.dir=multirun/x", "sweep.dir"),
    ("sweep.jobs=2", "sweep.jobs"),
    ("task=export run.id=r run.fork=a@7", "run.fork"),
    ("run.fork=a@7 train.init_from=b", "run.fork"),
    ("run.fork=a@7 run.id=r run.resume=must", "run.fork"),
    ("sweep.objective=mfu", "sweep.objective"),
    (
        "cluster=a100_8 cluster.links.inter_host_gb_per_second=3",
        "cluster.links.inter_host_gb_per_second",
    ),
    ("cluster=slurm cluster.slurm.container.mounts=[/a:/b]", "cluster.slurm.container.mounts"),
    ("cluster=slurm cluster.slurm.container.workdir=/a", "cluster.slurm.container.workdir"),
    ("cluster=slurm cluster.slurm.emulated=true cluster.slurm.gres=gpu:8", "cluster.slurm.gres"),
]


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(("words", "key"), REFUSED, ids=lambda text: text.rpartition(" ")[2])
def test_what_has_no_effect_is_refused(words, key):
    with pytest.raises(
        ConfigError, match=rf"^{key}\S* has no effect: .* \(on the command line\)\."
    ):
        load(words.split())


def test_every_switch_is_tried():
    kinds = [field.metadata.get("variants") for field in fields(Config)]
    sections = [type(section) for section in vars(Config()).values()]
    classes = (*sections, *(one for kind in kinds if kind for one in kind.classes.values()))
    switches = [switch for one in classes for switch in getattr(one, "switches", ())]
    assert switches
    for switch in switches:
        assert any(key.startswith(switch.keys) for _, key in REFUSED), switch.keys


def test_the_whole_line():
    with pytest.raises(ConfigError) as caught:
        load(["wandb.mode=disabled", "wandb.tags=[a]"])
    assert str(caught.value) == (
        f"wandb.tags has no effect: wandb.mode=disabled records nothing there {CLI}. "
        "Leave it out, or use another wandb.mode."
    )


def test_what_a_recipe_says_below_the_switch_is_passed_over(mine):
    load(["recipe=smoke", "train.eval_every=0"])
    folder = mine("train: {eval_batches: 4}\nwandb: {project: p}")
    assert load(["recipe=mine"], folder).train.eval_batches == 4
    config = load(["recipe=mine", "train.eval_every=0", "wandb.mode=disabled"], folder)
    assert config.train.eval_every == 0


def test_a_file_that_contradicts_itself_is_refused(mine):
    folder = mine("train:\n  eval_every: 0\n  eval_batches: 4")
    with pytest.raises(ConfigError, match=r"eval_batches has no effect: .*mine\.yaml:4\)"):
        load(["recipe=mine"], folder)


def test_defaults_that_a_file_writes_out_are_no_contradiction(mine):
    folder = mine("train: {eval_every: 0, eval_batches: 8}\nsweep: {dir: null}")
    assert load(["recipe=mine"], folder).train.eval_every == 0


def run_of(folder, *words):
    """A run's settings, as its folder has them."""
    settings = load([*words, "run.id=r", f"run.dir={folder}"])
    (folder / "r").mkdir(exist_ok=True)
    (folder / "r" / "config.yaml").write_text(yaml.safe_dump(to_dict(settings)))
    return settings


EACH = functools.cache(lambda: parse([f"{key}=another" for key in setting_keys()]))


@pytest.mark.parametrize("task", [name for name, reads in TASKS.items() if reads is not None])
def test_a_task_refuses_each_setting_that_it_does_not_read(task):
    reads = read_by(task)
    assert all(below(key, (*setting_keys(), *vars(Config()))) for key in reads)
    for override in EACH():
        key, origin = override.key_or_group, Origin([], [override], ())
        tree = OmegaConf.create({"run": {"id": "r", "dir": "none"}})
        OmegaConf.update(tree, key, "another", force_add=True)
        tree = {**OmegaConf.to_container(tree), "task": task}
        if below(key, reads):
            refuse_unread(tree, origin)
            continue
        with pytest.raises(ConfigError, match=rf"^{key} has no effect: task={task} .* Leave it"):
            refuse_unread(tree, origin)


def settings_in(cls):
    """The settings that the methods and functions of a class's module read from `config`."""
    for node in ast.walk(ast.parse(Path(inspect.getsourcefile(cls)).read_text())):
        if isinstance(node, ast.Attribute):
            key = ast.unparse(node).removeprefix("config.")
            if f"config.{key}" == ast.unparse(node) and key.partition(".")[0] in vars(Config()):
                yield key


TAKEN = {  # of the run's settings, composed below those that are read
    "evaluate": OF_PROGRAM,
    "generate": (*OF_PROGRAM, "parallel"),  # a stand-in: the run's plan places the model
    "tokenize": ("prepare",),  # of the other task in its module
}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_what_a_task_reads_is_what_its_code_reads(name):
    cls, reads = tasks.task_named(name), read_by(name)
    assert not (issubclass(cls, tasks.CheckpointTask) and reads is None), "say what it reads"
    for key in settings_in(cls) if reads is not None else ():
        known = (*reads, *TAKEN.get(name, ()))
        assert below(key, known) or any(below(one, (key,)) for one in reads), key


@pytest.mark.parametrize("task", ["export", "generate", "evaluate"])
def test_the_command_of_a_run_serves_other_tasks(task, tmp_path, mine):
    words = ["recipe=smoke", "model.num_layers=3", "train.precision=bf16", "parallel.remat=none"]
    theirs = run_of(tmp_path, *words)
    asked = [f"task={task}", "run.id=r", f"run.dir={tmp_path}"]
    same = ["train.checkpoint.every_minutes=auto", "optimizer.clip_norm=1"]  # 1.0
    assert load([*words, *asked, *same]).task == task
    assert task == "export" or load(asked).model == theirs.model
    assert load([*asked, "report=none"]).task == task  # as it is
    folder = mine("model: {name: gpt, size: nano, num_layers: 7}\nwandb: {project: p}")
    assert task == "export" or load(["recipe=mine", *asked], folder).model == theirs.model
    for word, where in {
        "model.num_layers=6": "uses the run's, 3",
        "parallel=zero3": "uses the run's, 'manual'",
        "model=mlp": "uses the run's, 'gpt'",
        "report.timeline_steps=[1]": "does not read it",
        "report=tensorboard": "does not read it",
    }.items():
        with pytest.raises(ConfigError, match=rf"task={task} {where} \(on the command line\)\. L"):
            load([*words, *asked, word])
    in_file = f"task: {task}\nrun: {{id: r, dir: {tmp_path}}}\ntrain: {{precision: fp32}}"
    folder = mine(in_file)
    if task != "evaluate":
        with pytest.raises(ConfigError, match=r"train\.precision has no effect: .*mine\.yaml:4\)"):
            load(["recipe=mine"], folder)
