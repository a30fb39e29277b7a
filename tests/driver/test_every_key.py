"""No setting is accepted without effect: each changes the plan, the run or a report, or is refused.

A new setting needs a line in `PROBES` here, or a rule that refuses it (`SWITCHES` of its section).
"""

import dataclasses
import functools
import json
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

from launcher.config.errors import ConfigError
from launcher.config.fields import key_of, settings_of
from launcher.config.optimizer import OPTIMIZERS
from launcher.config.parallel import METHODS
from launcher.config.reader import build, from_dict
from launcher.config.schema import Config

sys.path.insert(0, str(Path(__file__).parent))
import every_key as told

ROW = {"vocab_size": 256, "sequence_length": 4, "num_layers": 1, "num_heads": 2, "hidden_size": 8}
GPT = {"model": {"name": "gpt", "size": "s", "sizes": {"s": ROW, "t": ROW | {"num_layers": 2}}}}
MLP = {"model": {"name": "mlp", "hidden_size": 4, "input_size": 4, "output_size": 2}}
MADE_UP = {"dataset": {"name": "synthetic", "num_samples": 64}}
NET = {
    "model": {"name": "custom", "module": "mine.net", "options": {"width": 4}},
    "allow_modules": ["mine"],
}
DATA = {
    "dataset": {"name": "custom", "module": "mine.data", "options": {"width": 4}},
    "allow_modules": ["mine"],
}
ARRAYS = {"dataset": {"name": "arrays", "path": "data.npz"}}
TEXT = {"dataset": {"name": "text", "path": "books"}}
CUSTOM_OPTIMIZER = {
    "optimizer": {"name": "custom", "module": "mine.optimizer", "options": {"rate": 0.1}},
    "allow_modules": ["mine"],
}
TOKENS = {"dataset": {"name": "tokens", "path": "a.bin", "packing": "documents", "end_token": 7}}
PARTS = {"a": {"path": "a.bin"}, "b": {"path": "b.bin"}}
MIXTURE = {"dataset": TOKENS["dataset"] | {"name": "mixture", "parts": PARTS}}
del MIXTURE["dataset"]["path"]
DOCUMENTS = {"dataset": {"name": "documents", "path": "lines.jsonl", "tokens": "prepared"}}
SHORT = {"train": {"steps": 4, "eval_every": 2, "eval_batches": 1}, "wandb": {"mode": "disabled"}}
RECORDED = {"train": {"steps": 1, "eval_every": 0}, "wandb": {"mode": "offline"}}
SLURM = {"cluster": {"kind": "slurm", "gpus": 4, "hosts": 2}, "run": {"id": "r"}}
CONTAINER = {"cluster": {"slurm": {"container": {"image": "i"}}}}
DESCRIBED = {
    "cluster": {
        "kind": "described",
        "name": "mine",
        "gpus": 4,
        "hosts": 2,
        "device": {
            **dict.fromkeys(("peak_tflops", "memory_gib", "memory_gb_per_second"), 100.0),
            "name": "A100",
        },
        "links": {"intra_host_gb_per_second": 100.0, "inter_host_gb_per_second": 10.0},
    }
}


def merged(*trees):
    """Nested tables, the later of which win."""
    out = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both and key != "options" else value
    return out


