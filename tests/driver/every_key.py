"""What a configuration comes to, part by part, without processes or devices: for test_every_key."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock, patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import layered_step
from PIL import Image
from rich.console import Console

from launcher import checkpoint
from launcher.checkpoint.hugging_face import Folder
from launcher.cli import outcome
from launcher.cluster.errors import HungError
from launcher.cluster.kinds import KINDS, find_devices, kind_of
from launcher.cluster.ray.ray_compat import Node
from launcher.cluster.ray.session import StartLimit
from launcher.cluster.slurm import rendezvous
from launcher.config.cluster import Emulated
from launcher.config.errors import ConfigError
from launcher.config.parallel import Data
from launcher.config.schema import Config
from launcher.driver import training
from launcher.driver.failures import run_with_restarts
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder
from launcher.driver.folder.mirrored import look_at_mirror
from launcher.driver.planning import check
from launcher.driver.planning.compiled import compiler_of, verifies
from launcher.driver.planning.init_from import find_start
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import Prepared, plans_to_try
from launcher.driver.record.accounting import expected_fields, faults_of
from launcher.driver.record.run_log import predicted_cost
from launcher.driver.tasks import evaluate, generate, task
from launcher.driver.tasks.export import ExportTask
from launcher.hardware.target_config import target_config
from launcher.inference import stored_model
from launcher.plan import PlanError, local_shape
from launcher.recipes import InputError, Model, build_dataset, build_model
from launcher.recipes.checked_model import checked_loss, init_model
from launcher.recipes.data import stored_files
from launcher.recipes.data.corpus.tokenizers import plain_bytes
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.report.sweep import objective_of
from launcher.runtime import Target
from launcher.stop import Stop
from launcher.submit import job
from launcher.submit.job import submit
from launcher.submit.sweep import find_slots
from launcher.trace.ir.cudnn import described_cudnn
from launcher.trace.ir.jaxpr import Jaxpr, is_var, make_jaxpr, sub_jaxprs
from launcher.train.lora import with_adapters
from launcher.train.program import build_steps
from launcher.train.sampling import Sample
from launcher.train.step_result import StepResult
from launcher.train.worker import TrainWorker

# Four layers, whose last two are heavier.
SHAPES = (64, 64), (64, 64), (64, 256), (256, 64)
STEP = functools.cache(lambda: layered_step(SHAPES, 32))
UNKNOWN = dataclasses.replace(local_shape(1, 1, "cpu"), device_kind="Voodoo 2")
META = SimpleNamespace(parts=(), skipped=0, documents=1, tokens=1, vocab_size=257)
PLAN = functools.cache(lambda: plan_of(Data(), STEP(), local_shape(4, 1, "cpu")))


def plan_told(config: Config):
    """The plan, but for what it is called."""
    shape = local_shape(config.cluster.gpus or 4, config.cluster.hosts, "cpu")
    try:
        plan = plan_of(config.parallel, STEP(), shape)
    except (ConfigError, PlanError) as error:
        return str(error)
    tried = plans_to_try(config, find_devices(Emulated(gpus=4)), plan)
    return plan.to_dict() | {"runners_up": None, "tried": tried, "verified": verifies(config)}


def compile_told(config: Config):
    """Whether a compiler is looked for, here one for a GPU that is not known."""
    try:
        return compiler_of(config, UNKNOWN)
    except PlanError as error:
        return str(error)


def advise_told(config: Config):
    """Whether a plan that is all that was asked for gets advice."""
    told = []

    def advised(*_):
        told.append("advice")

    def claim(config):
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(InterruptedError):
        for name in ("trace", "plan"):
            patch.setattr(f"launcher.driver.planning.prepare.{name}", lambda *_, **__: None)
        patch.setattr("launcher.driver.planning.advice.advised", advised)
        patch.setattr("launcher.driver.run.PlotProcess", contextlib.nullcontext)
        patch.setattr("launcher.driver.run.folder.claim", claim)
        task.task_named(config.task)().run(config, Console(file=io.StringIO()))
    return told


def _batch(config: Config):
    dataset = build_dataset(
        config.dataset, config.model, config.train.global_batch_size, config.run.seed
    )
    return dataset, dataset.train(0)


def model_told(config: Config):
    model = build_model(config.model, config.train.precision)
    key = jax.random.key(0)
    batch = _batch(config)[1]
    with described_cudnn():
        params, state = jax.eval_shape(functools.partial(init_model, model), key)
        init = make_jaxpr(model.init, key)
        loss = make_jaxpr(checked_loss(model), params, state, batch, key)
    return str(init), str(loss), _arrays_in(loss)


def _arrays_in(jaxpr: Jaxpr) -> list[str]:
    """The arrays that a program holds, those of programs inside it, too, which no text shows."""
    found = [str(one) for one in jaxpr.consts]
    for eqn in jaxpr.eqns:
        found += [str(one.val) for one in eqn.invars if not is_var(one)]
        for inner in sub_jaxprs(eqn):
            found += _arrays_in(inner)
    return found


def data_told(config: Config):
    """The batches of a dataset, or what is wrong with it."""
    try:
        dataset, batch = _batch(config)
    except InputError as error:
        return str(error)

    def digest(batch):
        return {k: (v.shape, hashlib.sha256(v.tobytes()).hexdigest()) for k, v in batch.items()}

    return dataset.describe, digest(batch), dataset.validation and digest(dataset.validation(0))


def pictures_told(config: Config):
    """The batches of an album."""
    rng = np.random.default_rng(0)
    for name in ("album", "other_album", "bad_album"):
        for label in ("a", "b"):
            Path(name, label).mkdir(parents=True, exist_ok=True)
            for i in range(4):
                points = rng.integers(256, size=(12, 16), dtype=np.uint8)
                Image.fromarray(points).save(Path(name, label, f"{i}.png"))
    Path("bad_album/a/0.png").write_bytes(b"none")
    return data_told(config)


def documents_told(config: Config):
    """What preparing says or writes, and the batches of it."""
    try:
        meta = prepare_corpus(config.dataset, 1)
        return config.dataset.folder, meta, data_told(config)
    except InputError as error:
        return str(error)


def stored_told(config: Config):
    """What is read of objects, twice, and what the store is asked for."""
    told, asked = [], []

    def get(key, start, stop, version):
        asked.append(key)
        return bytes(stop - start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_files, "_store", lambda bucket: SimpleNamespace(get=get))
        for path in (*config.dataset.paths.values(),) * 2:
            access = stored_files.access_to(path, config.dataset)
            found = access.named("", path, lambda path: True, "").paths
            told.append([(access.stamp(path), access.whole(path)) for path in found])
    return told, asked


def prepared_told(config: Config):
    """What a task for documents hands on."""
    told, console = [], Console(file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "launcher.recipes.datasets.documents.dataset.prepare_corpus",
            lambda *given: told.append(given[1]) or META,
        )
        patch.setattr(
            "launcher.recipes.datasets.documents.prepare.train_tokenizer",
            lambda *given: told.append(given[1:]) or 1,
        )
        task.task_named(config.task)().run(config, console)
    return told


def optimizer_told(config: Config):
    """What a model with a matrix and a vector starts from, and what a step of it computes."""

    def init(key):
        return {"w": jnp.ones((4, 6)), "w_embedding": jnp.ones((4, 6)), "b": jnp.ones(6)}

    def loss(params, batch, key):
        return jnp.sum(batch @ (params["w"] + params["w_embedding"]) + params["b"]), {}

    init, step = build_steps(config, with_adapters(Model(init, loss), config.optimizer.lora))
    key = jax.random.key_data(jax.random.key(0))
    state = jax.eval_shape(init, key)
    return str(jax.make_jaxpr(init)(key)), str(jax.make_jaxpr(step)(state, jnp.ones((2, 4))))


class FakeWorkers:
    """Workers that answer at once, and to whom the third step does what is wanted; no disk takes
    what they save."""

    handles = ()

    def __init__(self, told, third, handles, plan, check, timeout, *others):
        self._told, self._third, self.plan = told, third, plan
        told.append(("timeout", timeout, others))

    def connect(self, advance):
        pass

    def infos(self, processes, devices):
        return []

    def clocks(self):
        return []

    def gather(self, calls, starting):
        return []

    def submit(self, method, *arguments):
        if method not in ("build", "setup", "save"):
            self._told.append((method, *arguments))
        if method == "save":
            self._told.append(("save", arguments[1]))
        return SimpleNamespace(
            result=lambda advance=None, limit=None: self._answer(method, *arguments),
            each=lambda: {"create": []}.get(method, [False]),
        )

    def _answer(self, method, *arguments):
        if method == "setup":
            return 0.1
        if method == "saved":
            return "the disk is full."
        if method == "sample":
            return Sample(arguments[0], tuple((120,) for _ in arguments[1]))
        if method == "evaluate":
            metrics = _metrics() | {"eval/loss": 1.0}
            return StepResult(self._newest, metrics, 0.0, snapshots=(self._newest,))
        if method != "step":
            return None
        step = self._newest = arguments[0]
        if step == 3 and self._third == "hangs":
            raise HungError("no answer", {})
        diverges = step == 3 and self._third == "diverges"
        metrics = _metrics(math.nan if diverges else 1.0)
        return StepResult(step, metrics, 0.0, snapshots=(step,))


def _metrics(loss=1.0):
    return {"train/loss": loss, "train/grad_norm": 1.0, "perf/step_seconds": 0.1}


def run_told(config: Config, third: str = ""):
    """What the driver asks of its workers and of W&B, logs and says, and how it ends."""
    told, home = [], RunFolder(Path("run"))
    shutil.rmtree(home.path, ignore_errors=True)
    home.logs.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def start(*given):
        (limit,) = (one for one in given if isinstance(one, StartLimit))
        told.append(("start", limit.seconds, limit.host_seconds))
        yield SimpleNamespace(
            connect=lambda advance: 1,
            missing=(),
            spawn=lambda worker, advance: None,
            check=lambda: None,
            serve=lambda count, workers: [],
            renews=False,
        )

    def init(**said):
        names = ("id", "name", "project", "entity", "group", "tags", "mode")
        told.append({name: said[name] for name in names})
        raise RuntimeError("that is all")

    file = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(file):
        for kind in KINDS.values():
            patch.setattr(kind, "start", start)
        patch.setattr(training, "Workers", functools.partial(FakeWorkers, told, third))
        patch.setattr(
            training,
            "run_with_restarts",
            lambda *given: run_with_restarts(*given[:4], lambda seconds: None),
        )
        patch.setattr("wandb.init", init)
        patch.setattr("wandb.setup", lambda settings: None)
        plan = PLAN()
        console = Console(file=file, width=200)
        job = training._Job(
            home,
            config,
            Prepared(find_devices(Emulated()), plan, 0.0, eval_batches=config.train.eval_batches),
            console,
            Stop(),
            None,
        )
        try:
            job.train()
        except Exception as error:
            told.append((type(error).__name__, str(error)))
        job.run_log._trackers.finish({})
    metrics = home.path / "metrics.jsonl"
    told.append(re.sub(r"[\d.]+ m?s\b", "some time", file.getvalue()))
    return told, metrics.read_text() if metrics.exists() else ""


def cost_told(config: Config):
    """What the steps of a run cost by its plan."""
    return predicted_cost(config, PLAN())


def faults_told(config: Config):
    """The goodput and the time that are expected of all steps."""
    return expected_fields(config, faults_of(config, PLAN()), 1.0)


def worker_told(config: Config):
    """What a worker hands on when it saves."""
    told = []
    one = TrainWorker()
    one._config, one._state = config, None
    one._saver = SimpleNamespace(begin=lambda *arguments: told.append(arguments[4]))
    one.save("f", 1, {}, "t")
    return told


def checks_told(config: Config):
    """After which of four steps a worker makes digests of its replicas."""
    one = TrainWorker()
    one._config, one._state = config, None
    one._feeder = SimpleNamespace(get=lambda k: (None, 0.0))
    one._train = Mock(return_value=(None, {}), peak_bytes=None)
    one._digester = SimpleNamespace(start=lambda state: [state], finish=lambda made: "digests")
    results = [*map(one.step, range(1, 5)), one.flush()]
    return [result.copies for result in results if result]


def folder_told(config: Config):
    """The run's folder, with `outputs/taken` there already, and the start of its parameters."""
    Path("outputs/taken").mkdir(parents=True, exist_ok=True)
    try:
        look_at_mirror(config)
        folder.check(config)
        with folder.claim(config) as home:
            mode = home.path.stat().st_mode
            found = str(find_start(config, 0))
        shutil.rmtree(home.path)
        return str(home.path), mode, found
    except ConfigError as error:
        return str(error)


