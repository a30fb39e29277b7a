"""JAX's private names: the only module that imports and reads them.

Each is given with the reason for its use and with the fallback for a JAX that lacks it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import Sharding
from jaxlib import _jax, xla_client

_A_DAY = 24 * 3600  # seconds; whoever started the processes looks after them

# Private attributes of JAX's objects.
_devices_of_sharding = attrgetter("_internal_device_list")  # in their order
_program_of_compiled = attrgetter("_executable._unloaded_executable")  # what is to be loaded
_lowering_of = attrgetter("_lowering")
_constants_of_compiled = attrgetter("_params.const_args")
_takes_no_keywords = attrgetter("_no_kwargs")
_registry_of_pytrees = attrgetter("_registry")

Copy = Callable[..., list[jax.Array]]


def batched_copy(to: Sequence[Sharding]) -> Copy | None:
    """Return a function that copies arrays to the shardings of `to`, or None if JAX cannot.

    The function takes one array for each sharding and returns the copies. Every array must be
    sharded as its copy will be, over as many devices of this process and in the same order; this is
    not checked.

    `jax.device_put` ends in this very call. What it works out before that (abstract values, trees,
    how both sides are sharded) costs three times as much as the call, and is known here when the
    step is compiled.
    """
    return _bound(to) if _works() else None


def _bound(to: Sequence[Sharding]) -> Copy:
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    shardings: list[Any] = list(to)
    devices = [_devices_of_sharding(sharding) for sharding in shardings]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)

    def bound(*arrays: jax.Array) -> list[jax.Array]:
        copies: list[jax.Array] = copy(list(arrays), devices, shardings, semantics)
        return copies

    return bound


@functools.cache
def _works() -> bool:
    """Return whether a test copy arrives as it should."""
    here, there = jax.local_devices()[0], jax.local_devices()[-1]
    try:
        (copied,) = _bound([jax.sharding.SingleDeviceSharding(there)])(jax.device_put(7, here))
        return copied.devices() == {there} and int(copied) == 7
    except Exception:  # a private name may fail in any way
        return False


def moves_are_guarded() -> bool:
    """Return whether `jax.transfer_guard` is set for moves between devices.

    The context manager is public, and what it has set is not; to enter it costs as much as to run a
    small task. Without the name: guarded, as far as anybody knows.
    """
    return getattr(jax.config, "jax_transfer_guard_device_to_device", "") not in (None, "allow")


def is_nan_error(error: Exception) -> bool:
    """Return whether a compiled program failed because of `jax_debug_nans`.

    `jax.jit` turns this error of JAX's own into a FloatingPointError; a program that was compiled
    ahead of time lets it through.
    """
    return type(error).__name__ == "InternalFloatingPointError"


def all_gather_text(name: str, own: str) -> list[str]:
    """All-gather one string per process.

    Each `name` can be used once, and none begins with another one and a slash.

    It uses the key-value store that `jax.distributed` has for itself. The public alternative,
    `multihost_utils.process_allgather`, is a program over all devices of all processes, which on
    GPUs takes memory on each for a communicator that nothing else needs.
    """
    if jax.process_count() == 1:
        return [own]
    try:
        from jax._src import distributed

        store: Any = distributed.global_state.client
        tell, wait, read = store.key_value_set, store.wait_at_barrier, store.key_value_dir_get
    except (AttributeError, ImportError):
        return _gathered(own)
    tell(f"{name}/{jax.process_index()}", own)
    wait(name, _A_DAY * 1000)
    return [told for _, told in read(f"{name}/")]


def _gathered(own: str) -> list[str]:
    from jax.experimental import multihost_utils

    data, gather = np.frombuffer(own.encode(), np.uint8), multihost_utils.process_allgather
    longest = int(np.max(gather(np.int32(data.size))))
    every = gather(np.pad(data, (0, longest - data.size)))
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(every)]


def fused_attention() -> Any:
    """Return JAX's module of cuDNN's fused attention, or None.

    It has no public name for its primitives, nor for its check of cuDNN's version.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo
    except ImportError:
        return None
    return fused_attention_stablehlo