def said(key, value):
    """The tree that holds one setting."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def config_of(tree):
    """The configuration; where no model and no data are named, of the smallest."""
    return from_dict(merged(MLP, MADE_UP) | tree)


class Probe(typing.NamedTuple):
    """Where a setting shows, beside which others, and another value of it."""

    shows: typing.Callable
    base: dict
    value: object


EXPERTS = {"num_experts": 2, "experts_per_token": 1, "mlp_size": 8}
PICTURE = {"image_size": 8, "channels": 1}
CLASSES = PICTURE | {"num_classes": 2}
TRANSFORMER = {"num_layers": 1, "num_heads": 1, "hidden_size": 8}
WIDER = {"vocab_size": 64, "sequence_length": 8, "num_layers": 2, "hidden_size": 16}
LLAMA = WIDER | {"num_heads": 4, "num_kv_heads": 1, "head_size": 8, "mlp_size": 5}
LLAMA |= {"activation": "gelu", "gated_mlp": False, "norm_epsilon": 0.1, "rope_base": 10.0}
LLAMA |= {"sliding_window": 2, "qkv_bias": True, "head_norm": True, "scale_embeddings": True}
LLAMA |= {"tie_embeddings": True}
RESNET = (
    CLASSES | {"depth": 10, "width": 4},
    {"image_size": 4, "channels": 2, "num_classes": 3, "depth": 18, "width": 2},
    {"momentum": 0.5},
)
FAMILIES = {  # by family: a row, other values of its settings, and of what is beside the row
    "gpt": (
        ROW,
        WIDER | {"num_heads": 1, "mlp_ratio": 2, "dropout": 0.5, "tie_embeddings": False},
        {"scan_layers": True, "loss_chunks": 2},
    ),
    "llama": (ROW, LLAMA, {"scan_layers": True, "loss_chunks": 2}),
    "moe": (
        ROW | EXPERTS,
        LLAMA
        | {"num_experts": 3, "experts_per_token": 2, "expert_size": 6, "shared_size": 3}
        | {"expert_every": 2, "capacity_factor": 0.5, "group_size": 2},
        {"scan_layers": True, "loss_chunks": 2, "balance_loss": 0.5, "router_z_loss": 0.5},
    ),
    "bert": (
        {"vocab_size": 64, "sequence_length": 8} | TRANSFORMER,
        WIDER | {"vocab_size": 32, "sequence_length": 4, "num_heads": 2},
        {"mlp_ratio": 2, "scan_layers": True, "loss_chunks": 2},
    ),
    "vit": (
        CLASSES | TRANSFORMER | {"patch_size": 4},
        {"image_size": 4, "channels": 2, "num_classes": 3, "patch_size": 2, "num_layers": 2}
        | {"num_heads": 2, "hidden_size": 16},
        {"mlp_ratio": 2, "scan_layers": True},
    ),
    "resnet": RESNET,
    "wide_resnet": RESNET,
    "unet": (
        PICTURE | {"width": 8, "levels": 1, "blocks": 1},
        {"image_size": 4, "channels": 2, "width": 16, "levels": 2, "blocks": 2, "time_steps": 10},
        {},
    ),
}


def family_probes(model):
    """The settings of the families of which a size fills some."""
    for name, (row, of_row, beside) in FAMILIES.items():
        sizes = {"s": row, "t": row | {k: of_row[k] for k in list(of_row)[:2]}}
        base = merged({"model": {"name": name, "size": "s", "sizes": sizes}}, MADE_UP)
        yield name, "model.size", model(base, "t")
        yield name, "model.sizes", model(base, {"s": sizes["t"]})
        for key, value in (of_row | beside).items():
            yield name, f"model.{key}", model(base, value)
        in_16_bits = merged(base, {"train": {"precision": "bf16"}})
        if name in ("gpt", "llama", "bert", "vit", "moe"):
            grouped = name in ("llama", "moe")
            one_head = {"num_heads": 1} | ({"num_kv_heads": 1} if grouped else {})
            if name == "vit":
                one_head |= {"image_size": 4}  # an even number of positions: one patch, one class
            fits = merged(in_16_bits, {"model": one_head})
            yield name, "model.attention", model(fits, "cudnn")
        if name in ("llama", "moe"):
            slow_turns = merged(base, {"model": {"head_size": 64}})
            yield name, "model.rope_factor", model(slow_turns, 8.0)
    deep = {"name": "resnet", "size": "s", "sizes": {"s": CLASSES | {"depth": 50, "width": 2}}}
    for name in ("resnet", "wide_resnet"):
        base = merged({"model": deep | {"name": name}}, MADE_UP)
        yield name, "model.width_factor", model(base, 2)
    masked = {"name": "bert", "size": "s", "sizes": {"s": FAMILIES["bert"][0]}}
    data = functools.partial(Probe, told.data_told)
    yield "bert", "model.mask_every", data(merged({"model": masked}, MADE_UP), 4)
    yield "bert", "model.mask_token", data(merged({"model": masked}, MADE_UP), 3)
    toy = merged({"model": {"name": "toy", "hidden_size": 4, "input_size": 4}}, MADE_UP)
    values = {"input_size": 3, "output_size": 2, "hidden_size": 3, "num_layers": 2, "dropout": 0.5}
    for key, value in values.items():
        yield "toy", f"model.{key}", model(toy, value)


def probes():
    """By option and key; the option is "" for sections without variants."""
    model = functools.partial(Probe, told.model_told)
    yield from family_probes(model)
    for name, value in {"input_size": 8, "hidden_size": 8, "output_size": 4}.items():
        yield "mlp", f"model.{name}", model(merged(MLP, MADE_UP), value)
    yield "mlp", "model.num_layers", model(merged(MLP, MADE_UP), 2)
    yield "mlp", "model.widths", model(merged(MLP, MADE_UP), [3, 5])
    yield "mlp", "model.output_relu", model(merged(MLP, MADE_UP), True)
    yield "custom", "model.module", model(merged(NET, DATA), "mine.other_net")
    yield "custom", "model.options", model(merged(NET, DATA), {"width": 4, "depth": 3})

    data = functools.partial(Probe, told.data_told)
    yield (
        "stdlib_text",
        "dataset.validation_fraction",
        data(merged(GPT, {"dataset": {"name": "stdlib_text"}}), 0.5),
    )
    yield "text", "dataset.path", data(merged(GPT, TEXT), "more")
    yield "text", "dataset.pattern", data(merged(GPT, TEXT), "*.md")
    yield "text", "dataset.validation_fraction", data(merged(GPT, TEXT), 0.3)
    arrays = merged(MLP, ARRAYS)
    yield "arrays", "dataset.path", data(arrays, "more.npz")
    yield "arrays", "dataset.names", data(arrays, ["x"])
    yield "arrays", "dataset.shuffle", data(arrays, False)
    yield "arrays", "dataset.validation_fraction", data(arrays, 0.5)
    yield "synthetic", "dataset.num_samples", data(merged(MLP, MADE_UP), 128)
    yield "synthetic", "dataset.targets", data(merged(MLP, MADE_UP), "linear")
    yield from token_probes(data)
    yield "custom", "dataset.module", data(merged(NET, DATA), "mine.other_data")
    yield "custom", "dataset.options", data(merged(NET, DATA), {"width": 8})

    yield from optimizer_probes()
    tasks = "check", "plan", "calibrate", "export", "generate", "prepare_data", "tokenize"
    for value in (*tasks, "evaluate"):
        yield "", "task", Probe(told.task_told, {"run": {"id": "taken"}}, value)
    yield "", "allow_modules", model(merged(NET, DATA), [])
    run = functools.partial(Probe, told.run_told)
    taken = functools.partial(Probe, told.folder_told, {"run": {"id": "taken"}})
    yield "", "run.id", taken("free")
    yield "", "run.dir", taken("elsewhere")
    yield "", "run.resume", taken("never")
    yield "", "run.seed", data(merged(GPT, TEXT), 1)
    yield "", "run.shared", taken(True)
    yield "", "run.fork", taken("nobody@7")
    yield "", "run.mirror", taken("s3://nobody/taken")
    yield "", "train.steps", run(SHORT, 5)
    yield "", "train.global_batch_size", data(merged(MLP, MADE_UP), 8)
    yield "", "train.precision", model(merged(MLP, MADE_UP), "bf16")
    yield "", "train.dry_steps", run(SHORT, 2)
    yield "", "train.log_every", run(SHORT, 3)
    yield "", "train.eval_every", run(SHORT, 3)
    yield "", "train.eval_batches", run(SHORT, 2)
    yield "", "train.sample_every", run(merged(merged(GPT, TEXT), SHORT), 3)
    yield "", "train.check_replicas_every", Probe(told.checks_told, SHORT, 2)
    for value in ("skip", "rollback"):
        diverges = functools.partial(told.run_told, third="diverges")
        yield "", "train.non_finite", Probe(diverges, SHORT, value)
    for value in ("warn", "skip", "rollback"):
        yield "", "train.spikes", Probe(told.optimizer_told, MLP, value)
    yield "", "train.init_from", taken("nowhere")
    yield "", "train.snapshot", run(SHORT, 2)
    often = merged(SHORT, {"train": {"eval_every": 1}})
    yield "", "train.keep_best", run(often, "eval_loss")
    yield "", "train.stop_early", run(often, 1)
    yield "", "hooks", run(merged(SHORT, {"allow_modules": ["mine"]}), ["mine.hook.Mine"])
    yield "", "train.checkpoint.at_end", run(SHORT, False)
    yield "", "train.checkpoint.every_steps", run(SHORT, 2)
    yield "", "train.checkpoint.every_minutes", run(SHORT, 1e-9)
    yield "", "train.checkpoint.keep", Probe(told.worker_told, SHORT, 7)
    saved = merged(SHORT, {"train": {"checkpoint": {"every_steps": 2}}})
    yield "", "train.checkpoint.on_error", run(saved, "stop")
    yield "", "report.timeline_steps", run(SHORT, [2, 4])
    yield "", "report.profiler_steps", run(SHORT, [2, 4])
    yield "", "report.trackers", run(RECORDED, [])
    for name in ("project", "entity", "group", "name"):
        yield "", f"wandb.{name}", run(RECORDED, "x")
    yield "", "wandb.tags", run(RECORDED, ["x"])
    yield "", "wandb.mode", run(RECORDED, "disabled")
    exported = functools.partial(Probe, told.export_told, {"run": {"id": "taken"}})
    yield "", "export.step", exported(3)
    yield "", "export.best", exported(True)
    yield "", "export.ema", exported(True)
    yield "", "export.path", exported("weights.npz")
    yield "", "export.format", exported("hf")
    theirs = {"run": {"id": "taken"}, "export": {"format": "hf"}}
    yield "", "export.dtype", Probe(told.export_told, theirs, "bfloat16")
    values = {"step": 3, "best": True, "ema": True, "prompts": "data.txt"}
    values |= {"max_new_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 1}
    for name, value in values.items():
        yield "", f"generate.{name}", Probe(told.generate_told, {"run": {"id": "taken"}}, value)
    yield "", "prompt", Probe(told.generate_told, {"run": {"id": "taken"}}, "x")
    for name, value in {"step": 3, "best": True, "ema": True, "batches": 1, "path": "x"}.items():
        yield "", f"evaluate.{name}", Probe(told.evaluate_told, {"run": {"id": "taken"}}, value)
    sweep = functools.partial(Probe, told.sweep_told)
    yield "", "sweep.dir", sweep({"sweep": {"dir": "multirun/s"}}, "multirun/none")
    swept = functools.partial(Probe, told.swept_told, SHORT)
    yield "", "sweep.jobs", swept(3)
    compiled = merged(DESCRIBED, {"task": "plan", "plan": {"compile": True}})
    yield "", "train.deterministic", Probe(told.options_told, compiled, True)
    yield "", "plan.compile", Probe(told.compile_told, {"task": "plan"}, True)
    yield "", "plan.advise", Probe(told.advise_told, merged(DESCRIBED, {"task": "plan"}), True)
    yield "", "sweep.objective", swept("mfu")
    yield from cluster_probes()


def optimizer_probes():
    told_of = functools.partial(Probe, told.optimizer_told)
    values = {"decay": "constant", "warmup_steps": 2, "clip_norm": 0.1, "restarts": 3}
    values |= {"final_learning_rate": 1e-4, "train_only": "w", "adam": ["w"]}
    values |= {"groups": [{"pattern": "w", "frozen": True}]}
    values |= {"module": "mine.other_optimizer", "options": {"rate": 0.5}}
    without_warm_up = {"warmup_steps": 0}
    beside = dict.fromkeys(("decay", "final_learning_rate"), without_warm_up)
    beside["decay_fraction"] = {"decay": "wsd"}
    beside["restarts"] = {"decay": "cosine_restarts"}
    for name, optimizer in OPTIMIZERS.items():
        base = {"optimizer": {"name": name, "decay": "linear"}, "train": {"steps": 40}}
        if name == "custom":
            base = CUSTOM_OPTIMIZER
        for field in dataclasses.fields(optimizer):
            if field.name not in ("name", "lora"):
                shown = merged(base, {"optimizer": beside.get(field.name, {})})
                yield name, f"optimizer.{field.name}", told_of(shown, values.get(field.name, 0.05))
        adapted = merged(base, {"optimizer": {"lora": {"rank": 2, "pattern": "w*"}}})
        for key, value in {"rank": 1, "alpha": 8.0, "pattern": "w"}.items():
            yield name, f"optimizer.lora.{key}", told_of(adapted, value)


def token_probes(data):
    """Those of datasets of tokens, and of the tasks that make them."""
    tokens, mixture = (functools.partial(data, merged(GPT, base)) for base in (TOKENS, MIXTURE))
    yield "tokens", "dataset.path", tokens("b.bin")
    yield "tokens", "dataset.validation_path", tokens("b.bin")
    yield "mixture", "dataset.parts", mixture({"a": {"path": "a.bin", "weight": 5}})
    bad = {"tokens": {"path": "bad.bin"}, "mixture": {"parts": {"a": {"path": "bad.bin"}}}}
    for name, made in {"tokens": tokens, "mixture": mixture}.items():
        base = TOKENS if name == "tokens" else MIXTURE
        yield name, "dataset.bad", data(merged(GPT, base, {"dataset": bad[name]}), "skip")
        yield name, "dataset.dtype", made("uint32")
        yield name, "dataset.packing", made("stream")
        yield name, "dataset.end_token", made(8)
        yield name, "dataset.validation_fraction", made(0.5)
    digits = {"dataset": {"name": "digits"}, "model": {"input_size": 64, "output_size": 10}}
    yield "digits", "dataset.validation_fraction", data(merged(MLP, digits), 0.5)
    documents = merged(GPT, DOCUMENTS, {"model": {"vocab_size": 257}})
    for name, base in {"tokens": TOKENS, "mixture": MIXTURE, "documents": DOCUMENTS}.items():
        stored = {"path": "s3://bucket/a", "objects": ["s3://bucket/a/x.parquet 9 v 0"]}
        if name == "mixture":
            stored["parts"] = {"a": {"path": stored.pop("path")}}
        if name == "documents":
            stored["format"] = "parquet"
        at = functools.partial(Probe, told.stored_told, merged(GPT, base, {"dataset": stored}))
        yield name, "dataset.objects", at(["s3://bucket/a/y.parquet 9 v 0"])
        if name != "documents":
            yield name, "dataset.cache_gib", at(0.0)
    others = {
        "bad": {"path": "bad.jsonl"},
        "chat_template": {"field": "messages", "chat_template": "chatml"},
        "pattern": {"path": "books", "format": "text"},
    }
    values = {"path": "other.jsonl", "pattern": "*.md", "format": "text", "field": "body"}
    values |= {"tokenizer": "none.json", "chat_template": "plain", "bad": "skip", "tokens": "x"}
    values |= {"packing": "documents", "validation_fraction": 0.5}
    for name, value in values.items():
        base = merged(documents, {"dataset": others.get(name, {})})
        yield "documents", f"dataset.{name}", Probe(told.documents_told, base, value)
    vit = FAMILIES["vit"][0]
    pictures = {
        "dataset": {"name": "pictures", "path": "album", "validation_fraction": 0.3},
        "model": {"name": "vit", "size": "s", "sizes": {"s": vit}},
        "train": {"global_batch_size": 12},
    }
    values = {"path": "other_album", "format": "tar", "fit": "pad", "smallest_crop": 0.3}
    values |= {"flip": True, "mean": 0.5, "std": 2.0, "validation_path": "other_album"}
    values |= {"validation_fraction": 0.5}
    for name, value in values.items():
        yield "pictures", f"dataset.{name}", Probe(told.pictures_told, pictures, value)
    spoilt = merged(pictures, {"dataset": {"path": "bad_album"}})
    yield "pictures", "dataset.bad", Probe(told.pictures_told, spoilt, "skip")
    prepared = functools.partial(Probe, told.prepared_told)
    yield "", "prepare.processes", prepared(merged(documents, {"task": "prepare_data"}), 7)
    tokenizing = merged(documents, {"task": "tokenize"})
    yield "", "tokenize.vocab_size", prepared(tokenizing, 300)
    yield "", "tokenize.path", prepared(tokenizing, "other.json")


def cluster_probes():
    devices = functools.partial(Probe, told.cluster_told)
    emulated = {"cluster": {"kind": "emulated", "gpus": 4}}
    yield "local", "cluster.gpus", devices({"cluster": {"kind": "local"}}, 8)
    yield "local", "cluster.hosts", devices({"cluster": {"kind": "local"}}, 2)
    for option, base in {"emulated": emulated, "described": DESCRIBED}.items():
        yield option, "cluster.gpus", devices(base, 8)
        yield option, "cluster.hosts", devices(base, 4)
    yield "slurm", "cluster.gpus", Probe(told.slurm_told, SLURM, 8)
    yield "slurm", "cluster.hosts", Probe(told.slurm_told, SLURM, 4)
    on_a_ray = functools.partial(Probe, told.ray_told, {"cluster": {"kind": "ray", "gpus": 4}})
    yield "ray", "cluster.gpus", devices({"cluster": {"kind": "ray"}}, 8)
    yield "ray", "cluster.hosts", devices({"cluster": {"kind": "ray", "gpus": 4}}, 4)
    yield "ray", "cluster.address", on_a_ray("10.0.0.1:6379")
    yield "ray", "cluster.num_cpus", on_a_ray(2.0)
    yield "ray", "cluster.resources", on_a_ray({"my_node": 1.0})
    hangs = functools.partial(told.run_told, third="hangs")
    for option in ("local", "emulated", "slurm", "ray"):
        base = merged(SHORT, {"cluster": {"kind": option}})
        for name in ("step_timeout", "start_timeout"):
            yield option, f"cluster.{name}", Probe(told.run_told, base, 60.0)
        yield option, "cluster.max_restarts", Probe(hangs, base, 0)
    for option in ("emulated", "slurm", "ray"):
        two_hosts = merged(SHORT, {"cluster": {"kind": option, "gpus": 4, "hosts": 2}})
        yield option, "cluster.transport", Probe(told.run_told, two_hosts, "collective")
        if option != "emulated":
            yield option, "cluster.wait_for_host", Probe(told.run_told, two_hosts, 30)
    for option in ("local", "emulated", "slurm", "ray"):
        priced = Probe(told.cost_told, {"cluster": {"kind": option}}, 2.5)
        yield option, "cluster.price_per_device_hour", priced
        yield option, "cluster.hours_between_faults", Probe(told.faults_told, priced.base, 2.5)
    yield "described", "cluster.price_per_device_hour", Probe(told.cost_told, DESCRIBED, 2.5)
    yield "described", "cluster.hours_between_faults", Probe(told.faults_told, DESCRIBED, 2.5)
    described = {"name": "x", "device.name": "H100", "device.peak_tflops": 50.0}
    described |= {"device.peak_tflops_fp32": 20.0, "device.sustained": 0.4}
    described |= {"device.sustained_attention": 0.1, "device.launch_us": 40.0}
    described |= {"device.memory_gib": 50.0, "device.memory_gb_per_second": 50.0}
    described |= {"links.intra_host_gb_per_second": 50.0, "links.latency_us": 5.0}
    described |= {"links.inter_host_gb_per_second": 5.0}
    described |= {"device.compute_capability": 7.5}
    for name, value in described.items():
        yield "described", f"cluster.{name}", devices(DESCRIBED, value)
    for name, value in {"multiprocessors": 40, "clock_ghz": 1.5, "l2_mib": 4.0}.items():
        yield "described", f"cluster.device.{name}", Probe(told.compiler_told, DESCRIBED, value)
    words = ("partition", "account", "qos", "gpu_type", "gres", "constraint", "reservation")
    asked = dict.fromkeys((*words, "nodelist", "exclude", "dependency", "job_name"), "x")
    asked |= {"time": "4h", "cpus": 3, "mem": "4G", "exclusive": False, "signal": "USR1@9"}
    asked |= {"max_requeues": 3, "array": 2, "setup": ["a"], "env": {"A": "b"}, "python": "p"}
    asked |= {"srun_args": ["--x"], "extra": {"x": "y"}, "emulated": True}
    asked |= {"network_interface": "ib0", "start_timeout": 5, "dry_run": True, "wait": True}
    for name, value in asked.items():
        yield "slurm", f"cluster.slurm.{name}", Probe(told.slurm_told, SLURM, value)
    swept = merged(SLURM, {"cluster": {"slurm": {"array": 1}}})
    yield "slurm", "cluster.slurm.array", Probe(told.array_told, swept, 2)
    contained = merged(SLURM, CONTAINER)
    for name, value in {"image": "j", "mounts": ["/a:/b"], "workdir": "/w"}.items():
        yield "slurm", f"cluster.slurm.container.{name}", Probe(told.slurm_told, contained, value)


PROBES = list(probes())


def keys(cls=Config, section="", option="", named=""):
    """Every option and key of the schema, but for those that name the option."""
    hints = typing.get_type_hints(cls)
    for field in settings_of(cls):
        key = f"{section}.{field.name}" if section else field.name
        if "variants" in field.metadata:
            variants = field.metadata["variants"]
            for name, variant in variants.classes.items():
                yield from keys(variant, key, name, f"{key}.{variants.key}")
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], key, option, named)
        elif key != named:
            yield option, key


def test_every_key_has_a_probe():
    wanted = {(option, key) for option, key in keys() if not key.startswith("parallel.")}
    wanted.remove(("", "allow_commands"))  # which files are refused for: config/test_commands.py
    assert {(option, key) for option, key, _ in PROBES} == wanted


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder with some text and a user's own modules."""
    for name, text in {
        "data.txt": "a prompt",
        "books/a.txt": "abcde",
        "books/b.md": "fghij",
        "more/c.txt": "klmno",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(f"{text} {i} " for i in range(99)))
    for name, first in {"data.npz": 0, "more.npz": 1}.items():
        rows = np.arange(first, first + 80.0).reshape(20, 4)
        np.savez(tmp_path / name, x=rows, y=rows[:, :2])
    for name, first in {"a.bin": 0, "b.bin": 100}.items():
        # Tokens of 16 bits, or half as many of 32.
        np.arange(first, first + 120, dtype=np.uint32).tofile(tmp_path / name)
    np.array([*range(60), 60_000, *range(60)], np.uint16).tofile(tmp_path / "bad.bin")
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bye " * 9}]
    for name, text in {"lines.jsonl": "abc", "other.jsonl": "xyz", "bad.jsonl": "abc"}.items():
        row = json.dumps({"text": f"{text} " * 9, "body": text * 20, "messages": talk})
        (tmp_path / name).write_text(f"{row}\n" * 20 + "{\n" * (name == "bad.jsonl"))
    (tmp_path / "mine").mkdir()
    net = (
        "import jax, jax.numpy as jnp\n"
        "from launcher.recipes import Model\n"
        "def build(options, precision):\n"
        "    shape = (options.width, getattr(options, 'depth', 2))\n"
        "    def loss(params, batch, key): return jnp.mean(batch['x'] @ params) FACTOR, {}\n"
        "    return Model(lambda key: jnp.ones(shape), loss)\n"
    )
    data = (
        "import numpy as np\n"
        "from launcher.recipes import Dataset\n"
        "def check(options, model_options, validation): pass\n"
        "def build(options, model_options, size, seed):\n"
        "    batch = {'x': np.full((size, options.width), FILL, np.float32)}\n"
        "    return Dataset(lambda k: batch, lambda k: batch, 'mine')\n"
    )
    files = {"net": net.replace("FACTOR", ""), "other_net": net.replace("FACTOR", "* 2")}
    files |= {"data": data.replace("FILL", "1"), "other_data": data.replace("FILL", "2")}
    optimizer = (
        "import optax\n"
        "def build(options, steps): return optax.NAME(options.rate), lambda count: options.rate\n"
    )
    files |= {"optimizer": optimizer.replace("NAME", "sgd")}
    files |= {
        "hook": "import sys\nfrom launcher.driver import Callback\nclass Mine(Callback):\n"
        "    def on_step(self, *given): print(given, file=sys.stderr)\n"
    }
    files |= {"other_optimizer": optimizer.replace("NAME", "adam")}
    for name, text in files.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


