"""Broken command lines, drawn from a seed: typos, wrong values, contradictions, wrong files."""

import random
from pathlib import Path

from launcher.cli import remedy
from launcher.config.folders import CONF, find_groups
from launcher.config.reader import setting_keys

GROUPS = {
    group: options
    for group, options in find_groups([CONF]).items()
    if group in ("model", "dataset", "optimizer", "parallel", "cluster", "recipe", "report")
}
CHOICES = {
    "train.precision": "bf16",
    "train.non_finite": "rollback",
    "train.spikes": "skip",
    "parallel.schedule": "interleaved_1f1b",
    "parallel.remat": "selective",
    "parallel.cost": "model",
    "parallel.reduce_dtype": "bf16",
    "wandb.mode": "offline",
    "train.checkpoint.on_error": "stop",
    "model.attention": "cudnn",
    "model.size": "nano",
    "sweep.objective": "eval_loss",
}
NUMBERS = {
    "train.steps": 100,
    "train.global_batch_size": 64,
    "train.log_every": 5,
    "train.eval_every": 20,
    "model.num_layers": 6,
    "model.hidden_size": 128,
    "model.sequence_length": 64,
    "optimizer.warmup_steps": 10,
    "optimizer.learning_rate": 0.001,
    "optimizer.weight_decay": 0.1,
    "cluster.max_restarts": 2,
    "parallel.num_micro_batches": 4,
    "generate.temperature": 0.5,
}
NEED_NO_DATA = ("stdlib_text", "synthetic", "digits")


def typo(rng, word):
    """A slip of a finger: two letters swapped, one left out, doubled or another."""
    at = rng.randrange(1, len(word) - 1) if len(word) > 2 else 0
    slips = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + rng.choice("aeiost") + word[at + 1 :],
        word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :],
    ]
    return rng.choice([slip for slip in slips if slip != word] or [word + word[-1]])


def option(rng, home):
    group = rng.choice(["model", "dataset", "optimizer", "parallel", "cluster", "recipe", "report"])
    options = [o for o in GROUPS[group] if o not in ("custom", "replay", "ray", "slurm")]
    if group == "dataset":
        options = NEED_NO_DATA
    return [f"{group}={typo(rng, rng.choice(list(options)))}"]


def group_name(rng, home):
    return [f"{typo(rng, rng.choice(['model', 'optimizer', 'parallel', 'cluster']))}=auto"]


def key(rng, home):
    name, value = rng.choice(list(NUMBERS.items()))
    section, _, last = name.rpartition(".")
    return [f"{section}.{typo(rng, last)}={value}"]


def section(rng, home):
    name, value = rng.choice(list(NUMBERS.items()))
    first, _, rest = name.partition(".")
    return [f"{typo(rng, first)}.{rest}={value}"]


def misplaced(rng, home):
    names = [name for name in setting_keys() if name.count(".") == 1]
    name = rng.choice([name for name in names if not remedy._PROTECTED.search(name)])
    value = NUMBERS.get(name, 1)
    return [f"{name.partition('.')[2]}={value}"]


def word_of_choice(rng, home):
    name, value = rng.choice(list(CHOICES.items()))
    return [f"{name}={typo(rng, value)}"]


def no_choice(rng, home):
    return [f"{rng.choice(list(CHOICES))}={rng.choice(['fast', 'best', '17', 'x_y', 'true'])}"]


def kind_of_value(rng, home):
    wrong = ["abc", "true", "[1,2]", "{a:1}", "1.5.2", "12x", "'ten'", "1e", "null", "12%"]
    return [f"{rng.choice(list(NUMBERS))}={rng.choice(wrong)}"]


def flag(rng, home):
    names = ("train.deterministic", "model.scan_layers", "train.checkpoint.at_end", "run.shared")
    return [f"{rng.choice(names)}={rng.choice(['ture', 'flase', '1', '0', 'yse', '3', 'maybe'])}"]


def as_list(rng, home):
    wrong = ["wandb.tags=fast", "report.trackers=tensorboardx", "report.trackers=[wandbb]"]
    wrong += ["report.timeline_steps=3", "report.timeline_steps=[0]", "wandb.tags=[1,2]"]
    return [rng.choice(wrong)]


def out_of_range(rng, home):
    name = rng.choice([name for name in NUMBERS if name != "optimizer.learning_rate"])
    return [f"{name}={rng.choice([-1, -20, 99999999999])}"]


def does_not_divide(rng, home):
    number = rng.choice([7, 13, 30, 33, 50])
    return rng.choice(
        [
            [f"train.global_batch_size={number}", "parallel=manual"],
            ["train.global_batch_size=32", f"parallel.num_micro_batches={number}"],
            [f"model.hidden_size={number * 2 + 1}"],
            [f"model.num_heads={number}"],
            ["parallel=data", f"train.global_batch_size={number}", "cluster=h100_8"],
            ["cluster=emulated", f"cluster.gpus={number}", "cluster.hosts=4"],
        ]
    )


