"""Every wrong setting gets one line that says what is wrong, where it was said and what to do."""

import pytest

from launcher.__main__ import main
from launcher.config import compose
from launcher.config.folders import CONF

CLI = "(on the command line)"
MODELS = "bert, custom, gpt, llama, mlp, moe, resnet, toy, unet, vit, wide_resnet"
MOST = 2**31 - 1
MINE = "(in my_conf/recipe/mine.yaml:"
PLACED = "Runs are placed by run.dir and run.id; sweeps are asked for with -m."
DIGITS = "Write numbers with decimal digits, and without a 0 in front."

COMMAND_LINES = [
    # Names that do not exist.
    ("train.stepz=3", f"train.stepz is not a setting {CLI}. Did you mean train.steps?"),
    ("steps=3", f"steps is not a setting {CLI}. Did you mean train.steps?"),
    ("modle=gpt", f"modle is not a setting {CLI}. Did you mean model?"),
    (
        "wandb.colour=red",
        f"wandb.colour is not a setting {CLI}. "
        "wandb has: mode, project, entity, group, name, tags.",
    ),
    (
        "dataset.path=/data",
        f"dataset.path is not a setting of dataset=stdlib_text {CLI}. It belongs to "
        "dataset=arrays, documents, pictures, text or tokens.",
    ),
    # Options and sizes that do not exist.
    ("model=gtp", f"There is no model=gtp {CLI}. Did you mean gpt?"),
    ("model=xlstm", f"There is no model=xlstm {CLI}. Options of model: {MODELS}."),
    ("model=null", f"There is no model=null {CLI}. Options of model: {MODELS}."),
    ("model.size=nan", f"There is no model.size=nan {CLI}. Did you mean nano?"),
    (
        "model.name=mamba",
        "model.name must be one of bert, gpt, llama, mlp, moe, resnet, toy, unet, vit, "
        f"wide_resnet, custom, not 'mamba' {CLI}. "
        "Choose one with model=OPTION.",
    ),
    # Wrong types.
    ("train.steps=abc", f"train.steps must be a whole number, not 'abc' {CLI}."),
    ("train.steps=true", f"train.steps must be a whole number, not true {CLI}."),
    ("train.steps.x=3", f"train.steps must be a whole number, not {{'x': 3}} {CLI}."),
    ("model.tie_embeddings=1", f"model.tie_embeddings must be true or false, not 1 {CLI}."),
    ("wandb.tags=fast", f"wandb.tags must be a list, not 'fast' {CLI}."),
    (
        "wandb.tags=[fast,3]",
        f"wandb.tags must be text, but the unquoted value is read as 3 {CLI}. Put it in quotes.",
    ),
    (
        "train=3",
        f"train must be a section of settings, not 3 {CLI}. train has: steps, global_batch_size, "
        "precision, deterministic, dry_steps, log_every, eval_every, eval_batches, sample_every, "
        "check_replicas_every, non_finite, spikes, init_from, keep_best, stop_early, snapshot, "
        "checkpoint.",
    ),
    # Bad choices and values out of bounds.
    (
        "optimizer.name=[a]",
        "optimizer.name must be one of adamw, adam, sgd, lion, adafactor, muon, custom, not ['a'] "
        f"{CLI}. Choose one with optimizer=OPTION.",
    ),
    (
        "parallel.schedule=1fb1",
        "parallel.schedule must be one of auto, gpipe, 1f1b, eager_1f1b, interleaved_1f1b, "
        f"zero_bubble, not '1fb1' {CLI}. Did you mean 1f1b?",
    ),
    (
        "train.precision=int4",
        f"train.precision must be one of fp32, bf16, not 'int4' {CLI}.",
    ),
    ("train.steps=0", f"train.steps must be at least 1, not 0 {CLI}."),
    (
        "model.vocab_size=99999999999",
        f"model.vocab_size must be at most {MOST}, not 99999999999 {CLI}.",
    ),
    (
        "model=mlp dataset=synthetic model.widths=[8,0]",
        f"model.widths must be at least 1, not 0 {CLI}.",
    ),
    ("run.dir=''", f"run.dir is empty {CLI}. Give it a value, or leave it out."),
    (
        "train.steps=010",
        f"train.steps=010 has a 0 in front of a number {CLI}. "
        "Write numbers with decimal digits; text goes in quotes.",
    ),
    (
        "train.steps=1:30",
        f"train.steps must be a whole number, not '1:30' {CLI}.",
    ),
    # One option a group, by its name.
    (
        "optimizer=[adam,sgd]",
        f"optimizer=[adam,sgd] is not the name of one option {CLI}. "
        "optimizer has: adafactor, adam, adamw, custom, lion, muon, sgd.",
    ),
    (
        "model=../model/gpt",
        f"model=../model/gpt is not the name of one option {CLI}. model has: {MODELS}.",
    ),
    # Code that no one has allowed.
    (
        "dataset=custom dataset.module=my_pkg.data allow_modules=[my_pkg.da]",
        f"dataset.module=my_pkg.data is code that this run is not allowed to load {CLI}. "
        "If you trust it, add 'allow_modules=[my_pkg.da,my_pkg.data]' on the command line.",
    ),
    (
        "model=custom model.module=a-b",
        f"model.module='a-b' is not the name of a module {CLI}. "
        "Write it as import does, such as my_pkg.models.",
    ),
    # What the command line cannot mean.
    (
        "train.steps",
        f"'train.steps' cannot be read as key=value {CLI}. "
        "Settings are written key=value, for example train.steps=100.",
    ),
    (
        "wandb.name=(x",
        f"'wandb.name=(x' cannot be read as key=value {CLI}. "
        "Quote special characters, for example 'wandb.name=\"(x\"'",
    ),
    (
        "prompt=42",
        f"prompt must be text, but the unquoted value is read as 42 {CLI}. Put it in quotes.",
    ),
    ("=3", f"'=3' has no name before its = {CLI}. Write key=value."),
    (
        "train.steps=1,2",
        f"train.steps=1,2 gives several values to one run {CLI}. "
        "Add -m to run each of them, or write train.steps=[…] for a list.",
    ),
    (
        "~wandb.tags",
        f"~wandb.tags takes away a setting, but each has a value {CLI}. "
        "Set it instead, to null where it may be.",
    ),
    (
        "hydra.run.dir=here",
        f"hydra.run.dir is Hydra's own setting, which has no effect here {CLI}. "
        "Runs are placed by run.dir and run.id; sweeps are asked for with -m.",
    ),
    (
        "model@other=mlp",
        f"model@other=mlp puts a group into another section than its own {CLI}. "
        "Write model=OPTION.",
    ),
    (
        "wandb.name=${run.idd}",
        f"wandb.name: Interpolation key 'run.idd' not found {CLI}.",
    ),
    # Settings that do not go together.
    (  # Said with the value that another optimizer has by default.
        "optimizer=sgd optimizer.b1=0.9",
        f"optimizer.b1 is not a setting of optimizer=sgd {CLI}. "
        "It belongs to optimizer=adamw, adam, lion or muon.",
    ),
    (  # Only in `parallel` does null say nothing.
        "optimizer=sgd optimizer.b1=null",
        f"optimizer.b1 is not a setting of optimizer=sgd {CLI}. "
        "It belongs to optimizer=adamw, adam, lion or muon.",
    ),
    (
        "parallel=data parallel.schedule=1f1b",
        f"parallel.schedule is not a setting of parallel=data, which is one stage on all devices "
        f"{CLI}. It belongs to parallel=auto, manual or three_d.",
    ),
    (
        "parallel=replay parallel.plan=plan.json parallel.remat=full",
        f"parallel.remat is not a setting of parallel=replay, which takes it from the plan {CLI}. "
        "It belongs to parallel=auto, manual, data, parameter_server, zero2, zero3, shard or "
        "three_d.",
    ),
    (
        "cluster=ray cluster.address=ray://head:10001",
        f"cluster.address=ray://head:10001 is not a usable address {CLI}. That is a Ray Client, "
        "which runs this program's calls in another process: run the launcher on one of its "
        'nodes and give "auto", or the host:port that `ray start` printed.',
    ),
    (
        "cluster=ray cluster.address=head",
        f'cluster.address=head is not a usable address {CLI}. Give "auto" for this machine\'s '
        "Ray cluster, or host:port as `ray start` printed it.",
    ),
    (
        "cluster=ray cluster.resources={GPU:1}",
        f"cluster.resources.GPU cannot be set here {CLI}. Use cluster.gpus.",
    ),
    (
        "cluster=ray cluster.resources={a:0}",
        f"cluster.resources.a=0 demands nothing {CLI}. Give an amount above 0, or leave it out.",
    ),
    (
        "task=calibrate cluster=slurm",
        "task=calibrate measures the devices that are here, and those of cluster=slurm are not "
        f"{CLI}. Run it on a node, with cluster=local.",
    ),
    (
        "--package train",
        "--package selects a part of what --cfg shows. Add --cfg job.",
    ),
    (
        "dataset=text",
        f"dataset.path is not set (in {CONF}/dataset/text.yaml:6). Give dataset.path=VALUE.",
    ),
    ("train.steps=???", f"train.steps is not set {CLI}. Give train.steps=VALUE."),
    (
        "parallel=manual train.global_batch_size=30",
        "train.global_batch_size=30 cannot be cut into parallel.num_micro_batches=4 equal "
        "microbatches (train.global_batch_size on the command line, "
        f"parallel.num_micro_batches in {CONF}/parallel/manual.yaml:9). "
        "Use train.global_batch_size=28 or 32.",
    ),
    (
        "parallel.num_layers=6 parallel.num_stages=8",
        f"parallel.num_stages=8 is more than parallel.num_layers=6 {CLI}. "
        "A stage is at least one layer: ask for fewer stages, or raise parallel.num_layers.",
    ),
    (
        "task=plan cluster=h100_8 parallel.cost=profile",
        "parallel.cost=profile measures devices, and those of cluster=h100_8 are not here "
        f"{CLI}. Use parallel.cost=model.",
    ),
    (
        "parallel.num_stages=8",
        f"parallel.num_stages=8 is more than the model's 4 layers {CLI}. "
        "A stage is at least one layer: ask for fewer stages, or raise model.num_layers.",
    ),
    (
        "cluster.gpus=2 parallel.num_stages=4",
        f"parallel.num_stages=4 is more than cluster.gpus=2 {CLI}. "
        "A stage needs a device of its own, except with parallel.schedule=interleaved_1f1b: "
        "ask for fewer stages or more devices.",
    ),
    (
        "parallel=zero2 parallel.num_stage=2",
        f"parallel.num_stage is not a setting of parallel=zero2 {CLI}. "
        "Did you mean parallel.num_stages, of parallel=auto or manual?",
    ),
    (
        "parallel.data=2",
        f"parallel.data is not a setting of parallel=auto {CLI}. "
        "It belongs to parallel=shard or three_d.",
    ),
    (
        "parallel.method=maual",
        "parallel.method must be one of auto, manual, data, parameter_server, zero2, zero3, shard, "
        f"three_d, replay, not 'maual' {CLI}. Choose one with parallel=OPTION.",
    ),
    (
        "parallel=data cluster.gpus=3 train.global_batch_size=32 parallel.num_micro_batches=2",
        "A microbatch of 16 samples (train.global_batch_size=32 / parallel.num_micro_batches=2) "
        f"cannot be shared evenly by cluster.gpus=3 devices {CLI}. "
        "Make train.global_batch_size a multiple of 6.",
    ),
    (
        "cluster=emulated cluster.gpus=4 cluster.hosts=3",
        f"cluster.gpus=4 cannot be shared evenly by cluster.hosts=3 hosts {CLI}. "
        "cluster.gpus is the total over all hosts: make it a multiple.",
    ),
    (
        "cluster.hosts=2",
        f"cluster=local is this one machine, not cluster.hosts=2 {CLI}. "
        "Use cluster=emulated to emulate several hosts on it.",
    ),
    (
        "cluster=emulated cluster.transport=collective",
        "cluster.transport=collective moves arrays between processes, and cluster.hosts=1 is one "
        f"(cluster.transport {CLI[1:-1]}, cluster.hosts in {CONF}/cluster/emulated.yaml:7). "
        "Leave it at auto.",
    ),
    (
        "task=plan cluster=h200_8_x8 cluster.transport=pull",
        "cluster.transport is not a setting of cluster.kind=described, which is only planned for "
        f"{CLI}. It belongs to cluster.kind=emulated, slurm or ray.",
    ),
    (
        "task=submit",
        f"task=submit submits to Slurm, not to cluster=local (task {CLI[1:-1]}, cluster.kind in "
        f"{CONF}/cluster/local.yaml:5). Use cluster=slurm.",
    ),
    (
        "task=sweep_status",
        f"task=sweep_status does not say which sweep {CLI}. Give sweep.dir=multirun/ID.",
    ),
    (
        "cluster=slurm cluster.gpus=null",
        "cluster.gpus is not set, and cluster=slurm must know how many to ask for "
        f"{CLI}. Give the number in total, over all nodes.",
    ),
    (
        "cluster=slurm cluster.slurm.time=12:30:00",
        f"cluster.slurm.time='12:30:00' cannot be understood {CLI}. "
        "Write days, hours and minutes, such as 2d12h, 4h or 90m.",
    ),
    (
        "cluster=slurm cluster.slurm.signal=B:USR1@60",
        f"cluster.slurm.signal='B:USR1@60' cannot be understood {CLI}. Write TERM, USR1 or USR2, "
        "@ and the seconds before the time limit, such as USR2@120.",
    ),
    (
        "cluster=slurm cluster.slurm.extra={nodes:x}",
        "cluster.slurm.extra.nodes cannot be set here (on the command line). Use cluster.hosts.",
    ),
    (
        "cluster=slurm cluster.slurm.mem=4G cluster.slurm.extra={mem-per-gpu:8G}",
        "cluster.slurm.mem=4G and cluster.slurm.extra.mem-per-gpu exclude each other "
        f"{CLI}. Leave one out.",
    ),
    (
        "cluster=slurm cluster.slurm.env={1A:b}",
        f"cluster.slurm.env: '1A' cannot name an environment variable {CLI}. "
        "Use letters, digits and '_'.",
    ),
    (
        "cluster=slurm cluster.slurm.gres=gpu:8 cluster.slurm.gpu_type=a100",
        "cluster.slurm.gres=gpu:8 and cluster.slurm.gpu_type=a100 both ask for GPUs "
        f"{CLI}. Leave one out.",
    ),
    (
        "model.hidden_size=130 model.num_heads=4",
        f"model.hidden_size=130 must be a multiple of model.num_heads=4 {CLI}.",
    ),
    (
        "model=mlp dataset=stdlib_text",
        f"model=mlp cannot learn from dataset=stdlib_text: it takes vectors, not text {CLI}. "
        "Use dataset=synthetic or model=gpt.",
    ),
    (
        "model=gpt dataset=digits",
        f"model=gpt cannot learn from dataset=digits: it takes text, not pictures {CLI}. "
        "Use dataset=synthetic or model=vit, resnet, wide_resnet or unet or model=mlp.",
    ),
    (
        "model.vocab_size=100",
        f"model.vocab_size=100 is too small for dataset=stdlib_text, which is bytes {CLI}. "
        "Make it at least 256.",
    ),
    (
        "optimizer.clip_norm=0",
        f"optimizer.clip_norm=0 would make every gradient zero {CLI}. Use null for no clipping.",
    ),
    (
        "optimizer.learning_rate=1e-4 optimizer.final_learning_rate=1e-3",
        "optimizer.final_learning_rate=0.001 is above optimizer.learning_rate=0.0001 "
        f"{CLI}. The rate decays from the second to the first.",
    ),
    (
        "run.id=a/b",
        f"run.id='a/b' cannot name a folder and a Weights & Biases run {CLI}. "
        "Use letters, digits, '.', '_' and '-'.",
    ),
    (
        f"run.id={'a' * 300}",
        f"run.id=aaaaaaaaaaaaaaaaaaaa… has 300 characters; a folder's name has at most 255 {CLI}. "
        "Choose a shorter one.",
    ),
    ("run.resume=must", f"run.resume=must does not say which run {CLI}. Give run.id=VALUE."),
    (
        "run.mirror=s3://bucket/a",
        "run.mirror does not know which run it copies, as each start has a new id "
        f"{CLI}. Give run.id=VALUE.",
    ),
    (
        "run.id=a run.mirror=/mnt/copies",
        f"run.mirror=/mnt/copies is no place in an object store {CLI}. Write s3://bucket/prefix or "
        "gs://bucket/prefix.",
    ),
    (
        "run.dir=s3://bucket/runs",
        f"run.dir=s3://bucket/runs is no folder {CLI}. Train in a folder, and for a copy of "
        "its checkpoints set run.mirror=s3://bucket/runs.",
    ),
    (
        "model.size=null",
        "model.num_layers is not set. Choose a model.size, or give model.num_layers=VALUE.",
    ),
    (
        "model.size=tiny +model.sizes.tiny={num_layer:3}",
        f"model.sizes.tiny.num_layer is not a dimension {CLI}. Did you mean num_layers?",
    ),
    (
        "--steps 3",
        "The command line is wrong: unrecognized arguments: --steps. "
        "Settings are written key=value, without dashes; --help shows the rest.",
    ),
    (
        "-m run.id=a,b",
        "run.id and run.dir cannot be swept. "
        "In a sweep run.id names the whole sweep; its runs are <run.id>-0, -1, ….",
    ),
    (
        "-m train.steps=interval(1,3)",
        f"train.steps=interval(1,3) cannot be listed value by value {CLI}. "
        "Write the values with commas, range(start,stop,step) or choice(a,b).",
    ),
    (
        "-m train.steps=range(1,9,0)",
        f"train.steps=range(1,9,0) cannot be listed value by value {CLI}. "
        "Write the values with commas, range(start,stop,step) or choice(a,b).",
    ),
    (
        "cluster=slurm cluster.slurm.time=2m cluster.slurm.signal=USR2@120",
        "cluster.slurm.time=2m is not above the 120 s before its end at which "
        f"cluster.slurm.signal=USR2@120 has the run save and end {CLI}. "
        "Give the job more time, or the signal fewer seconds.",
    ),
    (
        "-m parallel.num_micro_batches=2,5",
        "parallel.num_micro_batches=5: train.global_batch_size=32 cannot be cut into "
        "parallel.num_micro_batches=5 equal microbatches (train.global_batch_size in "
        f"{CONF}/config.yaml:45, parallel.num_micro_batches on the command line). "
        "Use train.global_batch_size=30 or 35.",
    ),
]