@contextmanager
def kernel_lowering() -> Iterator[None]:
    """Lower Pallas kernels by Triton inside, also where there is no GPU, and warn nobody.

    JAX deprecates that in favour of Mosaic, which has no kernels for GPUs before Hopper yet. From
    0.11 on it asks for a GPU, here or described; what it makes is the same for each that we know.
    """
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    if jax.default_backend() == "gpu":
        yield
        return
    gpu: Any = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
        yield


class _Read(threading.local):
    """The entry that this thread's latest compilation read from JAX's compilation cache."""

    is_hit = False
    program: bytes | None = None


_READ = _Read()
_HIT = "/jax/compilation_cache/cache_hits"


def overlap_options(platform: str, bucket_bytes: int, are_several: bool) -> dict[str, Any]:
    """Return the compiler's options under which sums of gradients run beside the backward pass.

    XLA combines collectives of one kind. On CPUs it makes one of them all, which waits for the last
    operand, whatever an `optimization_barrier` says; so that pass is left out. On GPUs it combines
    up to a number of bytes, and starts collectives early where its scheduler hides latencies. The
    names are those of XLA's debug options, which have no public list.

    Args:
        platform: "cpu", "cuda" and so on, as JAX names it.
        bucket_bytes: the bytes of the largest bucket.
        are_several: whether there are several sums, each of one array; none is combined then.
    """
    if platform == "cpu":
        return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"} if are_several else {}
    if platform in ("cuda", "gpu"):
        most = 1 if are_several else bucket_bytes
        return {
            "xla_gpu_all_reduce_combine_threshold_bytes": most,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": most,
            "xla_gpu_enable_latency_hiding_scheduler": True,
        }
    return {}