# Whose other value is: code that is no longer allowed, and more hosts than one machine is.
REFUSED = (("", "allow_modules"), ("local", "cluster.hosts"))


def test_what_a_run_tells_depends_on_its_settings_alone(tmp_path, monkeypatch):
    """Not on the time that it takes; and the run that is looked at comes to its last step."""
    monkeypatch.chdir(tmp_path)
    config = config_of({"train": {"steps": 4, "eval_every": 2}, "wandb": {"mode": "disabled"}})
    first, metrics = told.run_told(config)
    assert (first, metrics) == told.run_told(config)
    assert ("step", 4, False, False, None) in first
    assert metrics


NO_FILES = told.model_told, told.optimizer_told  # tell the same in any folder


@functools.cache
def _told_once(shows, base):
    return shows(config_of(json.loads(base)))


def told_before(probe):
    """What the other settings alone tell; of many keys they are the same."""
    if probe.shows in NO_FILES:
        return _told_once(probe.shows, json.dumps(probe.base))
    return probe.shows(config_of(probe.base))


@pytest.mark.sampled(19, rest="slow")
@pytest.mark.parametrize(
    ("option", "key", "probe"), PROBES, ids=[f"{option}.{key}" for option, key, _ in PROBES]
)
def test_every_key_has_an_effect_or_is_refused(option, key, probe):
    before = told_before(probe)
    asked = merged(probe.base, said(key, probe.value))
    if (option, key) in REFUSED:
        with pytest.raises(ConfigError, match=key):
            config_of(asked)
    else:
        assert probe.shows(config_of(asked)) != before


