"""Everything of torch that is not its public API. No other module uses any of it.

Torch promises nothing about these names, so each is looked for where it is, and never by torch's version. Each function
says what it is for, which shapes there are (in torch 2.6, 2.9, 2.13 and 2.15), and what happens without it. This module
does not import torch before it is asked for something.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_C10D = "torch.distributed.distributed_c10d"
COMPILER = "torch._dynamo"
"""The module that `DistributedDataParallel()` and `torch.compile()` import, which takes seconds.

For the fork server, which imports it ahead, and for checks whose time does not include it. There is no public name of
it. Without it, each worker imports what it needs.
"""


def release_default_arguments() -> None:
    """Remove the functions of extension modules that hold instances of their types as default arguments.

    For a forked worker, as its last exit handler. What a worker has inherited is frozen (`gc.freeze`), since collecting
    it would take a second of CPU at each exit; so these functions would outlive the interpreter. nanobind reports
    instances that do, with 40 lines on stderr. Triton 3.9 has four such functions, and torch 2.15's compiler imports
    it. The attribute `__nb_signature__` is there for nanobind's stub generator, and has the defaults of each overload
    behind its signature and docstring. Without it, or for instances that others hold, the report is printed.
    """
    for kind in _nanobind_types(object):
        for name, function in list(vars(kind).items()):
            if any(_is_nanobind(type(type(value))) for value in _defaults(function)):
                with contextlib.suppress(AttributeError, TypeError):
                    delattr(kind, name)


def _nanobind_types(base: type) -> Iterator[type]:
    kinds: list[type] = type.__subclasses__(base)
    for kind in kinds:
        if _is_nanobind(type(kind)):
            yield kind
            yield from _nanobind_types(kind)


def _defaults(function: object) -> Iterator[object]:
    for overload in getattr(function, "__nb_signature__", ()):
        for values in overload[2:]:
            yield from values or ()


def _is_nanobind(metaclass: type) -> bool:
    return metaclass.__module__ == "nanobind"


def do_not_compile(function: _Function) -> _Function:
    """Return the function, which torch.compile then calls as it is. As a decorator.

    The public `torch.compiler.disable` does the same, and imports the compiler. The attribute has been read since torch
    2.0. Without it, torch.compile traces the function, and breaks the graph where it cannot.
    """
    vars(function)["_torchdynamo_disable"] = True
    return function


def patch_store_creation(module: types.ModuleType, place: Callable[[str, int], tuple[str, bool]]) -> None:
    """Decide for each TCPStore that torch makes for an address where it connects, and whether a launcher serves it.

    `module`: `torch.distributed.rendezvous`. `place` is called with host name and port, and returns the host name to
    use, and whether this process must be a client there under TORCHELASTIC_USE_AGENT_STORE. All torches since 2.6 have
    the two functions that are replaced. Without them torch is left as it is: every store is taken to be the launcher's.
    """
    original = getattr(module, "_create_c10d_store", None)
    uses_agent_store = getattr(module, "_torchelastic_use_agent_store", None)
    if original is None or uses_agent_store is None or hasattr(original, "__wrapped__"):
        return

    def create_c10d_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        hostname, is_launch_store = place(hostname, port)
        vars(module)["_torchelastic_use_agent_store"] = uses_agent_store if is_launch_store else lambda: False
        try:
            return original(hostname, port, *args, **kwargs)
        finally:
            vars(module)["_torchelastic_use_agent_store"] = uses_agent_store

    create_c10d_store.__wrapped__ = original  # type: ignore[attr-defined]
    vars(module)["_create_c10d_store"] = create_c10d_store


def cpus_near_gpu(mode: str, gpu: int) -> set[int]:
    """Return the CPUs that `--numa-binding=mode` of torchrun binds the worker with this GPU to.

    The function is in `torch/numa/binding.py` from torch 2.9 on, and calls the GPU `gpu_index`, from 2.15 on
    `device_index`. Raises ImportError, AttributeError or TypeError without it: then the job, which asks for the
    binding, ends.
    """
    binding = import_module("torch.numa.binding")
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    choose = binding._get_logical_cpus_to_bind_to  # noqa: SLF001
    name = "device_index" if "device_index" in inspect.signature(choose).parameters else "gpu_index"
    found: set[int] = choose(**{name: gpu}, numa_options=options)
    return found


def has_nccl() -> bool:
    """Return whether a process group of this process uses NCCL; False where torch does not say."""
    module = sys.modules.get(_C10D)
    configs = getattr(getattr(module, "_world", None), "pg_backend_config", {})
    return is_group_made() and any("nccl" in str(config) for config in configs.values())


def abort_process_groups() -> None:
    """Abort all process groups, and forget them, so that others can be made. It waits for no other rank.

    Another thread may be waiting in groups of NCCL. Groups of other backends are only forgotten. Those of NCCL
    are aborted at once, since one may wait for a kernel that waits for the abort of another (pytorch#119797);
    `_abort_process_group` begins with the next when one is done. They are never freed: a destructor waits for threads
    of torch, for a minute or more after an error.

    Raises what `ProcessGroup.abort` does, and may hang (nccl#1777). `_abort_process_group` is in
    `torch.distributed.distributed_c10d` since torch 2.6. Without it the groups are destroyed in the public way, which
    may wait for other ranks if nobody holds them.
    """
    module = import_module("torch.distributed.distributed_c10d")
    if has_nccl():
        groups = [*module._world.pg_names]  # noqa: SLF001
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        with ThreadPoolExecutor(len(groups)) as pool:
            for _ in pool.map(lambda group: group.abort(), groups):
                pass
    abort = getattr(module, "_abort_process_group", None)
    if abort is not None:
        abort()
    if module.is_initialized():
        module.destroy_process_group()


def is_group_made() -> bool:
    """Return whether this process has a default process group."""
    module = sys.modules.get(_C10D)
    return module is not None and bool(module.is_initialized())


def forget_failed_group() -> None:
    """Let the next default group have the name of the first, which it also has in other processes.

    Without a name of its own a group is named by a count, `_world.group_count`. torch sets that back when the default
    group is destroyed, but not if the group could not be made.
    """
    module = sys.modules.get(_C10D)
    world = getattr(module, "_world", None)
    if world is not None and not is_group_made():
        world.group_count = 0


def version(tensor: Any) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor whose changes torch does not count.

    `_version` is in all torches. It does not count changes of `tensor.data` or by fused optimizers. Tensors that were
    made in inference mode have no such number.
    """
    try:
        return int(tensor._version)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return 0


def watch_group_ends(module: types.ModuleType, before: Callable[[], None]) -> None:
    """Call `before()` when the default process group is destroyed or aborted, before anything of it is freed.

    `module`: `torch.distributed.distributed_c10d`, where `destroy_process_group` calls `_update_default_pg(None)` in
    all torches since 2.6. It is not replaced itself, since other modules may have imported it by now. Without
    `_update_default_pg` nothing is called.
    """
    original = getattr(module, "_update_default_pg", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def update_default_pg(pg: Any) -> Any:
        if pg is None:
            before()
        return original(pg)

    vars(module)["_update_default_pg"] = update_default_pg


def collectives_called() -> int:
    """Return how many collectives this process has called in the default group; 0 where torch does not say.

    torch counts them for its Flight Recorder, in all versions since 2.6.
    """
    module = sys.modules.get(_C10D)
    if module is None or not module.is_initialized():
        return 0
    try:
        return int(module.group.WORLD._get_sequence_number_for_group())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return 0


_Made = Callable[..., contextlib.AbstractContextManager[Any]]


def watch_groups(module: types.ModuleType, made: _Made) -> bool:
    """Make process groups in the context `made(options, is_default=...)` from now on. Return False if torch cannot.

    `module`: `torch.distributed.distributed_c10d`, where all torches since 2.6 make every group of new processes in
    `_new_process_group_helper`. `options` are the arguments of `init_process_group`.
    """
    original = getattr(module, "_new_process_group_helper", None)
    if original is None or not {"backend", "global_ranks_in_group"} <= inspect.signature(original).parameters.keys():
        return False
    signature = inspect.signature(original)

    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        options = {name: given[name] for name in ("timeout", "device_id") if given.get(name) is not None}
        backend = str(given["backend"])
        if backend != "undefined":
            options["backend"] = backend
        with made(options, is_default=not given["global_ranks_in_group"]):
            return original(*args, **kwargs)

    vars(module)["_new_process_group_helper"] = new_process_group_helper
    return True


def watch_models(module: types.ModuleType, made: _Made) -> bool:
    """Make models in DistributedDataParallel in the context `made(model)` from now on. Return False if torch cannot.

    `module`: `torch.nn.parallel.distributed`. If the context gives True, the constructor communicates nothing: its
    parameter `init_sync` is False.
    """
    kind = module.DistributedDataParallel
    original = kind.__init__
    if "init_sync" not in inspect.signature(original).parameters:
        return False

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with made(self) as apart:
            if apart:
                kwargs["init_sync"] = False
            original(self, *args, **kwargs)

    kind.__init__ = init
    return True


def watch_meshes(module: types.ModuleType, made: Callable[[], int]) -> None:
    """Have `made()` be called for each device mesh that is made. Those for which it gives other numbers are not equal.

    `module`: `torch.distributed.device_mesh`. DTensor keeps what it has found out about a mesh, as this process's place
    in it, and uses that for equal meshes too (`sharding_propagator`, `_gen_transform_infos`), in C++ and for each
    thread. A mesh of the same size in another world would be equal to the old one, though this process may have another
    rank in it. `_thread_id` is part of what is compared and hashed in all torches since 2.6; it is None, but for
    torch's own tests. Without it, nothing but `made` happens.
    """
    kind = module.DeviceMesh
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        number = made()
        original(self, *args, **kwargs)
        if number and getattr(self, "_thread_id", 0) is None:
            self._thread_id, self._hash = number, None

    kind.__init__ = init


def dtensor_of(local: Any, mesh: Any, placements: Any, shape: Any, stride: tuple[int, ...]) -> Any:
    """Return a DTensor with this local part, which may be on another device than its mesh.

    The public `DTensor.from_local` copies it to that device, where what is restored would need its memory twice. The
    constructor takes a specification, in `_dtensor_spec`, in all torches since 2.6. Without that, it is copied.
    """
    kind = import_module("torch.distributed.tensor").DTensor
    try:
        module = import_module("torch.distributed.tensor._dtensor_spec")
        meta = module.TensorMeta(shape, stride, local.dtype)
        return kind(local, module.DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
    except (ImportError, AttributeError, TypeError):
        return kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def release_model(model: Any) -> None:
    """Keep a model in DistributedDataParallel that is not used any more out of backward passes.

    Its reducer has hooks on the parameters, which other models may have too, until it is freed.
    """
    vars(model).pop("reducer", None)


def renew_model(model: Any) -> None:
    """Let a model in DistributedDataParallel go on with the present default group, as if it was just made.

    Unpickling one does the same: `__setstate__` takes the default group, and makes another reducer, with the buckets of
    a new model. `_update_process_group` would keep the buckets, which a step has made different from a new rank's.
    """
    hooks = list(getattr(model, "_comm_hooks", ()))
    model.process_group = import_module("torch.distributed").group.WORLD  # only with this one can it be pickled
    model.__setstate__(model.__getstate__())
    if hooks:
        model._comm_hooks.clear()  # noqa: SLF001
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


def set_default_timeout(module: types.ModuleType, timeout: timedelta) -> None:
    """Set how long process groups wait for which the script sets no timeout.

    `module`: `torch.distributed.distributed_c10d`, which has imported both defaults from `constants`, and reads them
    when a group is made, in all torches since 2.6. Without them, the script's groups have torch's own default.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if isinstance(getattr(module, name, None), timedelta):
            vars(module)[name] = timeout