# What my_conf/recipe/mine.yaml says below its package line, and the message.
RECIPES = [
    (
        "wandb: {name: 12:30:00}\n",
        "wandb.name must be text, but the unquoted value is read as 45000 "
        f"{MINE}2). Put it in quotes.",
    ),
    (
        "run:\n  id: 1_000\n",
        f"run.id must be text, but the unquoted value is read as 1000 {MINE}3). Put it in quotes.",
    ),
    (
        "train:\n  seed: 1\n  stepz: 3\n",
        f"train.seed is not a setting {MINE}3). Did you mean run.seed?",
    ),
    (
        "defaults:\n  - override /model: gtp\n",
        "There is no model=gtp (in my_conf/recipe/mine.yaml). Did you mean gpt?",
    ),
    (
        "train:\n  steps: 3\n steps: 4\n",
        "my_conf/recipe/mine.yaml:4 is not YAML: expected <block end>, but found '<block "
        "mapping start>'.",
    ),
    (
        "train:\n  steps: 3\n  steps: 4\n",
        "my_conf/recipe/mine.yaml:4 is not YAML: found duplicate key steps.",
    ),
    (
        "wandb: &a {name: x, group: *a}\n",
        "my_conf/recipe/mine.yaml is nested too deeply. It must hold names and values.",
    ),
    (
        "wandb:\n  tags: {a: b}\n",
        f"wandb.tags must be a list, not a table {MINE}3).",
    ),
    (
        "train: [steps, 3]\n",
        f"train must be a table, not a list {MINE}2).",
    ),
    (
        "defaults: 3\n",
        "my_conf/recipe/mine.yaml has defaults that are not a list, such as [override /model: "
        "gpt]. It must hold names and values.",
    ),
    (
        "defaults: [3]\n",
        "my_conf/recipe/mine.yaml has defaults with an entry that is not 'group: option'. It "
        "must hold names and values.",
    ),
    (
        "defaults:\n  - override /dataset: null\n",
        f"dataset: null chooses nothing, and every run needs a dataset {MINE}3). Name an option, "
        "or leave the line out.",
    ),
    (
        "defaults:\n  - override /modle: gpt\n",
        "There is no group modle for 'override /modle' to choose from (in "
        "my_conf/recipe/mine.yaml). Did you mean model?",
    ),
    (
        "train: {steps: 3}\nhydra:\n  run: {dir: here}\n",
        f"hydra is Hydra's own section, of which only hydra.sweeper has an effect here {MINE}4). "
        f"{PLACED}",
    ),
    (
        "model: {name: custom, module: os}\nallow_modules:\n  - os\n",
        "allow_modules can be set only on the command line: a file that allows itself would "
        f"protect from nothing {MINE}4). Write allow_modules=[…] on the command line.",
    ),
    (
        "model: {name: custom, module: os}\n<<: {allow_modules: [os]}\n",
        "allow_modules can be set only on the command line: a file that allows itself would "
        f"protect from nothing {MINE}3). Write allow_modules=[…] on the command line.",
    ),
    (
        "<<: [{train: {steps: 3}}, {hydra: {run: {dir: here}}}]\n",
        f"hydra is Hydra's own section, of which only hydra.sweeper has an effect here {MINE}2). "
        f"{PLACED}",
    ),
    (
        "<<: {defaults: [override /hydra/launcher: basic]}\n",
        f"hydra is Hydra's own section, of which only hydra.sweeper has an effect here {MINE}2). "
        f"{PLACED}",
    ),
    (
        "run:\n  <<: {seed: 010}\n",
        f"run.seed: 010 is read as 8 {MINE}3). {DIGITS}",
    ),
    (
        "train:\n  steps: 3\n  <<: {seed: 4, steps: 5}\n",
        f"train.seed is not a setting {MINE}4). Did you mean run.seed?",
    ),
    (
        "train:\n  steps: 1:30\n",
        f"train.steps: 1:30 is read as 90 {MINE}3). {DIGITS}",
    ),
    (
        "wandb:\n  project: no\n",
        f"wandb.project must be text, but the unquoted value is read as false {MINE}3). Put it "
        "in quotes.",
    ),
    (
        "train:\n  steps: on\n",
        f"train.steps must be a whole number, not true {MINE}3).",
    ),
]
# (file below my_conf, what it says, arguments, message)
FILES = [
    (
        "optimizer/mine.yaml",
        "name: adamw\nlerning_rate: 3\n",
        "optimizer=mine",
        "optimizer.lerning_rate is not a setting of optimizer=adamw (in "
        "my_conf/optimizer/mine.yaml:2). Did you mean optimizer.learning_rate?",
    ),
    (
        "recipe/mine.yaml",
        "train:\n  steps: 3\n",
        "recipe=mine",
        "my_conf/recipe/mine.yaml sets recipe.*, which is not a section. Begin the file with "
        "the line '# @package _global_'.",
    ),
    (
        "recipe/mine.yaml",
        "just words\n",
        "recipe=mine",
        "my_conf/recipe/mine.yaml does not hold settings. It must hold names and values.",
    ),
    (
        "dataset/mine.yaml",
        "path: /data\n",
        "dataset=mine",
        "dataset.name is not set. It says which kind of dataset this is: arrays, digits, "
        "documents, mixture, pictures, stdlib_text, synthetic, text, tokens, custom.",
    ),
]
FILES += [
    ("recipe/mine.yaml", f"# @package _global_\n{text}", "recipe=mine", m) for text, m in RECIPES
]


