"""What depends on a switch is refused while that is off, but not what a file says below it."""

from dataclasses import fields

import pytest

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.schema import Config

CLI = "(on the command line)"
MLP = "model=mlp dataset=synthetic model.widths=[8,8]"
# Of each switch what depends on it, said while it is off, and how the refusal begins.
REFUSED = [
    ("train.eval_every=0 train.eval_batches=4", "train.eval_batches"),
    ("task=export run.id=r export.dtype=bfloat16", "export.dtype"),
    ("train.eval_every=0 train.eval_batches=8", "train.eval_batches"),  # the default
    ("train.checkpoint.every_steps=5 train.checkpoint.keep=3", "train.checkpoint.keep"),
    ("train.checkpoint.on_error=stop", "train.checkpoint.on_error"),
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
    ("task=plan prepare.processes=3", "prepare.processes"),
    ("tokenize.vocab_size=300", "tokenize.vocab_size"),
    ("dataset=tokens dataset.path=a.bin dataset.end_token=3", "dataset.end_token"),
    (
        "dataset=tokens dataset.path=a dataset.validation_path=b dataset.validation_fraction=0.1",
        "dataset.validation_fraction",
    ),
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


@pytest.mark.sampled(4)
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
