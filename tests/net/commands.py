"""The command lines of the net: plans to make, and wrong ones to refuse."""

MADE_UP = "dataset=synthetic"
_GPT = (
    "model=gpt model.num_layers=2 model.hidden_size=32 model.sequence_length=32 dataset=synthetic"
)
_EMULATED = "cluster=emulated cluster.gpus"
PLANS = {
    "smoke": "recipe=smoke",
    "toy, data": f"model=toy {MADE_UP} parallel=data {_EMULATED}=2",
    "mlp, zero2": f"model=mlp {MADE_UP} parallel=zero2 {_EMULATED}=4",
    "mlp, auto": f"model=mlp {MADE_UP} parallel=auto {_EMULATED}=4",
    "gpt, shard": f"{_GPT} parallel=shard {_EMULATED}=4 parallel.data=2 parallel.model=2",
    "gpt, 3d": f"{_GPT} parallel=three_d {_EMULATED}=8",
    "gpt, gpipe": f"{_GPT} model.num_layers=4 parallel=manual parallel.num_stages=4 "
    f"parallel.schedule=gpipe parallel.remat=full {_EMULATED}=4",
    "gpt, interleaved": f"{_GPT} model.num_layers=4 parallel=manual parallel.num_stages=4 "
    f"parallel.schedule=interleaved_1f1b parallel.stages_per_mesh=2 {_EMULATED}=2",
    "gpt, zero bubble": f"{_GPT} parallel=manual parallel.schedule=zero_bubble {_EMULATED}=2",
    "gpt, servers": f"{_GPT} parallel=parameter_server {_EMULATED}=4 cluster.hosts=2",
    "gpt, auto": f"{_GPT} parallel=auto {_EMULATED}=4",
    "gpt scanned, auto": f"{_GPT} model.scan_layers=true parallel=auto {_EMULATED}=4",
    "gpt scanned, manual": f"{_GPT} model.num_layers=8 model.scan_layers=true parallel=manual "
    f"parallel.num_stages=2 {_EMULATED}=2",
    "llama, zero3": f"model=llama model.num_layers=2 {MADE_UP} parallel=zero3 cluster=h100_8",
    "llama 1b scanned, auto": "model=llama model.size=llama3_1b model.scan_layers=true "
    f"{MADE_UP} train.precision=bf16 parallel=auto cluster=h100_8",
    "bert, shard": f"model=bert model.num_layers=2 {MADE_UP} parallel=shard cluster=a100_8",
    "bert scanned, 3d": f"model=bert model.scan_layers=true {MADE_UP} parallel=three_d "
    "cluster=p3_16xlarge",
    "moe, shard": f"model=moe model.num_layers=2 {MADE_UP} parallel=shard {_EMULATED}=4",
    "moe scanned, auto": f"model=moe model.scan_layers=true {MADE_UP} parallel=auto "
    "cluster=p4d_24xlarge_x4",
    "vit, data": f"model=vit {MADE_UP} parallel=data parallel.num_micro_batches=2 cluster=h200_8",
    "vit scanned, manual": f"model=vit model.scan_layers=true {MADE_UP} parallel=manual "
    f"parallel.num_stages=2 parallel.schedule=eager_1f1b {_EMULATED}=2",
    "resnet, data": f"model=resnet {MADE_UP} parallel=data parallel.reduce_dtype=bf16 "
    f"{_EMULATED}=4",
    "unet, zero2": f"model=unet {MADE_UP} parallel=zero2 {_EMULATED}=4 cluster.hosts=2",
    "gpt 1.3b, zero3": f"model.size=1.3b model.scan_layers=true {MADE_UP} train.precision=bf16 "
    "train.global_batch_size=128 parallel=zero3 parallel.remat=full cluster=h100_8_x16",
}

REFUSED = (
    "train.stepz=3",
    "modle=gpt",
    "model=gtp",
    "train.steps=abc",
    "train.steps=0",
    "train.precision=int4",
    "parallel.schedule=1fb1",
    "run.seed=4294967296",
    "model=custom model.module=os",
    "train.steps",
    "optimizer=sgd optimizer.b1=0.9",
    "parallel=data parallel.schedule=1f1b",
    "cluster=ray cluster.address=ray://head:10001",
    "dataset=text",
    "parallel=manual train.global_batch_size=30",
    "parallel.num_layers=6 parallel.num_stages=8",
    "task=plan cluster=h100_8 parallel.cost=profile",
    "cluster.gpus=2 parallel.num_stages=4",
    "parallel=replay",
    "cluster=emulated cluster.gpus=4 cluster.hosts=3",
    "cluster=emulated cluster.transport=collective",
    "task=submit",
    "cluster=slurm cluster.gpus=null",
    "cluster=slurm cluster.slurm.time=12:30:00",
    "model.hidden_size=130 model.num_heads=4",
    "model=mlp dataset=stdlib_text",
    "model.vocab_size=100",
    "optimizer.clip_norm=0",
    "--frozen nowhere.yaml",
    "task=plan model=mlp dataset=synthetic cluster=h100_8 cluster.device.memory_gib=0.00435",
    "task=plan parallel=replay parallel.plan=nowhere.json",
    "task=generate run.id=nowhere",
)