def answer(argv, capsys):
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize(("command", "message"), COMMAND_LINES, ids=[c for c, _ in COMMAND_LINES])
def test_wrong_command_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert answer(command.split(" "), capsys) == (2, "", f"launcher: {message}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize(("file", "text", "command", "message"), FILES, ids=[f[3] for f in FILES])
def test_wrong_file(file, text, command, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_conf" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    argv = ["--config-dir", "my_conf", command]
    assert answer(argv, capsys) == (2, "", f"launcher: {message}\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"train: {steps: 3} # \xff\n", "my_conf/recipe/mine.yaml is not text in UTF-8"),
        (b"\x00\x01", "my_conf/recipe/mine.yaml is not YAML"),
        (None, "There is no recipe=mine"),
    ],
    ids=["latin-1", "binary", "a folder"],
)
def test_a_file_that_is_no_text(content, told, tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    code, out, err = answer(["--config-dir", "my_conf", "recipe=mine"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"launcher: {told}")


# The options of a custom model may be tables in tables, here without end.
ENDLESS = "model: &a {name: custom, module: x, options: {b: *a}}"


@pytest.mark.parametrize(
    "content",
    ["", "3", "- a", "train: {steps: 1", "train: 3", "b: [}", "run: &a {id: *a}", ENDLESS],
)
def test_a_frozen_file_that_holds_no_settings(content, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    code, out, err = answer(["--frozen", str(path)], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err


def test_a_frozen_file_cannot_allow_its_own_code(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    options = "{input_size: 2, output_size: 2}"
    model = f"{{name: custom, module: json.decoder, options: {options}}}"
    settings = f"task: check\nmodel: {model}\ndataset: {{name: synthetic}}\n"
    path.write_text(f"{settings}allow_modules: [json.decoder]\n")
    code, _, err = answer(["--frozen", str(path)], capsys)
    assert code == 2
    assert "model.module=json.decoder is code that this run is not allowed to load" in err
    assert answer(["--frozen", str(path), "allow_modules=[json]"], capsys)[0] == 0


def test_what_a_file_says_of_allow_modules_does_not_count(tmp_path, monkeypatch, capsys):
    """Even where it goes unnoticed: it is the command line that is asked."""
    monkeypatch.setattr(compose, "refuse_useless", lambda *_: None)
    recipe = tmp_path / "recipe" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "# @package _global_\n<<: {allow_modules: [json]}\n"
        "defaults: [override /dataset: custom]\ndataset: {module: json}\n"
    )
    command = ["--config-dir", str(tmp_path), "recipe=mine", "task=check"]
    code, _, err = answer(command, capsys)
    assert code == 2
    assert "dataset.module=json is code that this run is not allowed to load" in err
    assert answer([*command, "allow_modules=['json']"], capsys)[0] == 0


def test_missing_config_dir(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert answer(["--config-dir", "nowhere"], capsys) == (
        2,
        "",
        f"launcher: --config-dir {tmp_path}/nowhere is not a folder. Name a folder that holds "
        "groups of YAML files, such as my_conf with my_conf/recipe/mine.yaml in it.\n",
    )


def test_an_unused_broken_file_does_not_hide_the_right_message(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes = tmp_path / "my_conf" / "recipe"
    recipes.mkdir(parents=True)
    (tmp_path / "my_conf" / "dataset").mkdir()
    (tmp_path / "my_conf" / "dataset" / "broken.yaml").write_text("a: [1\n")
    (recipes / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: own\n"
    )
    (tmp_path / "my_conf" / "optimizer").mkdir()
    (tmp_path / "my_conf" / "optimizer" / "own.yaml").write_text("defaults: [{a: 1, b: 2}]\n")
    assert main(["--config-dir", "my_conf", "recipe=mine", "task=check"]) == 2
    assert capsys.readouterr().err == (
        "launcher: my_conf/optimizer/own.yaml has defaults with an entry that is not "
        "'group: option'. It must hold names and values.\n"
    )


OPTIONS = "# @package _global_\nmodel:\n  options:\n    a0: &a0 {x: 1, y: 2}\n"
BOUNDLESS = {
    "an endless anchor": f"{OPTIONS}    b: &b [*b]\n",
    "brackets": f"{OPTIONS}    b: {'[' * 9999}{']' * 9999}\n",
    "its size": OPTIONS + "#\n" * 200_000,
    "digits": f"{OPTIONS}    b: {'9' * 5000}\n",
    "no date": f"{OPTIONS}    b: 2026-02-31\n",
}


@pytest.mark.sampled(2, rest="slow")
@pytest.mark.parametrize("name", BOUNDLESS)
def test_a_settings_file_beyond_all_bounds(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(BOUNDLESS[name])
    monkeypatch.chdir(tmp_path)
    for words in (["--config-dir", "conf", "recipe=mine"], ["--frozen", str(path)]):
        assert main([*words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "word",
    [
        f"train.steps={'9' * 5000}",
        f"a={'[' * 2000}{']' * 2000}",
        f"a={'(' * 3000}",
    ],
)
def test_a_word_beyond_all_bounds(word, capsys):
    assert main([word, "task=check"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "cannot be read as key=value" in err) == (1, True)
    assert len(err) < 400