def with_barriers_kept(platform: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compiler's options with those under which optimization barriers hold to the end.

    What a `jax.checkpoint` recomputes stands behind one, to be computed late. XLA:CPU takes
    them out before it schedules a program, and computes all of it at once; that pass is left out.

    Args:
        platform: "cpu", "cuda" and so on, as JAX names it.
        options: the options without.
    """
    if platform != "cpu":
        return dict(options)
    passes = [options.get("xla_disable_hlo_passes"), "cse_barrier_expander"]
    return {**options, "xla_disable_hlo_passes": ",".join(filter(None, passes))}


def autotune_options(folder: Path, keeps: bool) -> dict[str, Any]:
    """Return the options under which XLA:GPU takes its choices among kernels from a folder.

    Those that are missing there it makes by timing. By default, XLA shares that out among the
    processes of a program, each of which waits for the others, also for one that has found the
    program in JAX's cache and compiles nothing; here each process can choose alone. JAX's cache
    tells programs apart by the folder: up to 0.11 by the first option, and from 0.12 on, which
    leaves that out, by the second, which XLA reads only without the first. The names are as in
    `overlap_options`.

    Args:
        folder: the folder.
        keeps: whether those that were missing are written there.
    """
    mode = "UPDATE" if keeps else "READ"
    return {
        "xla_gpu_per_fusion_autotune_cache_dir": str(folder),
        "xla_gpu_experimental_autotuner_cache_dir": str(folder),
        "xla_gpu_experimental_autotune_cache_mode": f"AUTOTUNE_CACHE_MODE_{mode}",
        "xla_gpu_shard_autotuning": False,
    }


def deterministic_options() -> dict[str, Any]:
    """Return the options under which a program on a GPU gives the same bits at each run.

    XLA then sorts what it scatters, and takes the first kernel that has a fixed order of sums. Its
    `xla_gpu_deterministic_ops` is the older name of that, and also forbids what was chosen before.
    """
    return {"xla_gpu_exclude_nondeterministic_ops": True}


_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_CUDA_PLUGINS = "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"


def described_devices(target_config: str, count: int) -> list[jax.Device]:
    """Return GPUs to compile for that need not be here, as if one host had them all.

    The plug-in looks for a CUDA runtime when JAX first loads it, unless its own variable says not
    to. Where JAX was used before, without one, it has given the plug-in up, which is then asked
    once more. The variable is not left to processes that this one starts.

    Args:
        target_config: what XLA has to know of their kind.
        count: their number.

    Raises:
        NotImplementedError: JAX's plug-in for CUDA is not installed.
    """
    from jax.experimental import topologies

    described = functools.partial(
        topologies.get_topology_desc,
        *("", "cuda"),
        target_config=target_config,
        topology=f"1x1x{count}",
    )
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        return list(described().devices)
    except NotImplementedError:
        for name in _CUDA_PLUGINS:
            with suppress(Exception):  # it is not installed, or fails in any other way
                importlib.import_module(name).initialize()
        return list(described().devices)
    finally:
        del os.environ[_UNCHECKED]
        if before is not None:
            os.environ[_UNCHECKED] = before


def free_of_devices(lowered: jax.stages.Lowered) -> None:
    """Have a program that was lowered on abstract meshes keep no backend alive."""
    _lowering_of(lowered).compile_args["backend"] = None


def bound_to_devices(
    lowered: jax.stages.Lowered, arguments: Sequence[Sharding], results: Sequence[Sharding]
) -> bool:
    """Give a program that was lowered on abstract meshes its devices, as if lowered for these.

    Lowering again takes most of the time of a start whose programs are in the compilation cache.

    Args:
        lowered: the program, of `free_of_devices`.
        arguments: the shardings of its arguments.
        results: those of its results.

    Returns:
        Whether this JAX can do that.
    """
    try:
        devices = _devices_of_sharding([*arguments, *results][0])
        lowering = _lowering_of(lowered)
        about, kept = lowering.compile_args, {"in_shardings": arguments, "out_shardings": results}
        if lowering.const_args or any(len(about[name]) != len(kept[name]) for name in kept):
            return False
        vars(lowering)["_device_list"] = devices
        about |= {name: tuple(each) for name, each in kept.items()}
        about["backend"] = devices[0].client
        return True
    except Exception:  # private names may fail in any way
        return False


def compiled(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes | None]:
    """Compile a program or read it from JAX's compilation cache.

    XLA:CPU cannot serialise a program that it has read itself into one that runs, so the bytes that
    were read are returned too.

    Returns:
        The compiled program, and its bytes as the cache keeps them. These are None if the program
            was not read from the cache, and empty if it was but this JAX does not show them.
    """
    _note_reads()
    _READ.is_hit, _READ.program = False, None
    made = lowered.compile(compiler_options=dict(options or {}) or None)
    return made, (_READ.program or b"") if _READ.is_hit else None


@functools.cache
def _note_reads() -> None:
    def on_event(event: str, **_: Any) -> None:
        if event == _HIT:
            _READ.is_hit = True

    jax.monitoring.register_event_listener(on_event)
    with suppress(AttributeError, ImportError):
        from jax._src import compilation_cache

        cache: Any = compilation_cache
        decompress, extract = cache.decompress_executable, cache.extract_executable_and_time

        def noted(executable: bytes) -> Any:
            found = decompress(executable)
            _READ.program = extract(found)[0]
            return found

        cache.decompress_executable = noted


def around_cache_reads(reading: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have each look-up in JAX's compilation cache happen inside `reading`, given the entry's key.

    An entry that cannot be read raises in there; JAX then compiles the program.
    """
    with suppress(AttributeError, ImportError):
        from jax._src import compilation_cache

        cache: Any = compilation_cache
        read = cache.get_executable_and_time

        def within(key: str, *rest: Any, **named: Any) -> Any:
            with reading(key):
                return read(key, *rest, **named)

        cache.get_executable_and_time = within


def write_cache_by(writing: Callable[[str], AbstractContextManager[str]]) -> None:
    """Have every process write what it compiles to JAX's compilation cache, inside `writing`.

    JAX itself has process 0 alone write, so that what others compile for their own devices is
    compiled at each start. Its function is copied with a view of the group in which this is that
    process: the state itself is read by other threads.

    Args:
        writing: given an entry's key, yields the key to write it under.
    """
    with suppress(AttributeError, ImportError, KeyError):
        from jax._src import compilation_cache, compiler

        cache: Any = compilation_cache
        put, names = cache.put_executable_and_time, vars(compiler)
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        write = FunctionType(names["_cache_write"].__code__, {**names, "distributed": first})

        def within(key: str, *rest: Any, **named: Any) -> None:
            with writing(key) as name:
                put(name, *rest, **named)

        names["_cache_write"], cache.put_executable_and_time = write, within


def loaded_for(
    compiled: Any,
    arguments: Sequence[Sharding],
    results: Sequence[Sharding],
    kept: bytes | None = None,
) -> jax.stages.Compiled | None:
    """Load a compiled program for other devices of this process, without compiling it again.

    It is serialised as JAX's compilation cache does it, and loaded for the devices of `arguments`
    and `results`. These must be as many as it was compiled for, of the same kind and sharded in the
    same way. The public alternative, `jax.experimental.serialize_executable`, loads a program only
    for the devices that it was compiled for.

    Args:
        compiled: the compiled program.
        arguments: the shardings of its arguments on the other devices.
        results: the shardings of its results there.
        kept: the bytes that `compiled` returned with the program.

    Returns:
        The program for the other devices, or None if this JAX or this platform cannot do that.
    """
    try:
        program = _program_of_compiled(compiled)
        if program.host_callbacks or _constants_of_compiled(compiled) or kept == b"":
            return None
        devices = _devices_of_sharding([*arguments, *results][0])
        written = kept or program.xla_executable.serialize()
        executable = program.backend.deserialize_executable(
            written, devices, _compile_options(devices)
        )
        if list(executable.local_devices()) != list(devices):
            return None
        moved = dataclasses.replace(
            program,
            xla_executable=executable,
            device_list=devices,
            input_shardings=tuple(arguments),
            output_shardings=tuple(results),
        )
        about = compiled.args_info, compiled.out_tree, _takes_no_keywords(compiled)
        return jax.stages.Compiled(moved.load(), [], *about)
    except Exception:  # private names may fail in any way
        return None


def _compile_options(devices: Sequence[jax.Device]) -> Any:
    """Return the options with which `jax.jit` compiles one program over these devices."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    options.executable_build_options.use_spmd_partitioning = True
    return options


def pytree_registration(cls: type) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return how a class is registered as a pytree: `(register, arguments)`, or None.

    `register(cls, *arguments)` registers a copy of it in another process. JAX tells publicly
    whether a class is registered, but not how. Key paths of a class whose registration names both a
    `flatten_func` and a function with keys are lost, unless it is `tree_flatten_with_keys`.
    """
    try:
        from jax._src import tree_util

        flatten, unflatten = _registry_of_pytrees(tree_util)[cls]
        held = inspect.getclosurevars(flatten).nonlocals if hasattr(flatten, "__code__") else {}
    except (AttributeError, ImportError, KeyError, ValueError):
        return None
    if "data_fields" in held and "meta_fields" in held:
        data, meta = held["data_fields"], held["meta_fields"]
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        dropped = {field.name for field in fields if field.init} - {*data, *meta}
        return jax.tree_util.register_dataclass, (data, meta, tuple(sorted(dropped)))
    with_keys = held.get("flatten_with_keys")
    if with_keys is None and hasattr(cls, "tree_flatten_with_keys"):
        with_keys = methodcaller("tree_flatten_with_keys")
    return jax.tree_util.register_pytree_node, (flatten, unflatten, with_keys)


def accept_as_array(cls: type, value: Callable[[Any], jax.Array]) -> None:
    """Have JAX's functions take instances of `cls`, as what `value` returns for them.

    By its public protocol, `__jax_array__`, those that are jitted take none.
    """
    with suppress(AttributeError, ImportError):
        from jax._src import core, dtypes
        from jax._src.interpreters import pxla

        def shards(arrays: Sequence[Any], shardings: Any, *rest: Any) -> Any:
            return pxla.shard_args(shardings, *rest, list(map(value, arrays)))

        typeof, handlers = jax.typeof, dtypes.canonicalize_value_handlers
        core.pytype_aval_mappings[cls] = lambda array: typeof(value(array))
        handlers[cls] = value
        pxla.shard_arg_handlers[cls] = shards


_TAKING = threading.RLock()


@contextmanager
def taking_gradients(take: Callable[..., Any]) -> Iterator[None]:
    """Have every `jax.grad` and `jax.value_and_grad` that is called inside ask `take` first.

    `take(fun, primals, has_aux)` returns what `jax.vjp` does, or None to leave it to that. Other
    threads ask it, too, and wait where they enter this themselves. If this JAX computes gradients
    in another way, nothing is asked.

    Each function that takes gradients reads one private name when it is called. Public names are
    bound too early to be replaced: by `from jax import grad`, and by gradient functions that a
    module makes when it is imported.
    """
    from jax._src import api

    name = "_vjp" if hasattr(api, "_vjp") else "vjp"  # the first up to JAX 0.10.1
    with _TAKING:
        kept: Any = getattr(api, name, jax.vjp)

        def asked(fun: Any, *primals: Any, has_aux: bool = False, **rest: Any) -> Any:
            frame: Any = inspect.currentframe()
            taken = None
            if frame.f_back.f_code.co_name == "value_and_grad_f":  # not `jax.jacrev`
                call = getattr(fun, "call_wrapped", fun)
                user = frame.f_back.f_locals["fun"]  # to be named in errors
                named = functools.wraps(user, (), ())(lambda *diff: call(*diff))
                taken = take(named, primals, has_aux)
            return taken or kept(fun, *primals, has_aux=has_aux, **rest)

        setattr(api, name, asked)
        try:
            yield
        finally:
            setattr(api, name, kept)


def bind_collectives(address: str) -> None:
    """Make the collectives between CPU processes listen at this machine's `address`.

    Call it before JAX is first asked for a device. If this JAX sets up these collectives in another
    way, nothing is changed.

    JAX itself gives no address, so that they listen at the one to which the machine's host name
    resolves. That one is open to the network; if the name cannot be resolved, there is none at all.
    """
    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


@contextmanager
def on_cpus() -> Iterator[None]:
    """Have JAX compute on CPUs inside, whatever devices there are, and forget them at the end.

    A trace computes a few values. Without that end, the process could join no other, and on a GPU
    would hold its memory. Arrays made inside keep their values.
    """
    platforms = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        clear_backends()
        jax.config.update("jax_platforms", platforms)


def coordination_service(address: str, count: int) -> Any:
    """Start JAX's coordination service in this process, which is none of the group.

    `jax.distributed.initialize` starts it in process 0, with whose end all others are aborted. The
    service here ends with this process, which aborts all, or with the last reference to it; then it
    waits for processes that are still connected, for five seconds. It never takes one that is
    silent for dead: one that was stopped may continue.

    Args:
        address: where it listens: `HOST:PORT` or `unix:PATH`.
        count: the number of processes.
    """
    return _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=_A_DAY)


def join_processes(coordinator: str, count: int, index: int) -> None:
    """Become process `index` of `count` of the group whose service listens at `coordinator`.

    `jax.distributed.shutdown` leaves it. Call it before JAX is first asked for a device.
    """
    from jax._src import distributed

    state: Any = distributed.global_state
    state.client = _jax.get_distributed_runtime_client(
        coordinator, index, heartbeat_timeout=_A_DAY, use_compression=True
    )
    state.client.connect()
    state.coordinator_address, state.num_processes, state.process_id = coordinator, count, index