def cluster_told(config: Config):
    """The devices, or the machines that are described."""
    try:
        kind = kind_of(config.cluster)
        pool = kind.pool(planning=True)
        return kind.shape(pool) if pool is None else pool
    except ConfigError as error:
        return str(error)


def compiler_told(config: Config):
    """What XLA's compiler is told of the devices that are described."""
    return target_config(kind_of(config.cluster).sheet())


def options_told(config: Config):
    """The compiler's options for the devices that are described."""
    target = Target((), {}, "")
    with patch("launcher.driver.planning.compiled.target_of", lambda *device: target):
        return compiler_of(config, kind_of(config.cluster).shape(None)).options


def ray_told(config: Config):
    """What is asked of a Ray: by the checks of a run, and when its workers start."""
    told, of_ray = [], "launcher.cluster.ray.existing_ray"
    node = Node("id", "10.0.0.1", {"CPU": 8.0, "my_node": 9.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{of_ray}.find_nodes", lambda address, _: told.append(address) or [node])
        patch.setattr(f"{of_ray}.check_feasible", lambda *given: told.append(given[0]))
        patch.setattr(f"{of_ray}.ExistingRay", lambda *all: told.append(all[:3] + all[4:5]))
        pool = check.find_pool(config, plan_only=False)
        ready, home = Prepared(pool, PLAN(), 0.0), RunFolder(Path("run"))
        training._Job(home, config, ready, Console(), Stop(), None)._start()
    return told


def slurm_told(config: Config):
    """What is submitted, what is done about it here, and how the job's tasks meet."""
    told, file = [], io.StringIO()
    places = {
        "launcher.submit.job": ("check_installed", "check_partition", "note_job", "write_whole"),
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(file):
        for module, names in places.items():
            for name in names:
                patch.setattr(f"{module}.{name}", lambda *words, **_: told.append(words[1:2]))
        patch.setattr("launcher.submit.job.sbatch", lambda script, **_: "7")
        patch.setattr(
            "launcher.submit.job.freeze", lambda config, console: RunFolder(Path("x/run"))
        )
        patch.setattr(job, "wait", lambda *_: told.append("waited"))
        try:
            submit(config, Stop())
        except ConfigError as error:
            told.append(str(error))

        def own_address(allocation, interface):
            told.append(("interface", interface))
            return "127.0.0.1"

        patch.setattr(rendezvous, "own_address", own_address)
        allocation = SimpleNamespace(job_id="7", restarts=0)
        Path("meet").mkdir(exist_ok=True)
        with rendezvous.open_rendezvous(
            Path("meet"), allocation, config.cluster.slurm, ""
        ) as opened:
            told.append(opened.timeout)
    return told, file.getvalue().partition("\n")[0]


def array_told(config: Config):
    return job.array_script([config], "s")


def task_told(config: Config):
    """What the command line has done."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.config.compose.load", lambda *_: config)
        checks = "launcher.driver.planning.check.check"
        patch.setattr(checks, lambda *_: called.append("check") or [])
        for name in task.TASKS:
            patch.setattr(task.task_named(name), "run", lambda *_, name=name: called.append(name))
        outcome.run([], Stop())
    return called


class Finished(NamedTuple):
    path: Path
    lora: object
    ema: bool

    def whole(self):
        return tuple(self)


def export_told(config: Config):
    """Which checkpoint is written to which file."""
    told, console = [], Console(file=io.StringIO())
    Path("outputs/taken").mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "best_step", lambda folder: 7)
        patch.setattr(checkpoint, "resolve", lambda path: (path / "checkpoints" / "5", ()))
        patch.setattr(checkpoint, "FinishedModel", Finished)
        patch.setattr(checkpoint, "write_flat", lambda *given: told.append(given))
        patch.setattr("launcher.driver.tasks.export._theirs", lambda *_: Folder({}, [], {}))
        patch.setattr(
            checkpoint,
            "export_hugging_face",
            lambda *paths, dtype, private: told.append((paths, dtype)),
        )
        ExportTask().run(config, console)
    return told


def evaluate_told(config: Config):
    """Which checkpoint is evaluated on how much, and where that is written."""
    told, home = [], (Path("here"), Path("home"))

    @contextlib.contextmanager
    def answers(kind, settings, source, plan, ema, counts, console):
        told.append((source, ema, counts))
        yield iter([[({"loss": (1.0, 1.0)}, 1)]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_model, "stored_model", lambda _, *which: told.append(which) or home)
        patch.setattr(evaluate, "run_settings", lambda *given: config)
        patch.setattr(evaluate, "model_answers", answers)
        patch.setattr(evaluate, "write_whole", lambda path, *_: told.append(path))
        evaluate.EvaluateTask().run(config, Console(file=io.StringIO()))
    return told


def generate_told(config: Config):
    """By which checkpoint which text is gone on with, and how."""
    told, home = [], (Path("here"), Path("home"))

    @contextlib.contextmanager
    def answers(kind, settings, source, plan, ema, given, console):
        told.append((source, settings.generate, ema, given))
        yield iter([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_model, "stored_model", lambda _, *which: told.append(which) or home)
        patch.setattr(generate, "run_settings", lambda *given: config)
        patch.setattr(generate, "tokenizer_of", lambda options: plain_bytes())
        patch.setattr(generate, "build_decoder", lambda *given: None)
        patch.setattr(generate, "model_answers", answers)
        generate.GenerateTask().run(config, Console(file=io.StringIO()))
    return told


def sweep_told(config: Config):
    """What `task=sweep_status` prints."""
    home = Path("multirun/s/s-0")
    home.mkdir(parents=True, exist_ok=True)
    (home / job.JOB_FILE).write_text(json.dumps({"job_id": "7", "script": "x"}))
    told, file = [], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(file):
        patch.setattr(job, "job_states", dict)
        try:
            job.sweep_status(config.sweep)
        except ConfigError as error:
            told.append(str(error))
    return told, file.getvalue()


def swept_told(config: Config):
    """Return how many runs a sweep of these settings has in progress, and its objective."""
    return len(find_slots([config], {})), objective_of(config)