VARIANTS = {
    field.name: field.metadata["variants"]
    for field in settings_of(Config)
    if "variants" in field.metadata
}
NEEDED = {"module": "mine.net", "path": "books", "plan": "plan.json"}


@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize(
    ("section", "option"), [(s, name) for s, found in VARIANTS.items() for name in found.classes]
)
def test_an_option_takes_no_setting_of_another_but_a_null_of_parallel(section, option):
    key, classes = VARIANTS[section].key, VARIANTS[section].classes
    own = {key_of(field) for field in dataclasses.fields(classes[option])}
    base = {key: option} | {name: NEEDED[name] for name in own & NEEDED.keys()}
    for variant in classes.values():
        for name in {key_of(field) for field in dataclasses.fields(variant)} - own:
            for value in (1, None):
                if section == "parallel" and value is None:
                    build(classes[option], base | {name: value}, section)
                    continue
                with pytest.raises(ConfigError, match=f"{section}.{name} is not a setting of"):
                    config_of({section: base | {name: value}})


BASES = {
    "auto": {"num_micro_batches": 2},
    "manual": {"num_micro_batches": 2, "num_stages": 2},
    "data": {},
    "parameter_server": {},
    "zero2": {},
    "zero3": {},
    "shard": {"model": 4},
    "three_d": {"num_micro_batches": 2, "model": 2, "pipeline": 2},
    "replay": {"plan": "plan.json"},
}
# Others than those above; of some settings a second, for where the first is what is taken anyway.
VALUES = {
    "num_layers": [3, 7],
    "num_stages": [4, 1],
    "stages_per_mesh": [2],
    "num_micro_batches": [4],
    "schedule": ["gpipe", "zero_bubble"],
    "remat": ["full", "selective", "full/2", "full:1"],
    "data": [2, 1],
    "model": [2, 1],
    "pipeline": [4, 1],
    "cost": ["profile"],
    "try": [2],
    "bucket_bytes": [0],
    "reduce_dtype": ["bf16"],
    "plan": ["other.json"],
    "servers": [2],
    "verify": ["compile"],
}