def shape(rng, home):
    return rng.choice(
        [
            ["cluster.hosts=2"],
            ["cluster=emulated", "cluster.gpus=4", "cluster.hosts=3"],
            ["cluster=emulated", "cluster.gpus=4", "parallel=three_d", "parallel.model=3"],
            ["cluster=emulated", "cluster.gpus=2", "parallel.num_stages=4"],
            ["parallel.num_stages=9"],
            ["parallel=shard", "parallel.data=3", "parallel.model=2", "cluster.gpus=4"],
            ["cluster=h100_8", "cluster.gpus=12", "parallel=zero3"],
            ["cluster=slurm", "cluster.gpus=null"],
            ["cluster=emulated", "cluster.transport=collective"],
            ["cluster.gpus=5000"],
            ["cluster=h100_8_x16", "cluster.hosts=3"],
        ]
    )


def contradiction(rng, home):
    return rng.choice(
        [
            ["model=mlp", "dataset=stdlib_text"],
            ["model=gpt", "dataset=digits"],
            ["parallel=data", "parallel.schedule=1f1b"],
            ["parallel=zero2", "parallel.num_stages=2"],
            ["optimizer=sgd", "optimizer.b1=0.9"],
            ["optimizer.learning_rate=1e-4", "optimizer.final_learning_rate=1e-3"],
            ["train.eval_every=0", "train.keep_best=eval_loss"],
            ["train.keep_best=loss"],
            ["wandb.mode=disabled", "wandb.project=x"],
            ["report.trackers=[]", "wandb.project=x"],
            ["generate.temperature=0", "generate.top_k=3"],
            ["export.dtype=bfloat16"],
            ["plan.compile=true"],
            ["cluster.max_restarts=0", "train.non_finite=rollback"],
            ["model.vocab_size=100"],
            ["optimizer.clip_norm=0"],
            ["optimizer.ema=1"],
            ["report.trackers=[wandb,wandb]"],
            ["train.checkpoint.every_minutes=0", "train.checkpoint.keep=3"],
            ["cluster=slurm", "cluster.slurm.gres=gpu:8", "cluster.slurm.gpu_type=a100"],
            ["cluster=slurm", "cluster.slurm.time=12:30:00"],
            ["model=moe", "model.experts_per_token=99"],
            ["train.checkpoint={at_end:false,every_stepz:3}"],
        ]
    )


def grammar(rng, home):
    return rng.choice(
        [
            ["train.steps:100"],
            ["--train.steps=100"],
            ["--train.steps", "100"],
            ["train.steps", "=", "100"],
            ["train.steps", "100"],
            ["train.steps =100"],
            ["train.steps= 100"],
            ["train.steps==100"],
            ["wandb.tags=[a,b"],
            ["wandb.name=(x"],
            ["train.steps=010"],
            ["~train.steps"],
            ["model@x=mlp"],
            ["hydra.run.dir=here"],
            ["+hydra/launcher=basic"],
            ["=3"],
            ["train.steps=100,"],
            ["-train.steps=100"],
            ["--multi-run", "train.steps=1,2"],
        ]
    )


def sweep(rng, home):
    return rng.choice(
        [
            ["train.steps=1,2"],
            ["-m", "train.steps=range(1,)"],
            ["-m", "train.stepz=1,2"],
            ["-m", "hydra/sweeper=basik", "train.steps=1,2"],
            ["-m", "parallel.num_micro_batches=2,5"],
            ["-m", "train.steps=interval(1,3)"],
            ["-m", "hydra.sweeper.max_batch_sise=3", "train.steps=1,2"],
            ["sweep.jobs=2"],
            ["-m", "sweep.jobs=0", "train.steps=1,2"],
            ["-m", "train.precision=fp32,bf61"],
            ["-m", "run.id=a,b"],
        ]
    )


def file(rng, home):
    text = rng.choice(
        [
            "train: {steps: 0}\n",
            "train:\n  steps: abc\n",
            "train: {precision: bf61}\n",
            "parallel: {num_micro_batches: 5}\n",
            "defaults:\n  - override /model: gtp\n",
            "wandb: {project: 12}\n",
            "wandb: {mode: disabled, project: x}\n",
            "model: {hidden_size: 130}\n",
            "optimizer: {learning_rate: fast}\n",
            "train: {checkpoint: {keep: 0}}\n",
            "report: {trackers: [wandbb]}\n",
            "cluster: {gpus: 5000}\n",
        ]
    )
    recipe = Path(home, "my_conf", "recipe", "mine.yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(f"# @package _global_\n{text}")
    return ["--config-dir", "my_conf", "recipe=mine"]


def folder(rng, home):
    Path(home, "my_conf").mkdir(exist_ok=True)
    return ["--config-dir", "my_cnof"]


KINDS = (
    *(option, option, group_name, key, key, section, misplaced, word_of_choice, no_choice),
    *(kind_of_value, kind_of_value, flag, as_list, out_of_range, does_not_divide, shape, shape),
    *(contradiction, contradiction, grammar, grammar, sweep, file, file, folder),
)


def broken(seed, home):
    """The words of a broken command line; its files are written into `home`."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    others = rng.choice([[], ["train.log_every=2"], ["run.seed=7", "wandb.mode=offline"]])
    words = kind(rng, home)
    keys = {word.partition("=")[0] for word in words}
    return [*words, *(word for word in others if word.partition("=")[0] not in keys)]