# Those of VALUES that are what is taken anyway.
SAME = {
    ("auto", "num_stages"): [1],
    ("parameter_server", "servers"): [2],  # one host has none
    ("shard", "data"): [1],
    ("three_d", "data"): [1],
    ("three_d", "model"): [2],
}


def test_every_method_and_key_of_parallel_is_tried():
    assert set(BASES) == set(METHODS)
    names = {key_of(field) for method in METHODS.values() for field in dataclasses.fields(method)}
    assert set(VALUES) == names - {"method", "allow_over_memory"}  # test_fitting.py shows the last


@pytest.mark.sampled(10, rest="slow")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", VALUES)
def test_every_key_of_parallel_changes_the_plan_or_is_refused(method, name, monkeypatch):
    def measure(step, *_):
        raise told.PlanError("this would be measured")

    monkeypatch.setattr("launcher.driver.planning.plan_from_config.measure_layers", measure)
    monkeypatch.setattr("launcher.plan.methods.measure_layers", measure)
    base = {"method": method} | BASES[method]
    before = planned(base)
    assert isinstance(before, dict) or method == "replay"
    same = [value for value in VALUES[name] if planned(base | {name: value}) == before]
    assert same == SAME.get((method, name), []), "accepted without effect"


@functools.cache
def _planned(words):
    try:
        config = config_of({"parallel": dict(words), "cluster": {"gpus": 4, "kind": "emulated"}})
    except ConfigError as error:
        return str(error)
    return told.plan_told(config)


def planned(parallel):
    return _planned(tuple(parallel.items()))
